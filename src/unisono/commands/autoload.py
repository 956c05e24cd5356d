"""The function that PyTorch calls at `import torch`: the entry point "torch.backends" in pyproject.toml.

`import torch` must succeed whatever fails here, so an error becomes a warning. With
TORCH_DEVICE_BACKEND_AUTOLOAD=0 PyTorch calls this, since 2.14, when a group asks for the backend "unisono"
("torch.distributed.backends").
"""

from __future__ import annotations

import warnings


def torch_backend() -> None:
    """Register the backend "unisono", and apply UNISONO_REPLACE. It does not load the engine."""
    try:
        import unisono.torch  # noqa: F401  (already being imported if it imports torch)
        from unisono.engine.environment import env

        if env.compared():
            from unisono.compare.recorder import begin

            begin()
    except Exception as error:  # noqa: BLE001  (see above)
        warnings.warn(f"Unisono did not register with PyTorch: {error}", RuntimeWarning, stacklevel=2)
