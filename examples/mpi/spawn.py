"""A program that starts more ranks when it sees how much there is to do, and adds up what they find.

    unisono run --replace mpi4py -n 1 examples/mpi/spawn.py

The new ranks run this file, too. They are the other side of an intercommunicator, for both.
"""

import sys

import numpy as np
from mpi4py import MPI

STEPS = 100_000


def worker(parent: MPI.Comm) -> None:
    """Part of the integral of 4 / (1 + x^2) from 0 to 1."""
    steps, comm = parent.bcast(None, root=0), MPI.COMM_WORLD
    x = (np.arange(comm.rank, steps, comm.size) + 0.5) / steps
    parent.Reduce(np.array([(4 / (1 + x * x)).sum() / steps]), None, root=0)
    parent.Disconnect()


def main() -> None:
    """Start three workers, give them the number of steps, and print what they find."""
    workers = MPI.COMM_SELF.Spawn(sys.executable, [__file__], maxprocs=3)
    workers.bcast(STEPS, root=MPI.ROOT)
    found = np.empty(1)
    workers.Reduce(None, found, root=MPI.ROOT)
    workers.Disconnect()
    print(f"pi is {found[0]:.6f}, by 3 new ranks")


if __name__ == "__main__":
    from_others = MPI.Comm.Get_parent()
    if from_others:
        worker(from_others)
    else:
        main()
