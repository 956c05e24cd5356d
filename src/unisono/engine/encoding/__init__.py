"""Encodes objects as bytes and decodes them, typed and safe: decoding runs no code from the sender.

    nodes.py     the kinds of nodes, and the limits
    encoder.py    objects -> nodes, values and buffers        decoder.py   the reverse
    message_frame.py     nodes, values and buffers <-> one piece of memory
    class_registry.py   dataclasses, Structs and enums, found among those that the receiver has imported
    dtypes.py  NumPy's element types as text               item_path.py    the path to an item of an object

docs/objects.md lists what can be sent, and draws the bytes.
"""

from __future__ import annotations

import pickle as pickling  # noqa: TID251  (only on request: see the arguments called pickle)
from typing import Any

from unisono.engine.encoding.decoder import ObjectDecoder
from unisono.engine.encoding.encoder import EncodeError, ObjectEncoder
from unisono.engine.encoding.item_path import path_to
from unisono.engine.encoding.message_frame import EncodedMessage, PayloadFormat, frame, split

__all__ = ["decode", "encode", "encode_in_pieces"]


def encode(obj: Any, *, pickle: bool = False) -> bytes:
    """The bytes of an object; its contents are copied once.

    Args:
        obj: None, bool, int, float, complex, str, bytes, bytearray; list, tuple, dict, set, frozenset of
            such; NumPy arrays and scalars without Python objects in them; dataclasses, msgspec Structs
            and enums whose class is at the top level of a module. Subclasses of these types are refused.
        pickle: use pickle instead, which accepts nearly everything and is decoded only on request.
    Raises:
        TypeError: something in it cannot be sent; the text names it and its path.
        ValueError: it contains itself, or is nested too deep.
    """
    return b"".join(encode_in_pieces(obj, pickle=pickle))


def encode_in_pieces(obj: Any, *, pickle: bool = False) -> list[bytes | bytearray | memoryview]:
    """The same in pieces, one behind another; large arrays among them are not copied."""
    if pickle:
        return _pickled(obj)
    writer = ObjectEncoder()
    try:
        writer.write(obj)
    except EncodeError as refused:
        raise refused.error(_refusal(obj, refused)) from None
    except MemoryError:
        raise ValueError("cannot encode: this machine has not enough memory") from None
    return frame(PayloadFormat.TYPED, writer.nodes, writer.values, writer.small, writer.large)


def decode(data: Any, *, pickle: bool = False, in_place: bool = False) -> Any:
    """The object of `encode`'s bytes.

    Large arrays share the memory of `data` when that is writable, or with `in_place`; nothing else does.

    Args:
        data: anything with the buffer protocol, contiguous.
        pickle: accept a pickle, too. Unpickling runs code that the sender chose: only from senders you trust.
    Raises:
        ValueError: these are not (all of) the bytes of an object; or they are a pickle, without pickle=True;
            or this process has not imported a class in it.
    """
    message = split(data)
    if message.envelope == PayloadFormat.TYPED:
        return ObjectDecoder(message, in_place).read()
    if not pickle:
        raise ValueError(
            "cannot decode: the sender pickled this object, and unpickling runs what the sender wrote. "
            "Pass pickle=True on every rank if you trust them all, or send it without pickle=True"
        )
    return _unpickled(message, in_place)


def _refusal(obj: Any, refused: EncodeError) -> str:
    place = path_to(obj, refused.culprit)
    return f"cannot encode {refused.what}{place and ' at ' + place}: {refused.why}"


def _pickled(obj: Any) -> list[bytes | bytearray | memoryview]:
    buffers: list[pickling.PickleBuffer] = []
    data = pickling.dumps(obj, protocol=5, buffer_callback=buffers.append)
    large = [buffer.raw() for buffer in buffers]
    return frame(PayloadFormat.PICKLED, data, [one.nbytes for one in large], b"", large)


def _unpickled(message: EncodedMessage, in_place: bool) -> Any:
    """The unpickled object; its buffers are as those of a typed message."""
    pieces = [message.large.take(nbytes) for nbytes in message.sizes()]
    message.small.end()
    message.large.end()
    buffers = [bytearray(piece) if piece.readonly and not in_place else piece for piece in pieces]
    return pickling.loads(message.nodes, buffers=buffers)  # noqa: S301  (asked for)
