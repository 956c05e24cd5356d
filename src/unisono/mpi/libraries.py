"""Libraries that take a communicator of C (petsc4py, h5py with mpio, dolfinx, mpi4jax): none is here."""

from __future__ import annotations

from unisono.errors import message

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
