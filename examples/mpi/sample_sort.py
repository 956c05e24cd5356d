"""Sample sort: each rank sorts its numbers, all agree on the bounds, and each number goes to its rank.

    unisono run --replace mpi4py -n 4 examples/mpi/sample_sort.py

`Alltoallv` moves pieces whose sizes only their senders know; `Alltoall` tells them first.
"""

from itertools import pairwise

import numpy as np
from mpi4py import MPI

PER_RANK = 5000


def sample_sort(comm: MPI.Comm, numbers: np.ndarray) -> np.ndarray:
    """The numbers of all ranks, sorted: this rank's part of them."""
    numbers = np.sort(numbers)
    samples = np.empty((comm.size, comm.size))
    comm.Allgather(numbers[:: -(-len(numbers) // comm.size)][: comm.size].copy(), samples)
    bounds = np.sort(samples, axis=None)[comm.size :: comm.size]
    sent = np.diff(np.concatenate([[0], np.searchsorted(numbers, bounds), [len(numbers)]])).astype("i")
    received = np.empty_like(sent)
    comm.Alltoall(sent, received)
    mine = np.empty(received.sum())
    comm.Alltoallv([numbers, (sent, None)], [mine, (received, None)])
    return np.sort(mine)


def main() -> None:
    comm = MPI.COMM_WORLD
    numbers = np.random.default_rng(comm.rank).standard_normal(PER_RANK)
    mine = sample_sort(comm, numbers)
    edges = comm.allgather((mine[0], mine[-1], len(mine)))
    assert all(before[1] <= after[0] for before, after in pairwise(edges))
    assert sum(edge[2] for edge in edges) == PER_RANK * comm.size
    total, expected = comm.allreduce(mine.sum()), comm.allreduce(numbers.sum())
    assert abs(total - expected) < 1e-9
    if comm.rank == 0:
        print(f"{PER_RANK * comm.size} numbers sorted, pieces of {[edge[2] for edge in edges]}")


main()
