"""Indices: the dims of all values of a program that can only be cut together.

As in index notation, a matrix product [m, k] @ [k, n] -> [m, n] says which dims of its inputs and its output
are one index. Here the indices run through the whole program. A dim may be a product of indices, as a view
makes it ([heads, size] -> heads * size), or a row of segments, as a concatenation makes it.

    fc1.weight [n, m]   x [b, m] -> h [b, n]   relu(h) [b, n]   fc2.weight [o, n]: n is contracted

Here n may be cut: each rank computes its part of h, and the sum over ranks is fc2's output. An operator that
needs all of a dim, such as softmax, blocks its index: it stays whole, and the text says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


class Index:
    """Dims that are cut together. Two indices that are joined are one from then on: see `root`.

    Attributes:
        unit: the greatest common divisor of the sizes of its dims: what the number of parts must divide.
        why: the reason why it must stay whole; empty: it may be cut.
        marks: where its dims would have to be cut into segments first, as shares of 1.
    """

    def __init__(self, size: int, why: str = "") -> None:
        self._parent: Index | None = None
        self.unit, self.why = size, why
        self.marks: set[tuple[int, int]] = set()

    def root(self) -> Index:
        """The index that stands for all joined with this one."""
        here = self
        while here._parent is not None:
            if here._parent._parent is not None:
                here._parent = here._parent._parent
            here = here._parent
        return here

    def join(self, other: Index) -> Index:
        """Make both one."""
        first, second = self.root(), other.root()
        if first is not second:
            second._parent = first
            first.unit = math.gcd(first.unit, second.unit)
            first.why = first.why or second.why
            first.marks |= second.marks
        return first


@dataclass(frozen=True)
class Factor:
    """An index within a dim, and the size it has there."""

    index: Index
    size: int


Segment = tuple[Factor, ...]  # a product, the first factor is the major one; sizes of 1 are left out
Dim = tuple[Segment, ...]  # one after the other
Dims = list[Dim]


def one(size: int, why: str = "") -> Dim:
    """A dim with an index of its own."""
    return ((Factor(Index(size, why), size),) if size != 1 else (),)


def size_of(dim: Dim) -> int:
    """Its number of elements."""
    return sum(math.prod(factor.size for factor in segment) for segment in dim)


def roots(dims: Iterable[Dim]) -> set[Index]:
    """The indices of these dims."""
    return {factor.index.root() for dim in dims for segment in dim for factor in segment}


def repeated(dims: Iterable[Dim]) -> set[Index]:
    """The indices that two of these dims have, or one dim twice: n in h[:, None] * h[:, :, None].

    A cut through both leaves each rank a block of the diagonal, which is no part of the value.
    """
    seen, found = set[Index](), set[Index]()
    for dim in dims:
        for segment in dim:
            here = [factor.index.root() for factor in segment]
            found |= {index for index in here if index in seen or here.count(index) > 1}
        seen |= roots([dim])
    return found


def mixed(dims: Iterable[Dim], chosen: set[Index]) -> bool:
    """Whether a dim has segments that are cut beside whole ones, as torch.cat of both makes it."""
    return any(len({bool(roots([(segment,)]) & chosen) for segment in dim}) == 2 for dim in dims)


def block(dim: Dim, why: str) -> None:
    """Its indices stay whole."""
    for index in roots([dim]):
        index.why = index.why or why


def block_all(dims: Iterable[Dim], why: str) -> None:
    """The indices of all these dims stay whole."""
    for dim in dims:
        block(dim, why)


def inner(size: int) -> list[Factor]:
    """What follows the major part of an index that a view splits: no cut reaches it."""
    return [Factor(Index(size, "only the major part of a dimension that is split can be cut"), size)] * (
        size != 1
    )


def join(first: Dim, second: Dim, why: str) -> Dim:
    """Make two dims of one size equal; `why`: the reason where they cannot be cut alike."""
    if len(first) == len(second):
        sizes = [size_of((segment,)) for segment in first]
        if sizes == [size_of((segment,)) for segment in second]:
            for a, b in zip(first, second, strict=True):
                _join(list(a), list(b), why)
            return first
    elif min(len(first), len(second)) == 1:
        single, several = (first, second) if len(first) == 1 else (second, first)
        mark(single, list(_bounds(several)), size_of(several))
    block_all((first, second), why)
    return first


def mark(dim: Dim, bounds: Iterable[int], size: int) -> None:
    """Note that a dim of one index would have to be segments that begin at `bounds` of `size`."""
    if len(dim) == 1 and dim[0] and size:
        index = dim[0][0].index.root()
        index.marks |= {(bound // math.gcd(bound, size), size // math.gcd(bound, size)) for bound in bounds}


def _bounds(dim: Dim) -> Iterator[int]:
    at = 0
    for segment in dim[:-1]:
        at += size_of((segment,))
        yield at


def _join(first: list[Factor], second: list[Factor], why: str) -> None:
    """Join two products, the major factors first. One of 6 and 2 x 3: the major parts are one index."""
    while first and second:
        a, b = first.pop(0), second.pop(0)
        least, most = min(a.size, b.size), max(a.size, b.size)
        if not least or most % least:
            block_all([((a, *first),), ((b, *second),)], why)
            return
        a.index.join(b.index)
        a.index.root().unit = math.gcd(a.index.root().unit, least)
        if a.size > least:
            first[:0] = inner(a.size // least)
        elif b.size > least:
            second[:0] = inner(b.size // least)


def groups_of(x: Sequence[int], goal: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dims with as many elements. Example: (2, 3, 4) -> (6, 4): ([0, 1], [0]), ([2], [1])."""
    found, i, j = [], 0, 0
    while i < len(x) or j < len(goal):
        came, goes = [i] if i < len(x) else [], [j] if j < len(goal) else []
        left, right = math.prod(x[i : i + 1]), math.prod(goal[j : j + 1])
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left *= x[i]
                came.append(i)
                i += 1
            else:
                right *= goal[j]
                goes.append(j)
                j += 1
        found.append((came, goes))
    return found


