"""`rc`: settings that a program makes before it imports `MPI`; they lie where an import begins nothing."""

from unisono.mpi4py.rc import rc

__all__ = ["rc"]
