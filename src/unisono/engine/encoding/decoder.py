"""Decodes nodes, values and buffers. For any input the memory is proportional to its bytes, and the result is
an object or a ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum, Flag
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from unisono.engine.encoding.class_registry import class_name, find, make
from unisono.engine.encoding.dtypes import restore
from unisono.engine.encoding.message_frame import EncodedMessage, Value, garbage
from unisono.engine.encoding.nodes import LARGE_NBYTES, MAX_DEPTH, NodeKind

T = TypeVar("T", int, float, str)
Items = list[Any]
Order = Literal["C", "F"]


class _PartialContainer:
    """A container of which some items are still missing."""

    __slots__ = ("build", "items", "wanted")

    def __init__(self, wanted: int, build: Callable[[Items], Any]) -> None:
        self.wanted = wanted
        self.build = build
        self.items: Items = []


class ObjectDecoder:
    """Builds one object."""

    def __init__(self, message: EncodedMessage, in_place: bool = False) -> None:
        """in_place: arrays share the message's memory, though it is read-only."""
        self._message = message
        self._in_place = in_place
        self._values = message.values
        self._next = 0
        self._frames = [_PartialContainer(1, _first)]
        self._classes: dict[str, type] = {}

    def read(self) -> Any:
        """The object.

        Raises:
            ValueError: the message is damaged, or contains something unknown to this process.
        """
        frames = self._frames
        for code in self._message.nodes:
            if not frames[-1].wanted:
                raise garbage("nodes are left over")
            if code == NodeKind.VALUE:
                frames[-1].items.append(self._value())
            elif code in _READERS:
                _READERS[code](self)
            else:
                raise garbage(f"there is no node of kind {code}")
            self._settle()
        root = frames[0]
        if len(frames) > 1 or not root.items:
            raise garbage("it ends too early")
        if self._next != len(self._values):
            raise garbage(f"{len(self._values) - self._next} values are left over")
        self._message.small.end()
        self._message.large.end()
        return root.items[0]

    def _settle(self) -> None:
        """Build every container that has all its items now."""
        frames = self._frames
        while len(frames[-1].items) >= frames[-1].wanted and len(frames) > 1:
            frame = frames.pop()
            frames[-1].items.append(frame.build(frame.items))
        if len(frames) == 1 and frames[0].items:
            frames[0].wanted = 0

    # ---- values --------------------------------------------------------------------------------------

    def _value(self) -> Value:
        if self._next >= len(self._values):
            raise garbage("it has too few values")
        self._next += 1
        return self._values[self._next - 1]

    def _of(self, expected: type[T]) -> T:
        value = self._value()
        if type(value) is not expected:
            raise garbage(f"{value!r:.80} stands where a {expected.__name__} belongs")
        return value

    def _count(self) -> int:
        count = self._of(int)
        if count < 0:
            raise garbage(f"{count} is no number of items")
        return count

    def _many(self) -> list[Value]:
        """Read a number n and the n values after it."""
        count = self._count()
        if count > len(self._values) - self._next:
            raise garbage(f"{count} values are announced, {len(self._values) - self._next} are left")
        self._next += count
        return self._values[self._next - count : self._next]

    def _bytes(self) -> memoryview:
        nbytes = self._count()
        pieces = self._message.small if nbytes < LARGE_NBYTES else self._message.large
        return pieces.take(nbytes)

    def _class(self) -> type:
        name = self._of(str)
        if name not in self._classes:
            self._classes[name] = find(name)
        return self._classes[name]

    def _done(self, obj: Any) -> None:
        self._frames[-1].items.append(obj)

    def _wait(self, wanted: int, build: Callable[[Items], Any]) -> None:
        if len(self._frames) > MAX_DEPTH + 1:
            raise garbage(f"nested more than {MAX_DEPTH} deep")
        self._frames.append(_PartialContainer(wanted, build))

    # ---- nodes ---------------------------------------------------------------------------------------

    def _read_run(self) -> None:
        frame = self._frames[-1]
        values = self._many()
        if len(values) > frame.wanted - len(frame.items):
            raise garbage("a run is longer than what it stands in")
        frame.items += values

    def _read_list(self) -> None:
        self._wait(self._count(), _same)

    def _read_tuple(self) -> None:
        self._wait(self._count(), tuple)

    def _read_set(self) -> None:
        self._wait(self._count(), partial(_hashed, set))

    def _read_frozenset(self) -> None:
        self._wait(self._count(), partial(_hashed, frozenset))

    def _read_dict(self) -> None:
        self._wait(2 * self._count(), partial(_hashed, _pairs))

    def _read_record(self) -> None:
        cls, found = self._class(), self._many()
        names = [name for name in found if isinstance(name, str)]
        if len(names) != len(found):
            raise garbage("a field's name is no text")
        if issubclass(cls, Enum):
            raise garbage(f"{class_name(cls)} is an enum")
        self._wait(len(names), partial(make, cls, names))

    def _read_flag(self) -> None:
        self._wait(1, partial(_flag, self._class()))

    def _read_enum(self) -> None:
        cls, name = self._class(), self._of(str)
        members = cls._member_map_ if issubclass(cls, Enum) else {}
        if name not in members:
            raise ValueError(f"cannot decode: {class_name(cls)} has no member {name[:80]} in this process")
        self._done(members[name])

    def _read_integer(self) -> None:
        self._done(int.from_bytes(self._bytes(), "little", signed=True))

    def _read_text(self) -> None:
        try:
            self._done(str(self._bytes(), "utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise garbage(f"a text is damaged ({error.reason})") from None

    def _read_bytes(self) -> None:
        self._done(bytes(self._bytes()))

    def _read_bytearray(self) -> None:
        self._done(bytearray(self._bytes()))

    def _read_complex(self) -> None:
        self._done(complex(self._of(float), self._of(float)))

    def _read_array(self, order: Order = "C") -> None:
        dtype = restore(self._of(str))
        shape = tuple(self._many())
        self._done(_array(dtype, shape, self._bytes(), order, self._in_place))

    def _read_scalar(self) -> None:
        dtype = restore(self._of(str))
        self._done(_array(dtype, (), self._bytes(), "C", False)[()])


_READERS: dict[int, Callable[[ObjectDecoder], None]] = {
    NodeKind.RUN: ObjectDecoder._read_run,
    NodeKind.LIST: ObjectDecoder._read_list,
    NodeKind.TUPLE: ObjectDecoder._read_tuple,
    NodeKind.SET: ObjectDecoder._read_set,
    NodeKind.FROZENSET: ObjectDecoder._read_frozenset,
    NodeKind.DICT: ObjectDecoder._read_dict,
    NodeKind.INT: ObjectDecoder._read_integer,
    NodeKind.TEXT: ObjectDecoder._read_text,
    NodeKind.BYTES: ObjectDecoder._read_bytes,
    NodeKind.BYTEARRAY: ObjectDecoder._read_bytearray,
    NodeKind.COMPLEX: ObjectDecoder._read_complex,
    NodeKind.ARRAY: ObjectDecoder._read_array,
    NodeKind.ARRAY_F: partial(ObjectDecoder._read_array, order="F"),
    NodeKind.SCALAR: ObjectDecoder._read_scalar,
    NodeKind.RECORD: ObjectDecoder._read_record,
    NodeKind.ENUM: ObjectDecoder._read_enum,
    NodeKind.FLAG: ObjectDecoder._read_flag,
}


def _first(items: Items) -> Any:
    return items[0]


def _same(items: Items) -> Items:
    return items


def _pairs(items: Items) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _hashed(build: Callable[[Items], Any], items: Items) -> Any:
    try:
        return build(items)
    except TypeError as error:
        raise garbage(f"an element or key cannot be one ({error})") from None


def _flag(cls: type, items: Items) -> Any:
    if not issubclass(cls, Flag) or type(items[0]) is not int:
        raise garbage(f"{class_name(cls)} is no Flag, or a {type(items[0]).__name__} is its value")
    try:
        return cls(items[0])
    except (TypeError, ValueError) as error:
        raise ValueError(f"cannot decode a {class_name(cls)}: {error}") from None


def _array(
    dtype: np.dtype[Any], shape: tuple[Any, ...], memory: memoryview, order: Order, in_place: bool
) -> np.ndarray[Any, Any]:
    """An array: it shares `memory` if that is large, and writable or read in place."""
    if not all(type(length) is int and length >= 0 for length in shape):
        raise garbage(f"{shape!r:.80} is no shape")
    if math.prod(shape) * dtype.itemsize != memory.nbytes:
        raise garbage(f"an array of shape {shape!r:.80} and type {dtype} does not take {memory.nbytes} bytes")
    if dtype.kind == "b" and memory.nbytes and np.frombuffer(memory, np.uint8).max() > 1:
        raise garbage("a bool is neither 0 nor 1")
    shared = memory.nbytes >= LARGE_NBYTES and (in_place or not memory.readonly)
    try:
        array: np.ndarray[Any, Any] = np.ndarray(
            shape, dtype, memory if shared else bytearray(memory), order=order
        )
    except (TypeError, ValueError) as error:
        raise garbage(f"no array has shape {shape!r:.80} ({error})") from None
    return array
