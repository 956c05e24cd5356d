"""Python objects over a group: collectives send their lengths first, then their encoded bytes as arrays. A
message between two ranks carries a whole object.

`unisono.engine.encoding` lists the types that can be sent; another type is a TypeError that names it. With
`pickle=True` everything that pickles can be sent. The receiver then runs code that the sender chose: use it
only among processes that trust each other.
"""

from __future__ import annotations

from struct import Struct
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


def encode_object(call: str, obj: Any, pickle: bool) -> Bytes:
    """The same as an array."""
    import numpy as np  # imported late: ranks that send no objects start faster

    return np.frombuffer(encode(call, obj, pickle), np.uint8)


PACKET_NBYTES = 256
"""What `broadcast_object` sends first: the length, 8 bytes, and as much of the object."""

_LENGTH = Struct("<Q")


def packet(encoded: bytes) -> bytearray:
    """The first part of an object, to send."""
    made = bytearray(PACKET_NBYTES)
    _LENGTH.pack_into(made, 0, len(encoded))
    if len(encoded) <= PACKET_NBYTES - 8:
        made[8 : 8 + len(encoded)] = encoded
    return made


def unpacked(received: bytearray) -> tuple[int, memoryview | None]:
    """The length of an object, and its bytes; None: they follow."""
    (nbytes,) = _LENGTH.unpack_from(received)
    return nbytes, memoryview(received)[8 : 8 + nbytes] if nbytes <= PACKET_NBYTES - 8 else None


def length(encoded: Bytes) -> Lengths:
    """The number of bytes of an object, as an array to send."""
    return lengths([encoded.size])


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
