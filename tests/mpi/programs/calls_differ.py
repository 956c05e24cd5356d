"""Ranks that call different things. Then a barrier: what no rank had to wait for shows there."""

import sys

import numpy as np

from unisono import MPI

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
x, y, whole = np.full(3, float(RANK)), np.zeros(3), np.zeros(3 * SIZE)
longer = [whole, [3] * (SIZE - 1) + [2]]

CALLS = {
    "bcast roots": lambda: COMM.bcast(RANK, root=RANK),
    "gather roots": lambda: COMM.gather(RANK, root=RANK),
    "scatter roots": lambda: COMM.scatter([RANK] * SIZE, root=RANK),
    "reduce roots": lambda: COMM.reduce(RANK, root=RANK),
    "reduce operations": lambda: COMM.reduce(RANK, [MPI.SUM, MPI.MAX][RANK % 2]),
    "allreduce operations": lambda: COMM.allreduce(RANK, [MPI.LAND, MPI.LOR][RANK % 2]),
    "bcast and gather": lambda: COMM.bcast(RANK) if RANK else COMM.gather(RANK),
    "bcast and Bcast": lambda: COMM.bcast(x) if RANK else COMM.Bcast(x),
    "barrier and bcast": lambda: COMM.barrier() if RANK else COMM.bcast(RANK),
    "allgather and alltoall": lambda: COMM.allgather(RANK) if RANK else COMM.alltoall([0] * SIZE),
    "scan and exscan": lambda: COMM.scan(RANK) if RANK else COMM.exscan(RANK),
    "Scan and Alltoallv": lambda: COMM.Scan(x, y) if RANK else COMM.Alltoallv([whole, 3], [whole.copy(), 3]),
    "Bcast of nothing": lambda: COMM.Bcast(x if RANK else x[:0]),
    "Gatherv roots": lambda: COMM.Gatherv(x, [whole, 3], root=RANK),
    "Gatherv lengths": lambda: COMM.Gatherv(x, longer, root=0),
    "Scatterv lengths": lambda: COMM.Scatterv(longer, x, root=0),
    "Allgatherv lengths": lambda: COMM.Allgatherv(x if RANK == 0 else x[:2], [whole, 3]),
}
CALLS[sys.argv[1]]()
COMM.Barrier()
