"""Where the bytes of tensors are while they are not needed: a file, or host memory."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import GetSetDescriptorType
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.torch_internals.training import plainly

from .graph.containers import tensors_in

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


# ---- a spilled tensor ----


PROPERTIES = (GetSetDescriptorType, property)
VALUES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})  # properties that read or write values
OTHERS = frozenset({
    Tensor.dim, Tensor.element_size, Tensor.get_device, Tensor.is_complex, Tensor.is_contiguous,
    Tensor.is_floating_point, Tensor.ndimension, Tensor.nelement, Tensor.new_empty, Tensor.new_full,
    Tensor.new_ones, Tensor.new_zeros, Tensor.numel, Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook, Tensor.requires_grad_, Tensor.retain_grad, Tensor.size,
    Tensor.stride, Tensor.__len__, torch.empty_like, torch.full_like, torch.is_complex,
    Tensor.untyped_storage, torch.is_floating_point, torch.numel, torch.ones_like, torch.rand_like,
    torch.randn_like, torch.zeros_like,
})  # fmt: skip


def mark_spilled(tensor: Tensor) -> None:
    """Make reading or writing the values of `tensor` an error."""
    if tensor.numel() and not is_spilled(tensor):
        tensor.__class__ = _class_for(type(tensor))


def unmark_spilled(tensor: Tensor) -> None:
    """Undo `mark_spilled`."""
    if isinstance(tensor, _SpilledTensor):
        unchanged: Any = tensor
        unchanged.__class__ = unchanged.kind


def is_spilled(tensor: Tensor) -> bool:
    """Whether `mark_spilled` was called, and `unmark_spilled` was not."""
    return isinstance(tensor, _SpilledTensor)


class _SpilledTensor:
    kind: type[Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call what needs no values."""
        about = getattr(func, "__self__", None)
        about = about if isinstance(about, PROPERTIES) else None  # of its getter or setter
        if func in OTHERS or (about is not None and getattr(about, "__name__", "data") not in VALUES):
            return plainly(func, args, kwargs or {})
        tensor = next(tensors_in((args, kwargs), _SpilledTensor))
        shape = list(plainly(Tensor.size, (tensor,), {}))
        if func is Tensor.__repr__:
            return f"<a parameter or its state, {shape}, swapped out>"
        name = getattr(about, "__name__", getattr(func, "__name__", func))
        raise RuntimeError(
            f"{name} of a swapped tensor of shape {shape}: its values are in memory only while its unit "
            "computes. Read and write them inside `with run.swap.mapped():` (of up.Swapped: "
            "`with swapped.mapped():`), or after close()"
        )


@functools.cache
def _class_for(kind: type[Tensor]) -> type[Tensor]:
    return type(f"Away{kind.__name__}", (_SpilledTensor, kind), {"kind": kind})
