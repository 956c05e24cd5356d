"""Rank 1 sends three numbers to rank 0, which expects two. In `Scatterv` rank 1 expects one too many.

Arguments: the collective; "world", or "twin", whose first collectives are messages. Prints what ranks get.
"""

import sys

import numpy as np

from unisono import MPI
from unisono.errors import Mismatch

name, where = sys.argv[1:]
comm = MPI.COMM_WORLD if where == "world" else MPI.COMM_WORLD.Dup()
first, kind, x, y = comm.rank == 0, MPI.DOUBLE, np.arange(8.0), np.full(8, -1.0)
sent, expected = [2 if first else 3, 2], [2, 2]
calls = {
    "Gatherv": lambda: comm.Gatherv([x, sent[0]], [y, expected] if first else None),
    "Scatterv": lambda: comm.Scatterv([x, expected] if first else None, [y, sent[0]]),
    "Allgatherv": lambda: comm.Allgatherv([x, sent[0]], [y, [2, sent[0]]]),
    "Alltoallv": lambda: comm.Alltoallv([x, sent], [y, expected]),
    "Alltoallw": lambda: comm.Alltoallw([x, sent, [0, 32], [kind] * 2], [y, expected, [0, 16], [kind] * 2]),
}
try:
    calls[name]()
    text = f"{y[y != -1].tolist()}"
except (Mismatch, MPI.Exception) as error:
    text = f"{type(error).__name__} {error}".splitlines()[0]
assert y[5] == -1, y
print(f"{comm.rank} got {text}", flush=True)
