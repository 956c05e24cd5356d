"""How a module was called when its program was recorded, apart from sizes; and whether a call fits that.

What a cut moves, it moves at the slots of the recorded calls. A call that has tensors at other slots, or
other flags, runs another program than the proved one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from .slots import Slot, slots_in, slots_of_call

__all__ = ["CallStructure", "RecordedCalls", "given_by", "returned_by", "shown"]

LEAVES: Any = (Tensor, bool, str)
UNSEEN = {("use_cache",)}  # a model is recorded with its cache, which `forget_caches` then switches off


class CallStructure(NamedTuple):
    """What a module takes, or what it returns.

    Args:
        tensors: where there are any.
        needed: of these, what has a gradient or is moved. Others may be None: a mask that hides nothing.
        flags: booleans and texts, each with its slot.
    """

    tensors: frozenset[Slot]
    needed: frozenset[Slot]
    flags: frozenset[tuple[Slot, Any]]

    def fits(self, recorded: CallStructure) -> bool:
        """Whether a call with these has the structure of a recorded one."""
        return self.flags == recorded.flags and recorded.needed <= self.tensors <= recorded.tensors

    def of(self, other: CallStructure) -> bool:
        """Whether both have the same tensors and flags."""
        return (self.tensors, self.flags) == (other.tensors, other.flags)

    def difference(self, recorded: CallStructure) -> tuple[str, str]:
        """What is here and what was recorded, of the first thing in which they differ.

        Example: ("a tensor at mask", "none there").
        """
        more, less = self.tensors - recorded.tensors, recorded.needed - self.tensors
        if more:
            return f"a tensor at {shown(min(more, key=repr))}", "none there"
        if less:
            return f"no tensor at {shown(min(less, key=repr))}", "one there"
        mine, theirs = dict(self.flags), dict(recorded.flags)
        slot = min((slot for slot, _ in self.flags ^ recorded.flags), key=repr)
        here, there = (
            repr(each[slot]) if slot in each else "neither a bool nor a str" for each in (mine, theirs)
        )
        return f"{here} at {shown(slot)}", f"{there} there"


@dataclass
class RecordedCalls:
    """All calls of one module in one forward of the model, of each proved program.

    Attributes:
        takes, returns: what they have.    counts: how many there are.
    """

    takes: set[CallStructure] = field(default_factory=set)
    returns: set[CallStructure] = field(default_factory=set)
    counts: set[int] = field(default_factory=set)

    def add(self, other: RecordedCalls) -> None:
        """Take those of another program, too. One without gradients needs less of what is known already."""
        for mine, theirs in (self.takes, other.takes), (self.returns, other.returns):
            mine |= {side for side in theirs if not any(side.of(each) for each in mine)}
        self.counts |= other.counts


def given_by(args: Any, named: Any, names: tuple[str, ...], moved: Iterable[Slot] = ()) -> CallStructure:
    """What a call passes. names: of the arguments by place. moved: slots that are."""
    return _side([*slots_of_call(args, named, names, LEAVES)], moved)


def returned_by(output: Any, moved: Iterable[Slot] = ()) -> CallStructure:
    """What a call returns."""
    return _side([*slots_in(output, LEAVES)], moved)


def _side(leaves: list[tuple[Slot, Any]], moved: Iterable[Slot]) -> CallStructure:
    tensors = {slot: leaf for slot, leaf in leaves if isinstance(leaf, Tensor)}
    needed = {slot for slot, leaf in tensors.items() if leaf.requires_grad} | (set(moved) & set(tensors))
    flags = frozenset(
        (slot, leaf) for slot, leaf in leaves if not isinstance(leaf, Tensor) and slot not in UNSEEN
    )
    return CallStructure(frozenset(tensors), frozenset(needed), flags)


def shown(slot: Slot) -> str:
    """A slot as a user reads it: mask, states[0]; argument 2 of a function that hides its names."""
    if not slot:
        return "its output"
    first = slot[0] if isinstance(slot[0], str) else f"place {slot[0]}"
    return first + "".join(f"[{key!r}]" for key in slot[1:])
