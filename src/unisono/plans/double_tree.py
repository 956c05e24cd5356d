"""Two binary trees, each for one half of the buffer: a leaf of one tree is an inner node of the other.

So every rank sends and receives about the size of its buffer, in 2 log2 p rounds, once segments fill the
trees.
Source: Sanders, Speck, Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35 (2009); the second tree is the first one mirrored or shifted, as in NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.plans.plan import Out, Recv, Reduce, Send, Step

__all__ = ["all_reduce", "broadcast"]


def parent(place: int, size: int) -> int:
    """The parent of `place` in the in-order tree over places 1..size; 0 for the root. Odd places are leaves.

    Example (size=6): 4 is the root; below it 2 and 6; 1 and 3 are below 2, 5 is below 6.
    """
    bit = place & -place
    above = (place ^ bit) | bit << 1
    return above if above <= size else place ^ bit


class TreeNode:
    """A rank's neighbours in tree 0 or 1 over `ranks`.

    Attributes:
        above: its parent, or None.  below: its children.  root: of the tree.
    """

    def __init__(self, number: int, rank: int, ranks: tuple[int, ...]) -> None:
        size = len(ranks)
        order = [*ranks] if number == 0 else [*reversed(ranks)] if size % 2 == 0 else [*ranks[1:], ranks[0]]
        place = order.index(rank) + 1
        up = parent(place, size)
        self.above = order[up - 1] if up else None
        self.below = tuple(order[child - 1] for child in range(1, size + 1) if parent(child, size) == place)
        self.root = order[(1 << (size.bit_length() - 1)) - 1]


def all_reduce(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """Each half of the buffer goes up its tree and down again. Leaves send first, and receive last."""
    trees = [TreeNode(number, rank, tuple(range(size))) for number in (0, 1)]
    leaves_first = sorted((0, 1), key=lambda number: len(trees[number].below))
    for number in leaves_first:
        tree, half = trees[number], Out(number)
        if tree.below or size == 1:
            yield Reduce(half, frm=(rank, *tree.below))
        if tree.above is not None:
            yield Send(half, to=(tree.above,))
    for number in reversed(leaves_first):
        yield from _down(trees[number], number)


def broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """The root sends each half to the root of a tree over all other ranks."""
    ranks = tuple((root + distance) % size for distance in range(1, size))
    if rank == root:
        for number in (0, 1):
            first = (TreeNode(number, ranks[0], ranks).root,) if ranks else ()
            yield Send(Out(number), to=first)
        return
    trees = [TreeNode(number, rank, ranks) for number in (0, 1)]
    for number in sorted((0, 1), key=lambda number: -len(trees[number].below)):
        yield from _down(trees[number], number, root)


def _down(tree: TreeNode, half: int, source: int | None = None) -> Iterator[Step]:
    above = source if tree.above is None else tree.above
    if above is not None:
        yield Recv(Out(half), frm=above)
    if tree.below:
        yield Send(Out(half), to=tree.below)
