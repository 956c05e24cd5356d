"""Which shifts of a network map a plan onto itself: one rank of each orbit is then simulated.

The network's symmetry (`Network.symmetry`) has an axis for each digit of a rank's number. An axis folds if
the program of a rank and that of its image under a shift by one are equal, apart from the names of the ranks.
As shifts of an axis are multiples of one, and axes are shifted by themselves, the plan is then invariant
under all shifts of all such axes.

Programs of many ranks are too long to compare all: a few ranks are compared then, and the algorithm has to be
one of the catalogue, for which the tests compare folded and unfolded runs.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

from unisono.networks import Network, Symmetry
from unisono.networks.network import split
from unisono.plans.codes import Programs, translated

__all__ = ["Folding", "folded", "unfolded"]

COMPARED_CODES = 1 << 21
"""If all programs together have no more numbers than this, all are compared."""


class Folding(NamedTuple):
    """Which axes fold.

    Attributes:
        digits: of a rank's number: (size, whether one rank stands for all that differ in this digit).
        order: how many ranks one stands for.
    """

    symmetry: Symmetry | None
    digits: tuple[tuple[int, bool], ...]
    order: int

    def links(self, route: Iterable[int]) -> list[tuple[int, int]]:
        """The links that stand for those of a route, and how many flows of the orbit cross each."""
        weights: dict[int, int] = {}
        for link in route:
            standing, crossing = self.standing(link)
            weights[standing] = weights.get(standing, 0) + crossing
        return list(weights.items())

    def standing(self, link: int) -> tuple[int, int]:
        """(the link that stands for this one, how many shifts map a link of its orbit onto itself)."""
        if self.symmetry is None or self.order == 1:
            return link, 1
        family = next(f for f in self.symmetry.families if f.base <= link < f.base + f.total)
        shift = [0] * len(self.digits)
        orbits: dict[int, int] = {}  # axis -> how many links it distinguishes
        for axis, size, coordinate in zip(
            family.axes, family.sizes, split(link - family.base, family.sizes), strict=True
        ):
            if axis < 0 or not self.digits[axis][1]:
                continue
            period = min(size, self.digits[axis][0])
            if axis not in orbits and coordinate < period:
                shift[axis] = -coordinate
            orbits[axis] = math.lcm(orbits.get(axis, 1), period)
        return self.symmetry.link_image(link, shift), self.order // math.prod(orbits.values())

    def standing_rank(self, rank: int) -> int:
        """The rank that stands for this one."""
        if self.order == 1:
            return rank
        unit, found = 1, 0
        for size, moved in reversed(self.digits):
            rank, digit = divmod(rank, size)
            found += 0 if moved else digit * unit
            unit *= size
        return found


def unfolded() -> Folding:
    """Every rank stands for itself."""
    return Folding(None, (), 1)


def folded(network: Network, programs: Programs, root: int, *, trusted: bool) -> Folding:
    """The axes of the network that fold for these programs.

    trusted: comparing some ranks is enough.
    """
    symmetry = network.symmetry
    if symmetry is None or network.stores:
        return unfolded()
    length = sum(map(len, programs.blocks(0)))
    if length * network.size <= COMPARED_CODES:
        ranks: Iterable[int] = range(network.size)
    elif trusted:
        long = length > COMPARED_CODES // 64
        ranks = sorted({0, network.size - 1, root} if long else _spread(network.size, root))
    else:
        return unfolded()
    digits = []
    for number, axis in enumerate(symmetry.axes):
        folds = axis.kind != "fixed" and axis.size > 1
        digits.append((axis.size, folds and _invariant(symmetry, number, programs, ranks)))
    order = math.prod(size for size, moved in digits if moved)
    return Folding(symmetry, tuple(digits), order) if order > 1 else unfolded()


def _spread(size: int, root: int) -> set[int]:
    """Both ends, the middle, those beside, and some in between."""
    near = {0, 1, 2, size // 2 - 1, size // 2, size - 2, size - 1, root, root + 1}
    return {rank % size for rank in near | {size * k // 7 + k for k in range(7)}}


def _invariant(symmetry: Symmetry, axis: int, programs: Programs, ranks: Iterable[int]) -> bool:
    """Whether the programs of these ranks and of their images under a shift by one are equal."""
    shift = [int(number == axis) for number in range(len(symmetry.axes))]
    images: dict[int, int] = {}

    def image(rank: int) -> int:
        if rank not in images:
            images[rank] = symmetry.image(rank, shift)
        return images[rank]

    for rank in ranks:
        pairs = zip_longest(programs.blocks(rank), programs.blocks(image(rank)), fillvalue=array("i"))
        for mine, theirs in pairs:
            if len(mine) != len(theirs):
                return False
            if translated(mine, image, ordered=False) != translated(theirs, int, ordered=False):
                return False
    return True
