"""Where the tensors of a call are: the name of the argument, then the places in its containers.

    f(x, (a, None), mask=m)      ("x",), ("states", 0), ("mask",)        of def f(x, states, mask=None)
    return {"logits": y}         ("logits",)                             a tensor by itself: ()

A slot is the same for an argument by place and by name, and None at one is as if it was not there.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from .containers import parts_of

__all__ = ["Slot", "argument_names", "slots_in", "slots_of_call", "with_changed"]

Slot = tuple[Any, ...]


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
    """Yield every tensor that a call passes, or every `kind`, in the order of `tensors_in`, with its slot.

    Args:
        names: those of `argument_names`.
    """
    for place, part in enumerate(args):
        yield from slots_in(part, kind, (names[place] if place < len(names) else place,))
    yield from slots_in(named, kind)


def with_changed(thing: Any, slot: Slot, change: Callable[[Tensor], Tensor]) -> Any:
    """`thing` with another tensor at a slot; what is not there is not changed."""
    if not slot:
        return change(thing) if isinstance(thing, Tensor) else thing
    key, rest = slot[0], slot[1:]
    if isinstance(thing, Mapping):
        return _with(thing, key, with_changed(thing[key], rest, change)) if key in thing else thing
    if isinstance(thing, (tuple, list)):
        if not isinstance(key, int) or key >= len(thing):
            return thing
        parts = [*thing]
        parts[key] = with_changed(parts[key], rest, change)
        if hasattr(thing, "_fields"):
            return type(thing)(*parts)
        return tuple(parts) if isinstance(thing, tuple) else parts
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type) and hasattr(thing, str(key)):
        found = copy.copy(thing)
        object.__setattr__(found, key, with_changed(object.__getattribute__(thing, key), rest, change))
        return found
    return thing


def _with(mapping: Any, key: Any, value: Any) -> Any:
    found = dict(mapping) if type(mapping) is dict else copy.copy(mapping)
    found[key] = value
    return found
