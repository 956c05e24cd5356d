"""Encodes objects as nodes, values and buffers. It does not recurse, so depth needs no stack."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import Enum, Flag
from typing import Any

import msgspec
import numpy as np

from unisono.engine.encoding.class_registry import (
    class_name,
    field_names,
    reason_against,
    reason_against_instance,
)
from unisono.engine.encoding.dtypes import describe
from unisono.engine.encoding.message_frame import Value
from unisono.engine.encoding.nodes import INT64_MAX, INT64_MIN, LARGE_NBYTES, MAX_DEPTH, NodeKind

__all__ = ["EncodeError", "ObjectEncoder"]

_PLAIN_TYPES = frozenset({type(None), bool, int, float, str})
_SHORT = LARGE_NBYTES // 4  # characters that surely take less than LARGE_NBYTES


class EncodeError(Exception):
    """An item cannot be encoded. `error`: the type of the exception for the caller."""

    def __init__(self, culprit: Any, what: str, why: str, error: type[Exception] = TypeError) -> None:
        super().__init__(what, why)
        self.culprit = culprit
        self.what = what
        self.why = why
        self.error = error


class _ContainerEnd:
    """Marks the end of a container on the stack of items to encode."""

    __slots__ = ("owner",)

    def __init__(self, owner: int) -> None:
        self.owner = owner


class ObjectEncoder:
    """Encodes one object.

    Attributes:
        nodes, values, small, large: the parts of a message; see `message_frame` and `nodes`.
    """

    def __init__(self) -> None:
        self.nodes = bytearray()
        self.values: list[Value] = []
        self.small = bytearray()
        self.large: list[memoryview] = []
        self._pending: list[Any] = []
        self._open: set[int] = set()  # the containers around the current item
        self._known: set[type] = set()  # classes that were checked

    def write(self, root: Any) -> None:
        """Write an object.

        Raises:
            Refused: it, or something in it, cannot be written.
        """
        pending = self._pending
        pending.append(root)
        while pending:
            obj = pending.pop()
            write = _WRITERS.get(type(obj)) or _other(obj)
            write(self, obj)

    # ---- leaves --------------------------------------------------------------------------------------

    def _value(self, obj: Value) -> None:
        self.nodes.append(NodeKind.VALUE)
        self.values.append(obj)

    def _integer(self, obj: int) -> None:
        if INT64_MIN <= obj <= INT64_MAX:
            self._value(obj)
            return
        self.nodes.append(NodeKind.INT)
        self._bytes(memoryview(obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)))

    def _text(self, obj: str) -> None:
        if len(obj) < _SHORT and _encodes(obj):
            self._value(obj)
            return
        self.nodes.append(NodeKind.TEXT)
        self._bytes(memoryview(obj.encode("utf-8", "surrogatepass")))

    def _binary(self, obj: bytes | bytearray) -> None:
        self.nodes.append(NodeKind.BYTES if type(obj) is bytes else NodeKind.BYTEARRAY)
        self._bytes(memoryview(obj))

    def _complex(self, obj: complex) -> None:
        self.nodes.append(NodeKind.COMPLEX)
        self.values += (obj.real, obj.imag)

    def _array(self, obj: np.ndarray[Any, Any]) -> None:
        elements = self._elements(obj, obj.dtype)
        fortran = obj.flags.f_contiguous and not obj.flags.c_contiguous
        self.nodes.append(NodeKind.ARRAY_F if fortran else NodeKind.ARRAY)
        self.values += (elements, obj.ndim, *obj.shape)
        self._bytes(_memory(obj.T if fortran else obj))

    def _scalar(self, obj: np.generic) -> None:
        array = np.asarray(obj)
        elements = self._elements(obj, array.dtype)
        self.nodes.append(NodeKind.SCALAR)
        self.values.append(elements)
        self._bytes(_memory(array))

    def _elements(self, obj: Any, dtype: np.dtype[Any]) -> str:
        text = describe(dtype)
        if text is None:
            why = "it holds Python objects" if dtype.hasobject else "its elements have no plain, fixed form"
            what = f"a NumPy {type(obj).__name__} of dtype {dtype}"
            raise EncodeError(obj, what, f"{why}; use .tolist() or another dtype")
        return text

    def _bytes(self, memory: memoryview) -> None:
        self.values.append(memory.nbytes)
        if memory.nbytes < LARGE_NBYTES:
            self.small += memory
        else:
            self.large.append(memory)

    # ---- containers ----------------------------------------------------------------------------------

    def _sequence(self, obj: list[Any] | tuple[Any, ...]) -> None:
        self._container(NodeKind.LIST if type(obj) is list else NodeKind.TUPLE, obj, len(obj), obj)

    def _collection(self, obj: set[Any] | frozenset[Any]) -> None:
        self._container(NodeKind.SET if type(obj) is set else NodeKind.FROZENSET, obj, len(obj), list(obj))

    def _mapping(self, obj: dict[Any, Any]) -> None:
        children = [each for pair in obj.items() for each in pair]
        self._container(NodeKind.DICT, obj, len(obj), children)

    def _record(self, obj: Any) -> None:
        cls = type(obj)
        names = field_names(cls) or ()
        self._check_class(obj)
        if reason := reason_against_instance(obj, names):
            raise EncodeError(obj, f"a {class_name(cls)}", reason)
        self.nodes.append(NodeKind.RECORD)
        self.values += (class_name(cls), len(names), *names)
        self._enter(obj, [getattr(obj, name) for name in names])

    def _enum(self, obj: Enum) -> None:
        self._check_class(obj)
        if isinstance(obj, Flag):
            self.nodes.append(NodeKind.FLAG)
            self.values.append(class_name(type(obj)))
            self._pending.append(obj.value)
            return
        self.nodes.append(NodeKind.ENUM)
        self.values += (class_name(type(obj)), obj.name)

    def _end(self, end: _ContainerEnd) -> None:
        self._open.remove(end.owner)

    def _container(self, kind: NodeKind, owner: Any, count: int, children: Sequence[Any]) -> None:
        self.nodes.append(kind)
        self.values.append(count)
        if not children:
            return
        if _plain(children):
            self.nodes.append(NodeKind.RUN)
            self.values.append(len(children))
            self.values += children
            return
        self._enter(owner, children)

    def _enter(self, owner: Any, children: Sequence[Any]) -> None:
        what = f"a {type(owner).__name__}"
        if id(owner) in self._open:
            raise EncodeError(owner, what, "it contains itself", ValueError)
        if len(self._open) >= MAX_DEPTH:
            raise EncodeError(owner, what, f"it is nested more than {MAX_DEPTH} deep", ValueError)
        self._open.add(id(owner))
        self._pending.append(_ContainerEnd(id(owner)))
        self._pending += reversed(children)

    def _check_class(self, obj: Any) -> None:
        cls = type(obj)
        if cls in self._known:
            return
        if reason := reason_against(cls):
            raise EncodeError(obj, f"a {class_name(cls)}", reason)
        self._known.add(cls)


_WRITERS: dict[type, Callable[[ObjectEncoder, Any], None]] = {
    type(None): ObjectEncoder._value,
    bool: ObjectEncoder._value,
    float: ObjectEncoder._value,
    int: ObjectEncoder._integer,
    str: ObjectEncoder._text,
    bytes: ObjectEncoder._binary,
    bytearray: ObjectEncoder._binary,
    complex: ObjectEncoder._complex,
    list: ObjectEncoder._sequence,
    tuple: ObjectEncoder._sequence,
    set: ObjectEncoder._collection,
    frozenset: ObjectEncoder._collection,
    dict: ObjectEncoder._mapping,
    np.ndarray: ObjectEncoder._array,
    _ContainerEnd: ObjectEncoder._end,
}


def _other(obj: Any) -> Callable[[ObjectEncoder, Any], None]:
    """How to encode an object whose type is not exactly one of the common types."""
    if isinstance(obj, np.generic):
        return ObjectEncoder._scalar
    if isinstance(obj, Enum):
        return ObjectEncoder._enum
    if isinstance(obj, msgspec.Struct) or (dataclasses.is_dataclass(obj) and not isinstance(obj, type)):
        return ObjectEncoder._record
    cls = type(obj)
    raise EncodeError(obj, f"a {cls.__module__}.{cls.__qualname__}".replace("builtins.", ""), _hint(obj))


def _hint(obj: Any) -> str:
    """Advice for an object that cannot be sent."""
    if type(obj).__module__.partition(".")[0] == "torch" and hasattr(obj, "numpy"):
        return "send .detach().cpu().numpy() and make a tensor of it with torch.from_numpy"
    if isinstance(obj, np.ndarray):
        return "only plain NumPy arrays are sent; use np.asarray, and send a mask by itself"
    for plain in (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex):
        if isinstance(obj, plain):
            name = plain.__name__
            return f"only {name} itself is sent, no subclass of it; convert it with {name}(...)"
    return (
        "it is none of the types that are sent safely. Convert it, or pass pickle=True on every rank "
        "if you trust them all"
    )


def _plain(children: Sequence[Any]) -> bool:
    """Whether all of them are plain values. It checks types first, at the speed of C."""
    types = set(map(type, children))
    if not types <= _PLAIN_TYPES:
        return False
    if int in types:
        whole = children if len(types) == 1 else [each for each in children if type(each) is int]
        if min(whole) < INT64_MIN or max(whole) > INT64_MAX:
            return False
    if str in types:
        texts = children if len(types) == 1 else [each for each in children if type(each) is str]
        return max(map(len, texts)) < _SHORT and all(map(_encodes, texts))
    return True


def _encodes(text: str) -> bool:
    """Whether a text is valid Unicode: without lone surrogates, which unusual file names have."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _memory(array: np.ndarray[Any, Any]) -> memoryview:
    """An array's bytes in C order; a copy only when it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
