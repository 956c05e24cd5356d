"""Conjugate gradient for a chain of springs: each rank has some rows of the matrix.

    unisono run --replace mpi4py -n 4 examples/mpi/conjugate_gradient.py

Two sums over all ranks per step are the whole communication, besides one number to each neighbour.
"""

import numpy as np
from mpi4py import MPI

ROWS = 50
comm = MPI.COMM_WORLD
left = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
right = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """Over all ranks."""
    total = np.array([a @ b])
    comm.Allreduce(MPI.IN_PLACE, total)
    return float(total[0])


def times(x: np.ndarray) -> np.ndarray:
    """The matrix (2.5 on its diagonal, -1 beside it) times x."""
    padded = np.zeros(len(x) + 2)
    padded[1:-1] = x
    comm.Sendrecv(padded[1:2], left, 0, padded[-1:], right, 0)
    comm.Sendrecv(padded[-2:-1], right, 1, padded[:1], left, 1)
    return 2.5 * x - padded[:-2] - padded[2:]


def main() -> None:
    b = np.random.default_rng(comm.rank).standard_normal(ROWS)
    x, r = np.zeros(ROWS), b.copy()
    p, rr, steps = r.copy(), dot(r, r), 0
    while rr > 1e-20:
        ap = times(p)
        alpha = rr / dot(p, ap)
        x, r = x + alpha * p, r - alpha * ap
        before, rr = rr, dot(r, r)
        p, steps = r + rr / before * p, steps + 1
    wrong = np.abs(times(x) - b).max()
    wrong = comm.reduce(wrong, MPI.MAX)
    if comm.rank == 0:
        assert wrong < 1e-9
        print(f"{ROWS * comm.size} unknowns in {steps} steps")


main()
