"""`rc`: settings that a program makes before it imports `MPI`."""

from __future__ import annotations

from typing import Any

_DEFAULTS: dict[str, Any] = {
    "initialize": True, "threads": True, "thread_level": "multiple", "finalize": None, "fast_reduce": True,
    "recv_mprobe": True, "irecv_bufsz": 32768, "errors": "exception",
}  # fmt: skip


class Rc:
    """initialize: whether the import begins MPI.  finalize: whether the end of the program ends it (None: yes).

    The other settings are those of mpi4py, and have no effect.
    """

    initialize: bool
    finalize: bool | None

    def __init__(self, **settings: Any) -> None:
        self(**settings)

    def __call__(self, **settings: Any) -> None:
        """Change settings."""
        for name, value in settings.items():
            if name not in _DEFAULTS:
                raise TypeError(f"unexpected argument {name!r}")
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _DEFAULTS:
            raise AttributeError(f"rc has no attribute {name!r}")
        return _DEFAULTS[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _DEFAULTS:
            raise TypeError(f"unexpected attribute {name!r}")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"rc({', '.join(f'{name}={getattr(self, name)!r}' for name in _DEFAULTS)})"


rc = Rc()
