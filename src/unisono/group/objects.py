"""Python objects over a group: their encoded bytes travel as arrays of bytes, their lengths first.

What can be sent is listed in `unisono.encoding`; anything else is a TypeError that names it. With
`pickle=True` everything that pickles can be sent, and the receiver runs what the sender wrote: only among
processes that trust each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.group.planning import named

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Lengths = np.ndarray[Any, np.dtype[np.int64]]

__all__ = ["allocate", "decoded", "encoded", "length", "lengths"]


def encoded(call: str, obj: Any, pickle: bool) -> Bytes:
    """The bytes of an object, for a call of this name."""
    import numpy as np  # here and below: ranks that send no objects start sooner

    from unisono import encoding

    try:
        return np.frombuffer(encoding.encode(obj, pickle=pickle), np.uint8)
    except (TypeError, ValueError) as error:
        raise named(call, error) from None


def length(encoded: Bytes) -> Lengths:
    """How many bytes an object takes, as an array to send."""
    return lengths([encoded.size])


def lengths(values: list[int]) -> Lengths:
    """Lengths as an array to send or to receive into."""
    import numpy as np

    return np.array(values, np.int64)


def allocate(nbytes: int) -> Bytes:
    """An array to receive an object's bytes into."""
    import numpy as np

    return np.empty(nbytes, np.uint8)


def decoded(data: Any, *, pickle: bool) -> Any:
    """The object that these bytes say."""
    from unisono import encoding

    return encoding.decode(data, pickle=pickle)
