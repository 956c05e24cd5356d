"""Heat on a plate: a Cartesian grid of ranks, which exchange rows and columns with their neighbours.

    unisono run --replace mpi4py -n 4 examples/mpi/halo.py

Columns are no contiguous memory: a vector type describes them, and nothing is copied by the program.
"""

import numpy as np
from mpi4py import MPI

N, STEPS = 24, 50


def exchange(cart: MPI.Cartcomm, plate: np.ndarray, column: MPI.Datatype) -> None:
    """Fill the outermost rows and columns with those of the neighbours; at the ends they stay."""
    width = plate.shape[1]
    up, down = cart.Shift(0, 1)
    left, right = cart.Shift(1, 1)
    cart.Sendrecv(plate[1], up, 0, plate[-1], down, 0)
    cart.Sendrecv(plate[-2], down, 1, plate[0], up, 1)
    flat = plate.reshape(-1)

    def at(index: int) -> list[object]:
        return [flat[index:], 1, column]

    cart.Sendrecv(at(1), left, 2, at(width - 1), right, 2)
    cart.Sendrecv(at(width - 2), right, 3, at(0), left, 3)


def smooth(plate: np.ndarray) -> None:
    """One step in time, in place."""
    inner = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
    plate[1:-1, 1:-1] = inner / 4


def main() -> None:
    world = MPI.COMM_WORLD
    dims = MPI.Compute_dims(world.size, 2)
    cart = world.Create_cart(dims, periods=[False, False])
    shape = [N // dim for dim in dims]
    first = [place * size for place, size in zip(cart.coords, shape, strict=True)]
    whole = np.zeros((shape[0] * dims[0] + 2, shape[1] * dims[1] + 2))
    whole[0] = 100.0  # one edge is hot
    plate = whole[first[0] : first[0] + shape[0] + 2, first[1] : first[1] + shape[1] + 2].copy()
    column = MPI.DOUBLE.Create_vector(plate.shape[0], 1, plate.shape[1]).Commit()
    for _ in range(STEPS):
        exchange(cart, plate, column)
        smooth(plate)
        smooth(whole)  # what one process would do
    here = whole[first[0] + 1 : first[0] + shape[0] + 1, first[1] + 1 : first[1] + shape[1] + 1]
    assert (plate[1:-1, 1:-1] == here).all()
    heat = cart.reduce(float(plate[1:-1, 1:-1].sum()))
    if cart.rank == 0:
        print(f"heat on {dims[0]} x {dims[1]} ranks after {STEPS} steps: {heat:.6f}")


main()
