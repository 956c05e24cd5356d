"""Without a launcher a program is one rank; it needs neither PyTorch nor mpi4py, and loads MPI when asked."""

import sys

import unisono

assert "unisono.mpi" not in sys.modules
MPI = unisono.MPI
assert MPI.COMM_WORLD.size == 1
assert MPI.COMM_WORLD.allgather(5) == [5]
assert not {"torch", "mpi4py"} & set(sys.modules)
