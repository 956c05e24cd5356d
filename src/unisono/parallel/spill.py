"""Where the bytes of tensors are while they are not needed: a file, or host memory."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import GetSetDescriptorType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unisono.torch_internals.dtensor import part_of, put_part
from unisono.torch_internals.training import plainly

from .graph.containers import tensors_in

ALIGNMENT = 64  # bytes; of what a file holds, so that it can be mapped as any dtype
PINNED_BYTES = 8 << 20  # of the buffer through which tensors of a GPU go to a file
Key = tuple[str, str]  # a parameter's name, and what of it


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
    """One file without a name: a process that dies leaves nothing behind.

    Tensors of a GPU go through one buffer of pinned memory, part by part.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, prefix="unisono-swap-", buffering=0)  # noqa: SIM115
        self._folder = folder or tempfile.gettempdir()
        self._places: dict[Key, int] = {}
        self._end = self._written = 0
        self._pinned: Tensor | None = None

    def write(self, key: Key, tensor: Tensor) -> None:
        """Write the bytes of `tensor`; the first time they get a place of their own."""
        if not tensor.numel():
            return
        if key not in self._places:
            self._places[key] = self._end
            self._end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._check(self._written)  # a hole would read as zeros
        self._written = max(self._written, self._places[key] + tensor.nbytes)
        for part, room, at in self._parts(key, tensor):
            if room is not part:
                room.copy_(part)
            self._whole(os.pwrite, _bytes(room), at)

    def read(self, key: Key, tensor: Tensor) -> None:
        """Fill `tensor`, which has the size it was written with."""
        if not tensor.numel():
            return
        self._check(self._written)
        for part, room, at in self._parts(key, tensor):
            self._whole(lambda file, view, at: os.preadv(file, [view], at), _bytes(room), at)
            if room is not part:
                part.copy_(room)

    def _parts(self, key: Key, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield the parts of a tensor, the host memory by which each goes, and its place in the file."""
        at = self._places[key]
        if tensor.device.type == "cpu":
            yield tensor, tensor, at
        elif tensor.numel():
            if self._pinned is None:
                self._pinned = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
            for part in tensor.view(-1).view(torch.uint8).split(PINNED_BYTES):
                yield part, self._pinned[: len(part)], at
                at += len(part)

    def view(self, key: Key, tensor: Tensor) -> Tensor:
        """Map the part of the file."""
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        self._check(self._written)
        at = self._places[key]
        into = at % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._file.fileno(), into + tensor.nbytes, offset=at - into)
        return torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=into).view(
            tensor.shape
        )

    def close(self) -> None:
        """Give the file up."""
        self._file.close()
        self._pinned = None

    def _check(self, least: int) -> None:
        held = os.fstat(self._file.fileno()).st_size
        if held < least:
            raise OSError(f"the swap file in {self._folder} ended at {held}, {least - held} bytes too early")

    def _whole(self, move: Callable[[int, memoryview, int], int], view: memoryview, at: int) -> None:
        done = 0
        while done < len(view):
            try:
                moved = move(self._file.fileno(), view[done:], at + done)
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror}: the swap file in {self._folder}") from error
            if not moved:
                raise OSError(f"the swap file in {self._folder} ended at {at + done} too early")
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
    if not tensor.is_contiguous():
        raise ValueError(f"the disk takes contiguous tensors, not one with strides {tensor.stride()}")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


# ---- a spilled tensor ----


NBYTES = "_unisono_nbytes"  # the attribute of a freed tensor: what its storage had
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


def free(tensor: Tensor) -> None:
    """Free the memory of a tensor, or of this rank's part of it: reading its values is an error then."""
    part = part_of(tensor)
    if part.numel() and not is_spilled(part):
        storage = part.untyped_storage()
        vars(part)[NBYTES] = storage.nbytes()
        storage.resize_(0)
        _mark(part)
    if part is not tensor:
        _mark(tensor)


def allocate(tensor: Tensor) -> None:
    """Give a freed tensor its memory back, without content."""
    part = part_of(tensor)
    if is_spilled(part):
        _unmark(part)
        part.untyped_storage().resize_(vars(part).pop(NBYTES))
    _unmark(tensor)


def show(tensor: Tensor, value: Tensor) -> Callable[[], None]:
    """Have the values in place of a freed tensor; return what frees it again."""
    _unmark(tensor)
    own = part_of(tensor) if isinstance(tensor, DTensor) else tensor.data
    put_part(tensor, value)

    def end() -> None:
        put_part(tensor, own)
        _mark(tensor)

    return end


def _mark(tensor: Tensor) -> None:
    if tensor.numel() and not is_spilled(tensor):
        tensor.__class__ = _class_for(type(tensor))


def _unmark(tensor: Tensor) -> None:
    if isinstance(tensor, _SpilledTensor):
        unchanged: Any = tensor
        unchanged.__class__ = unchanged.kind


def is_spilled(tensor: Tensor) -> bool:
    """Whether the values of `tensor` are not in memory."""
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
