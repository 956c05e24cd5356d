"""What PyTorch calls at `import torch`: the entry point of the group "torch.backends" in pyproject.toml.

`import torch` must go on whatever is wrong here, so an error becomes a warning. PyTorch does not call this
when TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""

from __future__ import annotations

import warnings

__all__ = ["torch_backend"]


def torch_backend() -> None:
    """Register the backend "unisono", and do what UNISONO_REPLACE asks for. Loads no part of the engine."""
    try:
        import unisono.torch  # noqa: F401  (already under way when that is what imports torch)
    except Exception as error:  # noqa: BLE001  (see above)
        warnings.warn(f"Unisono did not register with PyTorch: {error}", RuntimeWarning, stacklevel=2)
