"""`rc`: settings that a program makes before it imports `MPI`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

_DEFAULTS: dict[str, Any] = {
    "initialize": True, "threads": True, "thread_level": "multiple", "finalize": None, "fast_reduce": True,
    "recv_mprobe": True, "irecv_bufsz": 32768, "errors": "exception",
}  # fmt: skip

_YES, _NO = (True, "yes"), (False, "no")
_EXPECTED: dict[str, tuple[Any, ...]] = {
    "thread_level": ("single", "funneled", "serialized", "multiple"), "finalize": (None, *_YES, *_NO),
    "errors": ("default", "exception", "abort", "fatal"),
}  # fmt: skip
"""Of the other settings: yes or no; irecv_bufsz is a number of bytes."""
_TRUE, _FALSE = ("1", "true", "yes", "on", "y"), ("0", "false", "no", "off", "n")


def _value(name: str, text: str) -> Any:
    if name == "irecv_bufsz":
        return int(text)
    return text.lower() in _TRUE if text.lower() in _TRUE + _FALSE else text


def _expected(name: str, value: Any) -> bool:
    if name == "irecv_bufsz":
        return type(value) is int and value >= 0
    return value in _EXPECTED.get(name, _YES + _NO)


class Rc:
    """initialize: whether the import begins MPI.  finalize: whether the program's end ends it (None: yes).

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

    def _read(self, environ: Mapping[str, str]) -> None:
        """Take the settings of MPI4PY_RC_INITIALIZE and so on, as mpi4py does when MPI is imported."""
        for name in _DEFAULTS:
            text = environ.get(f"MPI4PY_RC_{name.upper()}", "").strip()
            if text:
                setattr(self, name, _value(name, text))

    def _warn(self) -> None:
        """Warn of values that mean nothing, as mpi4py does when MPI is imported."""
        for name in _DEFAULTS:
            value = getattr(self, name)
            if not _expected(name, value):
                warnings.warn(f"mpi4py.rc.{name}: unexpected value {value!r}", RuntimeWarning, stacklevel=3)

    def _is_no(self, name: str) -> bool:
        """Whether a setting says no. A value that means nothing counts as the default."""
        return _expected(name, value := getattr(self, name)) and value in _NO

    def __dir__(self) -> list[str]:
        return [*_DEFAULTS]

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
