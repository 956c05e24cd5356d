"""Nested containers of tensors: tuples, lists, mappings, dataclasses, outputs of Hugging Face."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

PLAIN = (
    bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
    enum.Enum, slice, range, type(None), type(Ellipsis),
)  # fmt: skip
LEAVES = {bool, int, float, str, type(None)}


def tensors_in(thing: Any, kind: type[Any] = Tensor) -> Iterator[Any]:
    """Yield every tensor in nested containers and dataclasses, or every `kind`."""
    if isinstance(thing, kind):
        yield thing
    else:
        for _, part in parts_of(thing) or ():
            yield from tensors_in(part, kind)


def parts_of(thing: Any) -> Iterable[tuple[Any, Any]] | None:
    """The keys and the parts of a container or of a dataclass; None: it is neither."""
    if type(thing) in LEAVES:  # asking whether it is a Mapping takes longer
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


def cast(thing: Any, dtype: torch.dtype | None) -> Any:
    """Nested containers with floating tensors of this type; None: of their own."""
    if dtype is None:
        return thing
    return mapped(thing, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