def regrouped(came: Sequence[Dim], goes: Sequence[int], why: str) -> Dims:
    """The dims of a view: `came` are merged and split into sizes `goes`, of as many elements."""
    if len(came) == 1 and len(came[0]) > 1:
        return _segments(came[0], goes, why)
    if any(len(dim) > 1 for dim in came):
        block_all(came, why)
        return [one(size, why) for size in goes]
    left = [factor for dim in came for factor in dim[0]]
    found: Dims = []
    for size in goes:
        taken: list[Factor] = []
        need = size
        while need > 1:
            if not left:
                return _failed(came, goes, why)
            factor = left.pop(0)
            if factor.size <= need and need % factor.size == 0:
                taken.append(factor)
                need //= factor.size
            elif factor.size > need and factor.size % need == 0:
                root = factor.index.root()
                root.unit = math.gcd(root.unit, need)
                taken.append(Factor(factor.index, need))
                left[:0] = inner(factor.size // need)
                need = 1
            else:
                return _failed(came, goes, why)
        found.append((tuple(taken),))
    return found


def _failed(came: Sequence[Dim], goes: Sequence[int], why: str) -> Dims:
    block_all(came, why)
    return [one(size, why) for size in goes]


def _segments(dim: Dim, goes: Sequence[int], why: str) -> Dims:
    """Segments of one size become a dim of their number; the dims within them are joined."""
    real = [size for size in goes if size != 1]
    if len(real) <= 1:
        return [dim if size != 1 else one(1) for size in goes]
    sizes = {size_of((segment,)) for segment in dim}
    if len(sizes) != 1 or real[0] != len(dim):
        return _failed([dim], goes, why)
    for segment in dim[1:]:
        join((dim[0],), (segment,), why)
    rest = regrouped([(dim[0],)], list(goes[goes.index(real[0]) + 1 :]), why)
    before = [one(1) for _ in goes[: goes.index(real[0])]]
    return [*before, one(len(dim), "it counts segments"), *rest]
