"""How the buffers of a call lie: argument checks of the collectives that have an input and an output.

`out` and `inputs` are one array with a leading axis of p, or a list of p arrays.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from unisono.buffers import DTYPES, ITEMSIZES, View, overlap, view, views

__all__ = [
    "NOTHING",
    "Extents",
    "Layout",
    "blocks",
    "check_apart",
    "check_block",
    "check_equal",
    "check_same_dtype",
    "one",
]

Extents = list[tuple[int, int]]


class Layout(NamedTuple):
    """Where chunks lie: one piece of memory, or a list of pieces (then `extents` is not None)."""

    pieces: tuple[View, ...]
    extents: Extents | None

    @property
    def dtype(self) -> int:
        """The code of the element type."""
        return self.pieces[0].dtype

    def spread(self, count: int) -> Extents:
        """The chunks one by one; one piece of memory is cut into `count` equal ones."""
        if self.extents is not None:
            return self.extents
        whole = self.pieces[0]
        numel = whole.numel // count
        nbytes = numel * ITEMSIZES[whole.dtype]
        return [(whole.address + i * nbytes, numel) for i in range(count)]


NOTHING = Layout((View(0, 0, 0),), None)
"""The side of a call that a rank does not have."""


def one(array: Any, *, writable: bool, name: str) -> Layout:
    """A single buffer."""
    return Layout((View(*view(array, writable, name)),), None)


def blocks(arrays: Any, size: int, *, writable: bool, name: str) -> Layout:
    """p blocks: a list or tuple of p arrays, or one array that can be cut into p equal blocks."""
    if isinstance(arrays, list | tuple):
        if len(arrays) != size:
            raise ValueError(f"{name} has {len(arrays)} arrays, expected {size}: one for every rank")
        pieces = tuple(views(arrays, writable=writable, name=name))
        if writable:
            _check_disjoint(pieces, name)
        return Layout(pieces, [(piece.address, piece.numel) for piece in pieces])
    whole = View(*view(arrays, writable, name))
    if whole.numel % size:
        raise ValueError(f"{name} has {whole.numel} elements, which cannot be cut into {size} equal blocks")
    return Layout((whole,), None)


def check_same_dtype(a: Layout, b: Layout, names: tuple[str, str]) -> None:
    """The two sides of a call share a dtype."""
    if a.dtype != b.dtype:
        raise ValueError(f"{names[0]} is {DTYPES[a.dtype]}, {names[1]} is {DTYPES[b.dtype]}; they must agree")


def check_block(layout: Layout, size: int, rank: int, numel: int, names: tuple[str, str]) -> None:
    """Block `rank` has the size of the single buffer on the other side."""
    found = layout.pieces[0].numel // size if layout.extents is None else layout.extents[rank][1]
    if found != numel:
        raise ValueError(f"{names[0]} has {found} elements for rank {rank}, {names[1]} has {numel}")


def check_equal(layout: Layout, size: int, numel: int, names: tuple[str, str]) -> None:
    """Every block has the size of the single buffer on the other side."""
    for rank in range(size) if layout.extents is not None else (0,):
        check_block(layout, size, rank, numel, names)


def check_apart(several: Layout, single: Layout, size: int, rank: int, *, own_block: bool) -> None:
    """Output and input share no memory; with `own_block`, but for block `rank` of the larger side."""
    if not any(overlap(a, b) for a in several.pieces for b in single.pieces if a.numel and b.numel):
        return
    if own_block and len(single.pieces) == 1 and single.pieces[0] == _block(several, size, rank):
        return
    raise ValueError(
        "output and input overlap in memory" + (f"; only block {rank} may be shared" if own_block else "")
    )


def _check_disjoint(pieces: tuple[View, ...], name: str) -> None:
    """No two arrays that are written share memory."""
    order = sorted((piece for piece in pieces if piece.numel), key=lambda piece: piece.address)
    for low, high in pairwise(order):
        if overlap(low, high):
            raise ValueError(f"two arrays of {name} overlap in memory")


def _block(layout: Layout, size: int, rank: int) -> View:
    return View(*layout.spread(size)[rank], layout.dtype)
