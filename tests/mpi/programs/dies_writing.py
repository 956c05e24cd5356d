"""Rank 1 is killed while all ranks write interleaved pieces of bytes 1000 to 2500 of a file."""

import os
import signal
import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
file = MPI.File.Open(comm, sys.argv[1], MPI.MODE_RDWR)
stripes = MPI.BYTE.Create_vector(50, 10, 30).Create_resized(0, 1500).Commit()
file.Set_view(1000 + 10 * comm.rank, MPI.BYTE, stripes)
for turn in range(1000):
    if comm.rank == 1 and turn == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    file.Write_at_all(0, np.full(500, 65 + comm.rank, np.uint8))
raise AssertionError("no rank was lost")
