"""Nested containers of tensors, how a module is called with them, and whether that fits the recorded calls.

Containers are tuples, lists, mappings, dataclasses, outputs of Hugging Face. A slot is the name of the
argument, then the places in its containers:

    f(x, (a, None), mask=m)      ("x",), ("states", 0), ("mask",)        of def f(x, states, mask=None)
    return {"logits": y}         ("logits",)                             a tensor by itself: ()

It is the same for an argument by place and by name, and None at one is as if it was not there. What a cut
moves, it moves at the slots of the recorded calls. A call that has tensors at other slots, or other flags,
runs another program than the proved one. Sizes are not compared.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

PLAIN = (
    bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
    enum.Enum, slice, range, type(None), type(Ellipsis),
)  # fmt: skip
UNCHANGED = {bool, int, float, str, type(None)}

LEAVES: Any = (Tensor, bool, str)
UNSEEN = {("use_cache",)}  # a model is recorded with its cache, which `forget_caches` then switches off

Slot = tuple[Any, ...]


def tensors_in(thing: Any, kind: type[Any] = Tensor) -> Iterator[Any]:
    """Yield every tensor in nested containers and dataclasses, or every `kind`."""
    if isinstance(thing, kind):
        yield thing
    else:
        for _, part in parts_of(thing) or ():
            yield from tensors_in(part, kind)


def parts_of(thing: Any) -> Iterable[tuple[Any, Any]] | None:
    """The keys and the parts of a container or of a dataclass; None: it is neither."""
    if type(thing) in UNCHANGED:  # asking whether it is a Mapping takes longer
        return None
    if isinstance(thing, (tuple, list)):
        return enumerate(thing)
    if isinstance(thing, (dict, Mapping)):
        return thing.items()
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        names = [field.name for field in dataclasses.fields(thing)]
        return [(name, object.__getattribute__(thing, name)) for name in names]  # its own way may raise
    return None


def strange_in(thing: Any, kind: type[Any] = Tensor) -> Iterator[Any]:
    """Yield what is neither `kind`, a container of it, nor plain data: objects with a state of their own."""
    if isinstance(thing, (kind, *PLAIN)):
        return
    parts = parts_of(thing)
    if parts is None:
        yield thing
    else:
        for _, part in parts:
            yield from strange_in(part, kind)


def numbers_of(thing: Any) -> Iterator[int]:
    """Yield every integer in nested arguments; of a slice its bounds. A bool is none."""
    if isinstance(thing, (int, torch.SymInt)) and not isinstance(thing, bool):
        yield int(thing)
    elif isinstance(thing, dict):
        for part in thing.values():
            yield from numbers_of(part)
    elif isinstance(thing, slice):
        yield from numbers_of((thing.start, thing.stop, thing.step))
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            yield from numbers_of(part)


def mapped(thing: Any, change: Callable[[Any], Any], kind: type[Any] = Tensor) -> Any:
    """Nested containers with `change` applied to every tensor, or to every `kind`."""
    if isinstance(thing, kind):
        return change(thing)
    parts = parts_of(thing)
    return (
        thing if parts is None else rebuilt(thing, {key: mapped(part, change, kind) for key, part in parts})
    )


def rebuilt(thing: Any, parts: dict[Any, Any]) -> Any:
    """A container or dataclass like `thing` with these parts, as `parts_of` has them."""
    if type(thing) is dict:
        return parts
    if isinstance(thing, (tuple, list)):
        if hasattr(thing, "_fields"):
            return type(thing)(*parts.values())
        return tuple(parts.values()) if isinstance(thing, tuple) else [*parts.values()]
    if isinstance(thing, Mapping) and not isinstance(thing, MutableMapping):
        return thing
    changed = copy.copy(thing)
    put = changed.__setitem__ if isinstance(thing, Mapping) else partial(object.__setattr__, changed)
    for key, part in parts.items():
        put(key, part)
    return changed


def join_rows(outputs: Sequence[Any], rows: Sequence[int], *, repeated: bool = False) -> Any:
    """What a model returned for micro-batches of these rows, as it would for the whole batch.

    Args:
        repeated: a tensor may have several rows for each of its micro-batch.
    Raises:
        ValueError: a tensor of one of several micro-batches has other rows.
    """
    if len(outputs) == 1:
        return outputs[0]
    columns = [*zip(*map(tensors_in, outputs), strict=True)]
    for column in columns:
        for part, count in zip(column, rows, strict=True):
            if not part.dim() or (len(part) % max(count, 1) if repeated else len(part) != count):
                raise ValueError(
                    f"the model returned tensors of shapes {[list(part.shape) for part in column]} for "
                    f"micro-batches of {[*rows]} rows, which are not joined: return tensors of rows, or use "
                    "one micro-batch"
                )
    made = iter([torch.cat(column) for column in columns])
    return mapped(outputs[0], lambda _: next(made))


def cast(thing: Any, dtype: torch.dtype | None) -> Any:
    """Nested containers with floating tensors of this type; None: of their own."""
    if dtype is None:
        return thing
    return mapped(thing, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def argument_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of what a function takes by place. One whose signature nobody knows has none."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(
        one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    )


def slots_in(thing: Any, kind: Any = Tensor, at: Slot = ()) -> Iterator[tuple[Slot, Any]]:
    """Yield every tensor in nested containers, or every `kind`, as `tensors_in` does, with its slot."""
    if isinstance(thing, kind):
        yield at, thing
    else:
        for key, part in parts_of(thing) or ():
            yield from slots_in(part, kind, (*at, key))


def slots_of_call(
    args: Any, named: Any, names: tuple[str, ...], kind: Any = Tensor
) -> Iterator[tuple[Slot, Any]]:
    """Yield every tensor that a call passes, or every `kind`, in the order of `tensors_in`, with its slot."""
    for place, part in enumerate(args):
        yield from slots_in(part, kind, (names[place] if place < len(names) else place,))
    yield from slots_in(named, kind)


def with_changed(thing: Any, slot: Slot, change: Callable[[Tensor], Tensor]) -> Any:
    """`thing` with another tensor at a slot; what is not there is not changed."""
    if not slot:
        return change(thing) if isinstance(thing, Tensor) else thing
    parts = dict(parts_of(thing) or ())
    if slot[0] not in parts:
        return thing
    parts[slot[0]] = with_changed(parts[slot[0]], slot[1:], change)
    return rebuilt(thing, parts)


# ---- the structure of a call ----


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
