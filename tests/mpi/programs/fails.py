"""Rank 1 does what the argument says; the others wait for it."""

import os
import signal
import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.rank == 1:
    if sys.argv[1] == "raise":
        raise ValueError("no such file: data-1.npy")
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "abort":
        comm.Abort(3)
    MPI._addressof(comm)
comm.recv(source=1)
