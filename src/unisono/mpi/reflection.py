"""What mpi4py's own modules, and libraries that take a communicator of C, ask of `MPI` by private names.

Of petsc4py, h5py with mpio, dolfinx and mpi4jax none is here.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

from unisono.errors import message
from unisono.mpi.datatype import Datatype
from unisono.mpi.handle import Handle
from unisono.mpi.layout import codes
from unisono.mpi.status import Status

_OF_C = ("_addressof", "_handleof", "__pyx_capi__")


class NoCommunicatorOfC(AttributeError, NotImplementedError):
    """A library asks for what only MPI's own library has."""


def refused(module: str, name: str) -> AttributeError:
    """The error for a name that the module MPI does not have."""
    if name not in _OF_C:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return NoCommunicatorOfC(
        message(
            f"MPI.{name} gives libraries written in C a communicator of MPI, and Unisono is no MPI library",
            remedy="Start programs with petsc4py, h5py's mpio, dolfinx or mpi4jax by mpiexec, with mpi4py; "
            "un.init_process_group(backend='mpi') gives them Unisono's calls over MPI.",
        )
    )


_HANDLE_BYTES, _STATUS_BYTES = 8, 20
_typedict = codes


def _typecode(datatype: Datatype) -> str | None:
    """NumPy's character of a named type, or None."""
    return None if datatype._state is None else datatype._state.code


def _typealign(datatype: Datatype) -> int | None:
    """The alignment of a named type, or None."""
    state = datatype._state
    return state.layout.align if state is not None and not state.types else None


def _sizeof(arg: Any) -> int:
    """The bytes of a handle, or of a status."""
    kind = arg if isinstance(arg, type) else type(arg)
    if not issubclass(kind, Handle | Status):
        raise TypeError(f"{kind.__name__} is no class of MPI")
    return _STATUS_BYTES if issubclass(kind, Status) else _HANDLE_BYTES


def _addressof(arg: Any) -> NoReturn:
    """Refused: what lies at an address of a library of MPI is not here."""
    raise refused("unisono.MPI", "_addressof")


def _handleof(arg: Any) -> NoReturn:
    """Refused: it is the handle of a library of MPI."""
    raise refused("unisono.MPI", "_handleof")


def _comm_lock_table(comm: Any) -> dict[str, Any]:
    """The locks of a communicator, by name."""
    return comm._alive().locks


def _comm_lock(comm: Any, key: str) -> Any:
    """A lock of a communicator."""
    return _comm_lock_table(comm).setdefault(key, threading.Lock())
