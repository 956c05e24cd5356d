"""Rank 1 fails while rank 0 waits for its message."""

from unisono import MPI

if MPI.COMM_WORLD.rank == 1:
    raise KeyError("the reason")
MPI.COMM_WORLD.recv(source=1)
