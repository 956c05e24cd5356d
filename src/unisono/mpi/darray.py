"""Which indices of a distributed array a rank has, along each axis."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.mpi import constants
from unisono.mpi.errors import Exception


def owned_indices(
    size: int,
    rank: int,
    gsizes: Sequence[int],
    distribs: Sequence[int],
    dargs: Sequence[int],
    psizes: Sequence[int],
) -> list[list[int]]:
    """The indices of `rank` along each axis. The grid of ranks is in C order.

    Example: 5 elements over 2 ranks, cyclic by 2: rank 0 has [0, 1, 4].
    """
    grid = 1
    for one in psizes:
        grid *= one
    if grid != size or not 0 <= rank < size:
        raise Exception(constants.ERR_ARG, f"rank {rank} of {size}, and a grid {list(psizes)}")
    coordinates = []
    for one in reversed(psizes):
        coordinates.append(rank % one)
        rank //= one
    return [
        _owned(*axis) for axis in zip(gsizes, distribs, dargs, psizes, reversed(coordinates), strict=True)
    ]


def _owned(length: int, distribution: int, argument: int, ranks: int, mine: int) -> list[int]:
    if distribution == constants.DISTRIBUTE_NONE:
        if ranks != 1:
            raise Exception(constants.ERR_ARG, f"an axis that is not distributed has {ranks} ranks")
        return list(range(length))
    default = argument == constants.DISTRIBUTE_DFLT_DARG
    if distribution == constants.DISTRIBUTE_CYCLIC:
        block = 1 if default else argument
    elif distribution == constants.DISTRIBUTE_BLOCK:
        block = -(-length // ranks) if default else argument
        if block * ranks < length:
            raise Exception(constants.ERR_ARG, f"{ranks} blocks of {block} hold no {length} elements")
    else:
        raise Exception(constants.ERR_ARG, f"there is no distribution {distribution}")
    if block < 1:
        raise Exception(constants.ERR_ARG, f"a block has {block} elements")
    return [index for index in range(length) if index // block % ranks == mine]
