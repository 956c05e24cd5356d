"""One piece of memory for a message, little-endian:

    header    "UO", version, envelope, 4 zero bytes, then three lengths in bytes (u64): nodes, values, small
    nodes     one byte per node (of a pickle: the pickle)
    values    msgpack: one array of None, bool, int, float and str
    small     byte strings below LARGE_NBYTES, one after another
    large     the others, each at a multiple of 64 bytes from the header; their lengths are among the values

So large buffers are copied once when a message is made, and never when it is read. Limits of msgpack do not
apply to them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec

Value = bool | int | float | str | None

_MAGIC, _VERSION = b"UO", 1
_HEADER = struct.Struct("<2sBB4xQQQ")
_ALIGNMENT = 64
_ARRAY32 = 0xDD
_VALUES = msgspec.msgpack.Decoder(list[bool | int | float | str | None])


class PayloadFormat(IntEnum):
    """How the object was written."""

    TYPED = 0
    PICKLED = 1
    PLAIN = 2  # by native code, without this frame


def garbage(what: str) -> ValueError:
    """The error for bytes that no `encode` wrote."""
    return ValueError(
        f"cannot decode: {what}. These are not the bytes of an object, or not all of them; "
        "the sender must use the *_object call that matches this one"
    )


class SegmentReader:
    """Returns the byte strings of a segment one after another."""

    def __init__(self, segment: memoryview, alignment: int, origin: int) -> None:
        self._segment = segment
        self._alignment = alignment
        self._origin = origin
        self._at = 0

    def take(self, nbytes: int) -> memoryview:
        """The next `nbytes` bytes, in place."""
        start = self._at + -(self._origin + self._at) % self._alignment
        if nbytes < 0 or start + nbytes > self._segment.nbytes:
            raise garbage(f"a piece of {nbytes} bytes at {self._origin + start} goes beyond the end")
        self._at = start + nbytes
        return self._segment[start : self._at]

    def end(self) -> None:
        """Check that no bytes are left."""
        if self._at != self._segment.nbytes:
            raise garbage(f"{self._segment.nbytes - self._at} bytes are left over")


@dataclass(frozen=True)
class EncodedMessage:
    """The parts of a message; only the values were copied."""

    envelope: int
    nodes: memoryview
    values: list[Value]
    small: SegmentReader
    large: SegmentReader

    def sizes(self) -> Iterator[int]:
        """The values, which all have to be sizes."""
        for value in self.values:
            if type(value) is not int:
                raise garbage(f"{value!r} is no size")
            yield value


def frame(
    envelope: PayloadFormat,
    nodes: bytes | bytearray,
    values: Sequence[Value],
    small: bytes | bytearray,
    large: Sequence[memoryview],
) -> list[bytes | bytearray | memoryview]:
    """The pieces of memory of a message, one behind another."""
    packed = msgspec.msgpack.encode(values)
    header = _HEADER.pack(_MAGIC, _VERSION, envelope, len(nodes), len(packed), len(small))
    parts: list[bytes | bytearray | memoryview] = [header, nodes, packed, small]
    at = sum(len(part) for part in parts)
    for piece in large:
        parts += [bytes(-at % _ALIGNMENT), piece]
        at += -at % _ALIGNMENT + piece.nbytes
    return parts


def split(data: Any) -> EncodedMessage:
    """Split a message into its parts.

    Raises:
        ValueError: it is no message.
    """
    memory = memoryview(data)
    memory = memory.cast("B") if memory.nbytes else memoryview(b"")
    if memory.nbytes < _HEADER.size:
        raise garbage(f"got {memory.nbytes} bytes, the header alone takes {_HEADER.size}")
    magic, version, envelope, nodes, values, small = _HEADER.unpack(memory[: _HEADER.size])
    if magic != _MAGIC:
        raise garbage(f"it begins with {bytes(memory[:8])!r}")
    if version != _VERSION:
        raise ValueError(
            f"cannot decode: version {version} of the encoding, this process knows version {_VERSION}. "
            "Use one version of Unisono on all ranks"
        )
    if envelope not in (PayloadFormat.TYPED, PayloadFormat.PICKLED) or any(memory[4:8]):
        raise garbage(f"it begins with {bytes(memory[:8])!r}")
    ends = [_HEADER.size, _HEADER.size + nodes, _HEADER.size + nodes + values]
    ends.append(ends[-1] + small)
    if ends[-1] > memory.nbytes:
        raise garbage(f"got {memory.nbytes} bytes, the header speaks of at least {ends[-1]}")
    return EncodedMessage(
        envelope,
        memory[ends[0] : ends[1]],
        _unpack(memory[ends[1] : ends[2]]),
        SegmentReader(memory[ends[2] : ends[3]], 1, ends[2]),
        SegmentReader(memory[ends[3] :], _ALIGNMENT, ends[3]),
    )


def _unpack(packed: memoryview) -> list[Value]:
    """The values. msgpack allocates a list of the announced length, so that is checked before."""
    if packed.nbytes >= 5 and packed[0] == _ARRAY32 and int.from_bytes(packed[1:5], "big") > packed.nbytes:
        raise garbage("more values than bytes")
    try:
        return _VALUES.decode(packed)
    except (msgspec.MsgspecError, ValueError) as error:
        raise garbage(f"the values are damaged ({error})") from None
