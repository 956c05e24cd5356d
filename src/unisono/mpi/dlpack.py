"""The memory of an object with DLPack, read from its capsule without taking the tensor over.

So the producer keeps the tensor, and the capsule is kept as long as the memory is used.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
from typing import Any

from unisono.mpi.errors import whole

_HOST_DEVICES = (1, 3, 11)  # CPU, and memory of the host that CUDA and ROCm have pinned
_MAJOR = 1
_VERSIONED_OFFSET = 32  # of the tensor in a DLManagedTensorVersioned
_KINDS = {
    (0, 8): "b", (0, 16): "h", (0, 32): "i", (0, 64): "l", (1, 8): "B", (1, 16): "H", (1, 32): "I",
    (1, 64): "L", (2, 16): "e", (2, 32): "f", (2, 64): "d", (2, 128): "g", (5, 64): "F", (5, 128): "D",
    (5, 256): "G", (6, 8): "?",
}  # fmt: skip
"""The character of NumPy for (code, bits) of a type."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("device_number", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _capsule_of(x: Any) -> Any:
    kind, number = x.__dlpack_device__()
    stream = None if whole(kind, "dlpack: device") in _HOST_DEVICES else -1  # -1: wait for nothing
    whole(number, "dlpack: device")
    try:
        return x.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # a producer of the old interface
        return x.__dlpack__(stream=stream)


def _tensor_in(capsule: Any) -> tuple[_Tensor, bool]:
    """(the tensor, whether it is read-only)."""
    try:
        return _Tensor.from_address(_pointer(capsule, b"dltensor")), False
    except ValueError:
        pass
    try:
        at = _pointer(capsule, b"dltensor_versioned")
    except ValueError:
        raise BufferError("dlpack: the capsule has no tensor") from None
    if ctypes.c_uint32.from_address(at).value != _MAJOR:
        raise BufferError("dlpack: the tensor has another version")
    flags = ctypes.c_uint64.from_address(at + _VERSIONED_OFFSET - 8).value
    return _Tensor.from_address(at + _VERSIONED_OFFSET), bool(flags & 1)


def tensor_of(x: Any) -> tuple[int, int, str, bool, Any]:
    """(address, bytes, character of NumPy, read-only, what to keep) of the tensor of an object.

    Raises:
        BufferError: it is not in the host's memory, not contiguous, or of a type that has no whole bytes.
    """
    capsule = _capsule_of(x)
    tensor, readonly = _tensor_in(capsule)
    pair = tensor.code == 2 and tensor.lanes == 2  # a complex number, of producers that know no complex type
    bits = tensor.bits * tensor.lanes
    kind = _KINDS.get((5 if pair else tensor.code, bits))
    if tensor.lanes > 1 or kind is None:
        kind = kind if pair and kind else "V1"  # it moves as bytes
    if bits % 8:
        raise BufferError(f"dlpack: type code {tensor.code} of {tensor.bits} bits, {tensor.lanes} lanes")
    if tensor.ndim < 0 or (tensor.ndim and not tensor.shape):
        raise BufferError("dlpack: the tensor has no shape")
    shape = tensor.shape[: tensor.ndim] if tensor.ndim else []
    if any(size < 0 for size in shape):
        raise BufferError(f"dlpack: the shape is {shape}")
    strides = tensor.strides[: tensor.ndim] if tensor.strides and tensor.ndim else None
    if strides is not None and not contiguous(shape, strides, 1):
        raise BufferError("dlpack: the tensor is not contiguous")
    count = math.prod(shape)
    if count and not (tensor.data and readable(tensor.data)):
        raise BufferError("dlpack: the tensor is not in the memory of the host")
    return (tensor.data or 0) + tensor.byte_offset, count * bits // 8, kind, readonly, capsule


def readable(address: int) -> bool:
    """Whether this process can read the byte at an address: not that of a device."""
    byte = ctypes.create_string_buffer(1)
    there = (ctypes.c_size_t * 2)(address, 1)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(byte), 1)
    found: int = _libc.process_vm_readv(os.getpid(), here, 1, there, 1, 0)
    if found == 1 or ctypes.get_errno() == errno.EFAULT:
        return found == 1
    # A sandbox or an emulator refuses that call. This one reads the byte, too, and is slower.
    with open(os.memfd_create("unisono-probe"), "wb", buffering=0) as sink:
        try:
            return sink.write((ctypes.c_char * 1).from_address(address)) == 1
        except OSError:
            return False


_libc = ctypes.CDLL(None, use_errno=True)


def contiguous(shape: Any, strides: Any, itemsize: int) -> bool:
    """Whether items lie side by side, in C or Fortran order."""
    for axes in (range(len(shape))[::-1], range(len(shape))):
        step, fits = itemsize, True
        for axis in axes:
            fits = fits and (shape[axis] <= 1 or strides[axis] == step)
            step *= shape[axis]
        if fits:
            return True
    return 0 in shape
