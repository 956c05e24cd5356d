"""Where PyTorch keeps whether a storage may be resized. Native code reads and writes it there.

Resizing frees memory that an asynchronous call may use. PyTorch refuses to resize the storage of a NumPy
array; it has no function that says so of another storage. So the flag is found as
`unisono.torch.option_offsets` finds options: it is the one byte that changes when an array is made of a
tensor.
"""

from __future__ import annotations

import sys

from unisono import _native

from .probe import PrivateName, find

__all__ = ["NAMES", "places"]

NAMES = {
    "address": PrivateName(
        "torch:UntypedStorage._cdata",
        purpose="refuse to resize a storage while an asynchronous call uses it",
        without="a program that resizes such a storage may crash",
    ),
}
POINTER_BYTES = 8
ABOVE = 256  # more bytes than PyTorch's object has


def places() -> tuple[int, int]:
    """Return the offset of the pointer in a storage's Python object, and that of the flag behind it.

    (-1, -1): it is not certain where they are.
    """
    import torch

    if find(NAMES["address"]) is None:
        return -1, -1
    tensors = [torch.empty(64, dtype=torch.uint8) for _ in range(3)]
    found = {_places(tensor) for tensor in tensors}
    return found.pop() if len(found) == 1 else (-1, -1)


def _places(tensor: object) -> tuple[int, int]:
    storage = tensor.untyped_storage()  # type: ignore[attr-defined]
    address = storage._cdata
    held = _native.memory_at(id(storage), type(storage).__basicsize__)
    pointer = address.to_bytes(POINTER_BYTES, sys.byteorder)
    before = _native.memory_at(address, ABOVE)
    array = tensor.numpy()  # type: ignore[attr-defined]
    after = _native.memory_at(address, ABOVE)
    flags = [at for at, pair in enumerate(zip(before, after, strict=False)) if pair == (1, 0)]
    certain = held.count(pointer) == 1 and len(flags) == 1 and not storage.resizable() and array.nbytes
    return (held.index(pointer), flags[0]) if certain else (-1, -1)
