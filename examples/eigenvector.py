"""Power iteration with NumPy: the rows of a matrix are divided among the ranks.

    unisono run -n 4 examples/eigenvector.py

Each rank multiplies its rows, `all_gather` makes the product whole on every rank, `all_reduce` gives its
length.
"""

from __future__ import annotations

import numpy as np

import unisono as un

ROWS_PER_RANK = 50


def main() -> None:
    with un.init_process_group() as world:
        n = ROWS_PER_RANK * world.size
        whole = np.random.default_rng(0).random((n, n))
        whole += whole.T  # symmetric: real eigenvalues; positive: the largest is well apart from the others
        mine = whole[world.rank * ROWS_PER_RANK :][:ROWS_PER_RANK]  # a real program would make only this

        vector, part = np.ones(n), np.empty(ROWS_PER_RANK)
        product, square = np.empty((world.size, ROWS_PER_RANK)), np.empty(1)
        for _ in range(20):
            np.matmul(mine, vector, out=part)
            world.all_gather(product, part)
            square[0] = part @ part
            world.all_reduce(square)
            vector = product.ravel() / np.sqrt(square[0])

        largest = float(np.sqrt(square[0]))
        expected = np.linalg.eigvalsh(whole)[-1]
        assert np.isclose(largest, expected)
        if world.rank == 0:
            print(f"largest eigenvalue of a {n} x {n} matrix: {largest:.6f}, NumPy: {expected:.6f}")


if __name__ == "__main__":
    main()
