"""Python objects over a group. A collective moves a packet of fixed size for each object; those with more
bytes follow as arrays. A message between two ranks carries a whole object.

`unisono.engine.encoding` lists the types that can be sent; another type is a TypeError that names it. With
`pickle=True` everything that pickles can be sent. The receiver then runs code that the sender chose: use it
only among processes that trust each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono import _native
from unisono.engine.group.buffer_layout import with_call_name

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Lengths = np.ndarray[Any, np.dtype[np.int64]]
    ReceivedBytes = tuple[Bytes, _native.Status]


def encode(call: str, obj: Any, pickle: bool) -> bytes:
    """The bytes of an object, for a call of this name."""
    plain = None if pickle else _native.encode_plain(obj)
    if plain is not None:
        return plain
    from unisono.engine import encoding

    try:
        return encoding.encode(obj, pickle=pickle)
    except (TypeError, ValueError) as error:
        raise with_call_name(call, error) from None


def as_array(encoded: bytes) -> Bytes:
    """Encoded bytes as an array to send."""
    import numpy as np  # imported late: ranks that send no objects start faster

    return np.frombuffer(encoded, np.uint8)


PACKET_NBYTES = _native.PACKET_NBYTES
"""What the first operation of a call moves for an object: its length, 8 bytes, and the object if it fits."""


class NotEncoded(ValueError):
    """A rank had no object to send; the text says why. place: of its object among those for this rank."""

    def __init__(self, place: int, text: str) -> None:
        super().__init__(text)
        self.place = place


def packets(parts: list[bytes]) -> bytearray:
    """Encoded objects, to send. Each rank that gets one of them learns whether they follow."""
    return _native.pack_packets(parts)


def refusal(count: int, reason: str) -> bytearray:
    """Instead of the packets of `count` objects: the reason why there are none."""
    text = reason.encode(errors="replace")[: PACKET_NBYTES - 8]
    return _native.pack_packets([text] * count, True)


def lengths(values: list[int]) -> Lengths:
    """Lengths as an array to send or to receive into."""
    import numpy as np

    return np.array(values, np.int64)


def allocate(nbytes: int) -> Bytes:
    """An array to receive an object's bytes into."""
    import numpy as np

    return np.empty(nbytes, np.uint8)


def decode_object(data: Any, *, pickle: bool) -> Any:
    """The object that these bytes encode."""
    plain = _native.decode_plain(data)
    if plain is not NotImplemented:
        return plain
    from unisono.engine import encoding

    return encoding.decode(data, pickle=pickle)
