"""Values that are gathered for layers in forward, and again in backward: between them a rank keeps its slice.

Without this the layers of a cut would keep all positions of their input, as long as without a cut along the
sequence. It costs one more all-gather for each value. Source: Korthikanti et al., 2022 (arXiv:2205.05198),
section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from unisono.torch_internals.fake import memory_of

__all__ = ["NAME", "Regathered", "saved_as_slices"]

NAME = "_unisono_regathered"  # the attribute of a value that was gathered


class _View(NamedTuple):
    """Stands for a view of the whole value among what autograd has saved."""

    of: Regathered
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Regathered:
    """A gathered value, kept as this rank's slice.

    Args:
        gather: makes the whole value of the slice. All ranks call it.
    """

    def __init__(self, mine: Tensor, whole: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        self._mine, self._gather = mine.detach(), gather
        self._memory = memory_of(whole)[1]
        self._whole: Tensor | None = None

    def pack(self, tensor: Tensor) -> Any:
        """What to save in place of a tensor: for a view of the whole value, how to make it."""
        if memory_of(tensor)[1] != self._memory:
            return tensor
        return _View(self, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def view(self, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """A view of the whole value, which is gathered now, or was for another layer."""
        if self._whole is None:
            with torch.no_grad():
                self._whole = self._gather(self._mine)
        return self._whole.as_strided(shape, stride, offset)

    def forget(self) -> None:
        """Free the whole value: the gradients of all layers that took it are known."""
        self._whole = None


def saved_as_slices(value: Tensor) -> AbstractContextManager[Any]:
    """While this lasts, autograd saves the slice in place of `value`, if it is a gathered value or a view."""
    found: Regathered | None = getattr(value, NAME, None) or getattr(value._base, NAME, None)
    return nullcontext() if found is None else saved_tensors_hooks(found.pack, _unpack)


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, _View):
        return saved.of.view(saved.shape, saved.stride, saved.offset)
    return saved  # type: ignore[no-any-return]
