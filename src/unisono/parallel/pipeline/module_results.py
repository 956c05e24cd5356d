"""What a module of a stage returns, as values of the recorded program: another result raises.

The program knows a tensor by its number, and a module may return one that the program had before: what it
takes, or one tensor at two places. Such a result has to be that tensor again, because operators of the stage
take it by the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.parallel.graph.call_structure import CallStructure, Slot, shown, slots_in
from unisono.torch_internals.fake import is_fake, memory_of

if TYPE_CHECKING:
    from unisono.parallel.graph.program import Frame, Graph, Value

__all__ = ["ModuleResults"]


class ModuleResults:
    """What one call of a module returns.

    Args:
        frame: the call.
        renames: (value, value after a write in place) of what the module writes into.
    """

    def __init__(self, frame: Frame, graph: Graph, renames: Iterable[tuple[int, int]]) -> None:
        self._path = frame.path
        self._wanted = dict(zip(frame.slots[1], frame.outputs, strict=True))
        self._values = {number: graph.values[number] for number in frame.outputs}
        written = {after: before for before, after in renames}
        first: dict[int, Slot] = {}
        self._given: list[tuple[Slot, int]] = []  # with the value that this was before the call
        self._again: list[tuple[Slot, Slot]] = []  # with the place where it was before
        for slot, number in self._wanted.items():
            before = written.get(number, number)
            if not frame.first <= graph.values[before].node < frame.last:
                self._given.append((slot, before))
            elif number in first:
                self._again.append((slot, first[number]))
            first.setdefault(number, slot)

    def numbered(self, output: Any, before: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The tensors of `output` by their numbers.

        Args:
            before: the values before the call, by their numbers.
        Raises:
            RuntimeError: it returned other things when it was recorded.
        """
        found = dict(slots_in(output))
        if found.keys() != self._wanted.keys():
            sides = [
                CallStructure(frozenset(slots), frozenset(slots), frozenset())
                for slots in (found, self._wanted)
            ]
            raise self._error(*sides[0].difference(sides[1]))
        for slot, number in self._wanted.items():
            if not _fits(found[slot], self._values[number]):
                here, there = _kind(found[slot]), _kind(self._values[number])
                raise self._error(f"a tensor of {here} at {shown(slot)}", f"one of {there}")
        for slot, number in self._given:
            if number in before and not _is(found[slot], before[number]):
                raise self._error(
                    f"a tensor of its own at {shown(slot)}", "there one that was there before the call"
                )
        for slot, other in self._again:
            if not _is(found[slot], found[other]):
                raise self._error(f"two tensors at {shown(other)} and {shown(slot)}", "one at both")
        return {number: found[slot] for slot, number in self._wanted.items()}

    def _error(self, here: str, there: str) -> RuntimeError:
        return RuntimeError(
            f'"{self._path}" returns {here}; the program that was recorded has {there}. The stages of a '
            "pipeline follow that program: something beside inputs, shapes and settings decides what the "
            "module runs. Let it return the same in every step"
        )


def _is(tensor: Tensor, other: Tensor) -> bool:
    """Whether both are one tensor for the program. A wrapper may have made another object, or a copy."""
    if tensor is other:
        return True
    if tensor.requires_grad != other.requires_grad or tensor.shape != other.shape:
        return False
    alike = tensor.storage_offset() == other.storage_offset() and tensor.stride() == other.stride()
    if is_fake(tensor) or tensor.is_meta or (alike and memory_of(tensor)[1] == memory_of(other)[1]):
        return True
    return torch.equal(tensor.nan_to_num(), other.to(tensor.dtype).nan_to_num())


def _fits(tensor: Tensor, value: Value) -> bool:
    """Whether a tensor can be a recorded one, or a rank's part of it. A part has no size that is larger, so
    no tensors of several shapes have changed places if all fit."""
    sizes = [*zip(tensor.shape, value.shape, strict=False)]
    same = tensor.dim() == len(value.shape) and tensor.is_floating_point() == value.dtype.is_floating_point
    return same and all(here <= there for here, there in sizes)


def _kind(tensor: Tensor | Value) -> str:
    return f"shape {[*tensor.shape]} and type {str(tensor.dtype).removeprefix('torch.')}"
