"""The layouts of derived datatypes: each function makes that of `Datatype.Create_...` of its name.

one: the layout of the old type. A stride or displacement of items is in its extents; of h... types in bytes.
"""

from __future__ import annotations

import math

import numpy as np

from unisono.mpi import constants
from unisono.mpi.errors import Exception
from unisono.mpi.layout import Layout, joined, padded, repeated


def contiguous(one: Layout, count: int) -> Layout:
    """`count` items."""
    return repeated(one, count, one.extent)


def vector(one: Layout, count: int, blocklength: int, stride: int) -> Layout:
    """`count` blocks, `stride` items apart."""
    return repeated(repeated(one, blocklength, one.extent), count, stride * one.extent)


def hvector(one: Layout, count: int, blocklength: int, stride: int) -> Layout:
    """`count` blocks, `stride` bytes apart."""
    return repeated(repeated(one, blocklength, one.extent), count, stride)


def indexed(one: Layout, blocklengths: list[int], displacements: list[int]) -> Layout:
    """Blocks of these lengths, displaced by items."""
    return _blocks([one] * len(blocklengths), blocklengths, displacements, one.extent)


def hindexed(one: Layout, blocklengths: list[int], displacements: list[int]) -> Layout:
    """Blocks of these lengths, displaced by bytes."""
    return _blocks([one] * len(blocklengths), blocklengths, displacements)


def indexed_block(one: Layout, blocklength: int, displacements: list[int]) -> Layout:
    """Blocks of one length, displaced by items."""
    count = len(displacements)
    return _blocks([one] * count, [blocklength] * count, displacements, one.extent)


def hindexed_block(one: Layout, blocklength: int, displacements: list[int]) -> Layout:
    """Blocks of one length, displaced by bytes."""
    count = len(displacements)
    return _blocks([one] * count, [blocklength] * count, displacements)


def subarray(
    one: Layout, sizes: list[int], subsizes: list[int], starts: list[int], order: int = constants.ORDER_C,
) -> Layout:  # fmt: skip
    """A part of an array."""
    if not len(sizes) == len(subsizes) == len(starts):
        raise ValueError(f"expecting {len(sizes)} items in sizes, subsizes and starts")
    axes = list(zip(sizes, subsizes, starts, strict=True))
    if any(part < 1 or start < 0 or start + part > size for size, part, start in axes):
        raise Exception(constants.ERR_ARG, f"part {subsizes} at {starts} of an array {sizes}")
    made, shift, step = one, 0, one.extent
    for size, part, start in reversed(axes) if order == constants.ORDER_C else axes:
        made = repeated(made, part, step)
        shift += start * step
        step *= size
    return joined([(shift, made)]).resized(0, step)


def darray(
    one: Layout, size: int, rank: int, gsizes: list[int], distribs: list[int], dargs: list[int],
    psizes: list[int], order: int = constants.ORDER_C,
) -> Layout:  # fmt: skip
    """The part that `rank` has of an array that is distributed over a grid of `size` ranks."""
    if math.prod(psizes) != size or not 0 <= rank < size:
        raise Exception(constants.ERR_ARG, f"rank {rank} of {size}, and a grid {psizes}")
    mine = [int(at) for at in np.unravel_index(rank, psizes)]  # the grid of ranks is in C order
    axes = list(zip(gsizes, distribs, dargs, psizes, mine, strict=True))
    made, step = one, one.extent
    for axis in reversed(axes) if order == constants.ORDER_C else axes:
        made = joined([(index * step, made) for index in _owned(*axis)])
        step *= axis[0]
    return made.resized(0, step)


def resized(one: Layout, lb: int, extent: int) -> Layout:
    """The same data with other bounds."""
    return one.resized(lb, extent)


def struct(types: list[Layout], blocklengths: list[int], displacements: list[int]) -> Layout:
    """Blocks of these lengths and types, displaced by bytes."""
    return padded(_blocks(types, blocklengths, displacements))


def _blocks(types: list[Layout], lengths: list[int], displacements: list[int], unit: int = 1) -> Layout:
    """Blocks of `lengths` items each, displaced by units of bytes."""
    if not len(types) == len(lengths) == len(displacements):
        raise ValueError(f"{len(lengths)} lengths, {len(displacements)} displacements, {len(types)} types")
    parts = zip(types, lengths, displacements, strict=True)
    return joined((at * unit, repeated(one, length, one.extent)) for one, length, at in parts)


def _owned(length: int, distribution: int, argument: int, ranks: int, mine: int) -> list[int]:
    """The indices that a rank has along an axis of a distributed array.

    Example: 5 elements over 2 ranks, cyclic by 2: rank 0 has [0, 1, 4].
    """
    alone, cyclic = (distribution == one for one in (constants.DISTRIBUTE_NONE, constants.DISTRIBUTE_CYCLIC))
    if (alone and ranks != 1) or not (alone or cyclic or distribution == constants.DISTRIBUTE_BLOCK):
        raise Exception(constants.ERR_ARG, f"an axis over {ranks} ranks has distribution {distribution}")
    block = argument
    if alone or argument == constants.DISTRIBUTE_DFLT_DARG:
        block = 1 if cyclic else -(-length // ranks)
    if (block < 1 and not alone) or not (cyclic or block * ranks >= length):
        raise Exception(constants.ERR_ARG, f"{ranks} blocks of {block} hold no {length} elements")
    return [index for index in range(length) if index // block % ranks == mine]
