"""The bytes of control data and of errors, in Unisono's own encoding: decoding runs no code of the sender.

Beside what docs/objects.md lists these may be sent: NamedTuples, subclasses of dict, and the types of
`PLAIN`. A class is found among those that the receiver has imported.
The class of an error is kept where it is Python's or Unisono's; another becomes a RuntimeError.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.engine.encoding import decode, encode
from unisono.engine.encoding.class_registry import class_name, field_names, find, look_up, make

__all__ = ["RankOutcome", "opened"]

UNSENDABLE = (TypeError, ValueError, RecursionError)
ENCODED = {type(None), bool, int, float, complex, str, bytes, bytearray}


@dataclasses.dataclass(frozen=True)
class _InstanceRecord:
    """An instance of a class. parts: the values of a NamedTuple, the pairs of a dict, the fields of a
    dataclass, or what PLAIN says.
    """

    name: str
    parts: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _ConvertedValue:
    """What the encoding does not send as it is."""

    value: Any


@dataclasses.dataclass(frozen=True)
class _ErrorRecord:
    """An error. text: as it prints; args and state: what makes it again, if they can be sent."""

    name: str
    text: str
    args: tuple[Any, ...]
    state: dict[str, Any]


class RankOutcome:
    """What a function made or raised.

    Attributes:
        data: the bytes that tell it to another rank.    error: what was raised; None: nothing.
    """

    def __init__(self, do: Callable[[], Any]) -> None:
        self._made: Any = None
        self.error: Exception | None = None
        try:
            self._made = do()
            self.data = _encoded(self._made)
        except Exception as error:  # noqa: BLE001  (raised by `result`, as on other ranks)
            self.error = error
            self.data = _error_data(error)

    def result(self) -> Any:
        """Return what was made, or raise what was raised."""
        if self.error is not None:
            raise _error(decode(self.data)) from self.error
        return self._made

    def among(self, every: list[bytes], mine: int) -> list[Any]:
        """What all ranks made, of the bytes of each; or raise what the first of those raised that did."""
        return [self.result() if rank == mine else opened(data) for rank, data in enumerate(every)]


def opened(data: bytes) -> Any:
    """What another rank made, of its bytes; or raise what it raised."""
    found = decode(data)
    if isinstance(found, _ErrorRecord):
        raise _error(found)
    return _whole(found.value) if isinstance(found, _ConvertedValue) else found


def _encoded(thing: Any) -> bytes:
    try:
        return encode(thing)  # a long list of numbers at the speed of C
    except TypeError:
        return encode(_ConvertedValue(_plain(thing)))


def _plain(thing: Any) -> Any:
    """What the encoding sends, in place of what it does not."""
    kind = type(thing)
    if kind in (list, tuple, set, frozenset):
        return kind(map(_plain, thing))
    if kind is dict:
        return {_plain(key): _plain(value) for key, value in thing.items()}
    if kind in ENCODED or isinstance(thing, (np.ndarray, np.generic, enum.Enum)):
        return thing
    parts = _parts(thing)
    if parts is None:
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks; give plain data, "
            "tensors, or dataclasses of them, whose classes are at the top level of a module"
        )
    return _InstanceRecord(class_name(kind), tuple(map(_plain, parts)))


def _parts(thing: Any) -> Iterable[Any] | None:
    """What `_instance` makes a thing of again; None: it cannot."""
    kind = type(thing)
    if kind in PLAIN:
        return PLAIN[kind][0](thing)
    if look_up(class_name(kind)) is not kind:
        return None  # other ranks would not find it either
    if isinstance(thing, dict):
        return thing.items()
    if isinstance(thing, tuple) and hasattr(kind, "_fields"):
        return thing
    names = field_names(kind)  # of a dataclass or a Struct
    return None if names is None else [(name, getattr(thing, name)) for name in names]


def _whole(thing: Any) -> Any:
    """The reverse of `_plain`."""
    kind = type(thing)
    if kind in (list, tuple, set, frozenset):
        return kind(map(_whole, thing))
    if kind is dict:
        return {_whole(key): _whole(value) for key, value in thing.items()}
    return _instance(thing) if kind is _InstanceRecord else thing


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"cannot decode: torch has no dtype {name[:80]}")
    return found


def _values(tensor: Tensor) -> tuple[Any, ...]:
    plain = tensor.detach().cpu().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))  # a single value may have another stride
    return plain.dtype, [*plain.shape], flat.view(torch.uint8).numpy()


def _tensor(dtype: torch.dtype, shape: list[int], values: Any) -> Tensor:
    return torch.from_numpy(values).view(dtype).view(shape)


LAYOUTS = {str(it): it for it in vars(torch).values() if isinstance(it, (torch.layout, torch.memory_format))}

PLAIN: dict[type, tuple[Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {
    slice: (lambda it: (it.start, it.stop, it.step), slice),
    range: (lambda it: (it.start, it.stop, it.step), range),
    type(Path()): (lambda it: (str(it),), Path),
    torch.dtype: (lambda it: (str(it),), _dtype),
    torch.device: (lambda it: (str(it),), torch.device),
    torch.layout: (lambda it: (str(it),), lambda name: LAYOUTS[name]),
    torch.memory_format: (lambda it: (str(it),), lambda name: LAYOUTS[name]),
    torch.Size: (tuple, lambda *sizes: torch.Size(sizes)),
    Tensor: (_values, _tensor),
}
"""Type -> its parts, and what makes it of them."""

MAKERS = {class_name(kind): maker for kind, (_, maker) in PLAIN.items()}


def _instance(built: _InstanceRecord) -> Any:
    """Without the `__init__` of its class."""
    if built.name in MAKERS:
        return MAKERS[built.name](*map(_whole, built.parts))
    cls, parts = look_up(built.name), built.parts
    if cls is not None and issubclass(cls, tuple) and len(getattr(cls, "_fields", ())) == len(parts):
        return tuple.__new__(cls, map(_whole, parts))
    if cls is not None and issubclass(cls, dict):
        made = cls.__new__(cls)
        for key, value in parts:
            made[_whole(key)] = _whole(value)
        return made
    return make(find(built.name), [name for name, _ in parts], [_whole(value) for _, value in parts])


def _error_data(error: Exception) -> bytes:
    name, text = class_name(type(error)), str(error)
    args: Any = error.args
    if isinstance(error, OSError) and name.startswith("builtins:"):
        args = error.__reduce__()[1]  # with its file
    try:
        return encode(_ErrorRecord(name, text, tuple(map(_plain, args)), _plain(vars(error))))
    except UNSENDABLE:
        return encode(_ErrorRecord("", f"{type(error).__name__}: {text}", (), {}))


def _error(raised: _ErrorRecord) -> Exception:
    """The error again, made without the `__init__` of a class of Unisono, which may need keywords."""
    package, kind = re.split("[.:]", raised.name)[0], raised.name.rpartition(":")[2]
    cls: Any = look_up(raised.name) if package in ("builtins", "unisono") else None
    if cls is None or not issubclass(cls, Exception):
        return RuntimeError(f"{kind}: {raised.text}" if kind else raised.text)
    args = tuple(map(_whole, raised.args))
    if cls.__module__ == "builtins":
        return cls(*args)  # type: ignore[no-any-return]
    bases = [base for base in cls.__mro__ if vars(builtins).get(base.__name__) is base]
    error = (OSError if OSError in bases else bases[0]).__new__(cls)  # Python's allocator
    error.args = args
    vars(error).update(_whole(raised.state))
    return error  # type: ignore[no-any-return]
