"""What a rank publishes or wants to fill: pieces of named arrays, of NumPy or PyTorch; their description."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from unisono.engine.base.validation import instance, listed, text, whole
from unisono.engine.encoding import dtypes
from unisono.engine.publishing.boxes import Box, Shape

ALIGNMENT = 64
"""Pieces begin at multiples of this in a publisher's memory: a cache line."""


class Piece(NamedTuple):
    """A part of a named array that a rank holds, or wants to fill.

    Args:
        array: of NumPy, or a tensor of PyTorch.
        offset: where it begins in the whole array, an index for each dimension.
        shape: of the whole array.
    Example: un.Piece(columns, offset=(0, 512), shape=(1024, 1024))
    """

    array: Any
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class HeldPiece(msgspec.Struct, frozen=True, array_like=True):
    """The description of a piece. dtype: as text, see `encoding.dtypes`. start: its byte in the memory."""

    name: str
    dtype: str
    shape: Shape
    box_offset: Shape
    box_shape: Shape
    start: int = 0

    @property
    def box(self) -> Box:
        """Where it is in its array."""
        return Box(self.box_offset, self.box_shape)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.box.numel * stored(self.dtype).itemsize

    def view(self, memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """It in the memory of its rank, which are bytes."""
        part = memory[self.start : self.start + self.nbytes]
        return part.view(stored(self.dtype)).reshape(self.box_shape)


def stored(dtype: str) -> np.dtype[Any]:
    """The NumPy type that has the bytes of this one: itself, or an integer for those of PyTorch alone."""
    if dtype in _TORCH_ONLY:
        return np.dtype(_TORCH_ONLY[dtype])
    return dtypes.restore(dtype)


_TORCH_ONLY = {
    "bfloat16": "<u2", "float8_e4m3fn": "|u1", "float8_e5m2": "|u1", "float8_e4m3fnuz": "|u1",
    "float8_e5m2fnuz": "|u1", "float8_e8m0fnu": "|u1",
}  # fmt: skip


def is_tensor(array: Any) -> bool:
    """Whether it is a tensor of PyTorch, without importing it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def described(name: str, array: Any) -> tuple[HeldPiece, Any]:
    """A piece's description, and its array as `read` and `written` take it.

    Raises:
        TypeError, ValueError: it is no array, its elements are objects, or the piece has other dimensions.
    """
    given = array if isinstance(array, Piece) else None
    value = array if given is None else given.array
    if is_tensor(value):
        value, dtype = value.detach(), str(value.dtype).removeprefix("torch.")
        if dtype not in _TORCH_ONLY:
            dtype = np.dtype(dtype).str
    else:
        value = instance(value, np.ndarray, f"{name!r}")
        found = dtypes.describe(value.dtype)
        if found is None:
            raise TypeError(f"{name!r}: elements of {value.dtype} are Python objects, or have no fixed size")
        dtype = found
    shape = tuple(value.shape)
    offset, total = (0,) * len(shape), shape
    if given is not None:
        offset = tuple(whole(each, f"{name!r}: offset", 0) for each in listed(given.offset, "offset"))
        total = tuple(whole(each, f"{name!r}: shape", 0) for each in listed(given.shape, "shape"))
    held = HeldPiece(name, dtype, total, offset, shape)
    if not len(offset) == len(total) == len(shape) or any(
        start + length > most for start, length, most in zip(offset, shape, total, strict=True)
    ):
        raise ValueError(f"{name!r}: a piece of {shape} at {offset} is no part of an array of {total}")
    return held, value


def entries(arrays: Any) -> list[tuple[HeldPiece, Any]]:
    """What a rank gives: a dict of name -> array, tensor, `Piece` or a list of pieces."""
    return [
        described(text(name, "a name"), one)
        for name, value in instance(arrays, Mapping, "arrays").items()
        for one in (value if isinstance(value, list) else [value])
    ]


def placed(held: list[HeldPiece]) -> tuple[list[HeldPiece], int]:
    """The same with their starts in the rank's memory, and how many bytes that has."""
    found, at = [], 0
    for one in held:
        found.append(msgspec.structs.replace(one, start=at))
        at += -(-one.nbytes // ALIGNMENT) * ALIGNMENT
    return found, at


def read(value: Any, into: np.ndarray[Any, Any]) -> None:
    """Copy an array or a tensor into memory."""
    if is_tensor(value):
        torch = sys.modules["torch"]
        torch.from_numpy(into.reshape(-1).view(np.uint8)).view(value.dtype).view(value.shape).copy_(value)
    else:
        np.copyto(into, value.view(into.dtype))


def written(held: HeldPiece, value: Any) -> np.ndarray[Any, Any]:
    """The memory of an array or a tensor that is filled.

    Raises:
        ValueError: it is read-only.  TypeError: a tensor on a device.
    """
    if is_tensor(value):
        if value.device.type != "cpu":
            raise TypeError(
                f"{held.name!r}: a tensor on {value.device} cannot be filled; give one on the CPU"
            )
        torch = sys.modules["torch"]
        same = {1: torch.uint8, 2: torch.int16}.get(value.itemsize) if held.dtype in _TORCH_ONLY else None
        value = (value if same is None else value.view(same)).numpy()
    if not value.flags.writeable:
        raise ValueError(f"{held.name!r}: the array is read-only")
    filled: np.ndarray[Any, Any] = value.view(stored(held.dtype))
    return filled


def source_of(arrays: Any) -> tuple[Callable[[], Mapping[str, Any]], Any]:
    """What gives the pieces at each update, and the ranks that hold them (None: the caller says)."""
    gives = getattr(arrays, "published", None)
    return ((lambda: arrays), None) if gives is None else tuple(gives())
