"""Objects to bytes and back, typed and safe: decoding runs no code of the sender's."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["decode", "encode"]


def encode(obj: Any, *, pickle: bool = False) -> bytes:
    """The bytes of an object."""
    return msgspec.msgpack.encode(obj)


def decode(data: Any, *, pickle: bool = False) -> Any:
    """The object of `encode`'s bytes."""
    return msgspec.msgpack.decode(data)
