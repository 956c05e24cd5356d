"""Where the bytes of tensors are while they are not needed: a file, or host memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; of what a file holds, so that it can be mapped as any dtype
Key = tuple[int, str]  # a parameter's number, and what of it


class SpillStorage(Protocol):
    """Where bytes are while they are not needed."""

    def write(self, key: Key, tensor: Tensor) -> None:
        """Keep the bytes of `tensor`."""

    def read(self, key: Key, tensor: Tensor) -> None:
        """Fill `tensor` with the stored values."""

    def view(self, key: Key, tensor: Tensor) -> Tensor:
        """Return the stored values, of the shape and dtype of `tensor`, mapped: writing changes them."""

    def close(self) -> None:
        """Forget everything."""


class Disk:
    """One file without a name: a process that dies leaves nothing behind."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, prefix="unisono-swap-", buffering=0)  # noqa: SIM115
        self._places: dict[Key, int] = {}
        self._end = 0

    def write(self, key: Key, tensor: Tensor) -> None:
        """Write the bytes of `tensor`; the first time they get a place of their own."""
        if key not in self._places:
            self._places[key] = self._end
            self._end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._whole(os.pwrite, _bytes(tensor), self._places[key])

    def read(self, key: Key, tensor: Tensor) -> None:
        """Fill `tensor`, which has the size it was written with."""
        self._whole(lambda file, view, at: os.preadv(file, [view], at), _bytes(tensor), self._places[key])

    def view(self, key: Key, tensor: Tensor) -> Tensor:
        """Map the part of the file."""
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        into = self._places[key] % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._file.fileno(), into + tensor.nbytes, offset=self._places[key] - into)
        return torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=into).view(
            tensor.shape
        )

    def close(self) -> None:
        """Give the file up."""
        self._file.close()

    def _whole(self, move: Callable[[int, memoryview, int], int], view: memoryview, at: int) -> None:
        done = 0
        while done < len(view):
            moved = move(self._file.fileno(), view[done:], at + done)
            if not moved:
                raise OSError(f"the swap file ended at {at + done}, {len(view) - done} bytes too early")
            done += moved


class Host:
    """Host memory, for parameters on a GPU."""

    def __init__(self) -> None:
        self._kept: dict[Key, Tensor] = {}

    def write(self, key: Key, tensor: Tensor) -> None:
        """Copy `tensor` to the host."""
        if key not in self._kept:
            self._kept[key] = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
            )
        self._kept[key].copy_(tensor)

    def read(self, key: Key, tensor: Tensor) -> None:
        """Copy it back."""
        tensor.copy_(self._kept[key])

    def view(self, key: Key, tensor: Tensor) -> Tensor:
        """Return the copy itself."""
        return self._kept[key].view(tensor.shape)

    def close(self) -> None:
        """Free all."""
        self._kept.clear()


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor. Not by way of NumPy: PyTorch resizes no storage that NumPy has
    seen.
    """
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"the disk takes contiguous CPU tensors, not one on {tensor.device} with strides "
            f"{tensor.stride()}"
        )
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
