"""Gravity between bodies: pieces travel around a ring while each rank computes with the one it has.

    unisono run --replace mpi4py -n 4 examples/mpi/nbody_ring.py

`Isend` and `Irecv` move the next piece during the computation.
"""

import numpy as np
from mpi4py import MPI

BODIES, SOFT = 60, 1e-2


def pull(of: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Accelerations of bodies [n, 3] by others [m, 3] of mass 1."""
    distance = by[None] - of[:, None]
    return (distance / (np.sum(distance**2, axis=2) + SOFT)[..., None] ** 1.5).sum(axis=1)


def accelerations(comm: MPI.Comm, mine: np.ndarray) -> np.ndarray:
    """Of this rank's bodies, by those of all ranks."""
    found, here, there = np.zeros_like(mine), mine.copy(), np.empty_like(mine)
    for _ in range(comm.size):
        moves = [
            comm.Isend(here, (comm.rank + 1) % comm.size),
            comm.Irecv(there, (comm.rank - 1) % comm.size),
        ]
        found += pull(mine, here)
        MPI.Request.Waitall(moves)
        here, there = there, here
    return found


def main() -> None:
    comm = MPI.COMM_WORLD
    bodies = np.random.default_rng(0).standard_normal((BODIES * comm.size, 3))
    mine = bodies[comm.rank * BODIES : (comm.rank + 1) * BODIES]
    found = accelerations(comm, mine)
    assert np.allclose(found, pull(mine, bodies), rtol=1e-12)
    largest = comm.allreduce((float(np.abs(found).max()), comm.rank), MPI.MAXLOC)
    if comm.rank == 0:
        print(f"{len(bodies)} bodies; the largest acceleration, {largest[0]:.6f}, is on rank {largest[1]}")


main()
