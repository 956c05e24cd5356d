"""Heat in a rod with NumPy: each rank has a piece, and neighbours exchange the values at their edges.

    unisono run -n 3 examples/heat.py

`isend` and `irecv` start all four messages at once, so no order of calls can make two neighbours wait for
each other.
"""

from __future__ import annotations

import numpy as np

import unisono as un

CELLS_PER_RANK, STEPS, ALPHA = 40, 200, 0.25


def step(rod: np.ndarray) -> None:
    """One step in time, in place; the first and the last value are those of the neighbours."""
    rod[1:-1] += ALPHA * (rod[2:] - 2 * rod[1:-1] + rod[:-2])


def exchange(world: un.Group, rod: np.ndarray) -> None:
    """Fill the outermost values; at the ends of the rod they stay 0, which is cold."""
    works = []
    for neighbour, edge, ghost in (
        (world.rank - 1, rod[1:2], rod[:1]),
        (world.rank + 1, rod[-2:-1], rod[-1:]),
    ):
        if 0 <= neighbour < world.size:
            works += [world.isend(edge, neighbour), world.irecv(ghost, neighbour)]
    for work in works:
        work.wait()


def main() -> None:
    with un.init_process_group() as world:
        n = CELLS_PER_RANK * world.size
        whole = np.zeros(n + 2)
        whole[1 : n // 2] = 1.0  # one half is hot
        mine = whole[world.rank * CELLS_PER_RANK :][: CELLS_PER_RANK + 2].copy()
        for _ in range(STEPS):
            exchange(world, mine)
            step(mine)
            step(whole)  # alone, to compare with
        pieces = [np.empty(CELLS_PER_RANK) for _ in range(world.size)]
        world.gather(mine[1:-1].copy(), pieces if world.rank == 0 else None, dst=0)
        if world.rank == 0:
            assert np.array_equal(np.concatenate(pieces), whole[1:-1])  # the same operations: the same bits
            print(f"{n} cells on {world.size} ranks after {STEPS} steps: as one process computes them")


if __name__ == "__main__":
    main()
