"""What a subscriber wants: its cut of what is published, and the arrays that are filled."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from unisono.engine.base.validation import instance, listed, text, whole
from unisono.engine.encoding import dtypes
from unisono.engine.memory.arrays import empty
from unisono.engine.publishing.boxes import Box, Shape, part
from unisono.engine.publishing.meeting import Description
from unisono.engine.publishing.pieces import HeldPiece, entries, placed, source_of, written

Cut = Mapping[str, int] | Callable[[str, Shape], "tuple[slice, ...] | None"]


class Buffers(NamedTuple):
    """Arrays that are filled. pieces: the memory of what is wanted. arrays: what `get` returns."""

    pieces: list[np.ndarray[Any, Any]]
    arrays: dict[str, Any]


def prepared(
    about: Description, cut: Cut | None, into: Any, rank: int, size: int
) -> tuple[list[HeldPiece], list[Buffers]]:
    """The pieces that a rank wants, and the sets of arrays for them.

    Raises:
        ValueError, TypeError: an argument is wrong, or does not fit what is published.
    """
    there = {one.name: one for held in about.held for one in held}
    if into is not None:
        if cut is not None:
            raise ValueError("subscribe: cut and into exclude each other: into has its own cut")
        given = entries(source_of(into)[0]())
        for one, _ in given:
            like = there.get(one.name)
            if like is None:
                raise ValueError(f"subscribe: {about.name!r} has no {one.name!r}; it has {_some(there)}")
            if (like.dtype, like.shape) != (one.dtype, one.shape):
                raise ValueError(
                    f"subscribe: {one.name!r} is {like.dtype} {like.shape}, and {one.dtype} {one.shape} here"
                )
        filled = [written(one, value) for one, value in given]
        return [one for one, _ in given], [Buffers(filled, into if isinstance(into, dict) else {})]
    chosen = _rule(cut, there, rank, size)
    wanted = []
    for name, like in there.items():
        box = chosen(name, like.shape)
        if box is not None:
            wanted.append(msgspec.structs.replace(like, box_offset=box.offset, box_shape=box.shape))
    wanted, nbytes = placed(wanted)
    kinds = [_shown(one) for one in wanted]
    sets = []
    for _ in range(2):
        memory = empty(nbytes, np.uint8)
        pieces = [one.view(memory) for one in wanted]
        shown = {one.name: it.view(kind) for one, it, kind in zip(wanted, pieces, kinds, strict=True)}
        sets.append(Buffers(pieces, shown))
    return wanted, sets


def _shown(one: HeldPiece) -> np.dtype[Any]:
    try:
        return dtypes.restore(one.dtype)
    except ValueError as error:
        raise ValueError(
            f"subscribe: {one.name!r} is {one.dtype}, which NumPy has with ml_dtypes only: install that, "
            "or give tensors, into="
        ) from error


def _some(names: Mapping[str, Any]) -> str:
    return ", ".join(list(names)[:8]) + (", ..." if len(names) > 8 else "")


def _rule(
    cut: Cut | None, there: Mapping[str, HeldPiece], rank: int, size: int
) -> Callable[[str, Shape], Box | None]:
    """What a cut gives this rank of each array."""
    if cut is None:
        return lambda _, shape: Box((0,) * len(shape), shape)
    if callable(cut):
        return lambda name, shape: _box(name, shape, cut(name, shape))
    rules = {text(pattern, "cut"): whole(dim, f"cut[{pattern!r}]") for pattern, dim in cut.items()}
    for pattern in rules:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in there):
            raise ValueError(f"subscribe: cut={pattern!r} matches no name; there are {_some(there)}")

    def by_pattern(name: str, shape: Shape) -> Box:
        dim = next((dim for pattern, dim in rules.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if dim is None:
            return Box((0,) * len(shape), shape)
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"subscribe: {name!r} of {shape} has no dimension {dim}")
        dim %= len(shape)
        start, length = part(shape[dim], size, rank)
        offset = tuple(start if each == dim else 0 for each in range(len(shape)))
        return Box(offset, (*shape[:dim], length, *shape[dim + 1 :]))

    return by_pattern


def _box(name: str, shape: Shape, slices: Any) -> Box | None:
    if slices is None:
        return None
    given = listed(slices if isinstance(slices, tuple) else (slices,), "cut")
    if len(given) > len(shape):
        raise ValueError(
            f"subscribe: the cut of {name!r} has {len(given)} slices, {shape} has fewer dimensions"
        )
    offset, lengths = [], []
    for size, one in zip(shape, [*given, *[slice(None)] * (len(shape) - len(given))], strict=True):
        start, stop, step = instance(one, slice, f"cut of {name!r}").indices(size)
        if step != 1:
            raise ValueError(f"subscribe: the cut of {name!r} has the step {step}, expected 1")
        offset.append(start)
        lengths.append(max(0, stop - start))
    return Box(tuple(offset), tuple(lengths))
