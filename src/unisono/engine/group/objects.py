"""Python objects over a group: collectives send their lengths first, then their encoded bytes as arrays. A
message between two ranks carries a whole object.

`unisono.engine.encoding` lists the types that can be sent; another type is a TypeError that names it. With
`pickle=True` everything that pickles can be sent. The receiver then runs code that the sender chose: use it
only among processes that trust each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.engine.group.buffer_layout import with_call_name

if TYPE_CHECKING:
    import numpy as np

    from unisono import _native

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Lengths = np.ndarray[Any, np.dtype[np.int64]]
    ReceivedBytes = tuple[Bytes, _native.Status]


def encode_object(call: str, obj: Any, pickle: bool) -> Bytes:
    """The bytes of an object, for a call of this name."""
    import numpy as np  # imported late: ranks that send no objects start faster

    from unisono.engine import encoding

    try:
        return np.frombuffer(encoding.encode(obj, pickle=pickle), np.uint8)
    except (TypeError, ValueError) as error:
        raise with_call_name(call, error) from None


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
    from unisono.engine import encoding

    return encoding.decode(data, pickle=pickle)
