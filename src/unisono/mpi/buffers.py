"""The bytes of a buffer of any kind: the buffer protocol, DLPack, array interfaces, addresses."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from unisono.mpi.dlpack import contiguous, readable, tensor_of
from unisono.mpi.errors import exact


class _Kept:
    """Memory at an address that is valid as long as an object lives."""

    def __init__(self, address: int, nbytes: int, kept: Any, readonly: bool) -> None:
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, readonly),
        }  # fmt: skip
        self._kept = kept


def at_address(address: int, nbytes: int, kept: Any = None, readonly: bool = False) -> Any:
    """The memory at an address, as bytes. kept: what must live as long."""
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    return np.asarray(_Kept(address, nbytes, kept, readonly))


class _Constant(int):
    """An int that is one place of memory for MPI, with its name."""

    _value, _name = 0, ""

    def __new__(cls) -> Any:
        """Its only value."""
        return super().__new__(cls, cls._value)

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> Any:
        return self._name


class BottomType(_Constant):
    """The type of BOTTOM: displacements are addresses."""

    _value, _name = 0, "BOTTOM"


class InPlaceType(_Constant):
    """The type of IN_PLACE: the data is in the receive buffer."""

    _value, _name = -1, "IN_PLACE"


class BufferAutomaticType(_Constant):
    """The type of BUFFER_AUTOMATIC: no memory needs to be attached."""

    _value, _name = 0, "BUFFER_AUTOMATIC"


BOTTOM, IN_PLACE, BUFFER_AUTOMATIC = BottomType(), InPlaceType(), BufferAutomaticType()


def in_place(x: Any) -> bool:
    """Whether a send buffer, or receive buffer, says that the data is in the other one."""
    return x is None or x is IN_PLACE


def is_buffer(x: Any) -> bool:
    """Whether it is a buffer, and no list that describes one."""
    if isinstance(x, np.ndarray):
        return True
    try:
        found = _view_of(x) is not None
    except (BufferError, ValueError):
        return True
    return found or hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")


def bytes_of(x: Any, writable: bool = False) -> tuple[Any, str]:
    """(its bytes as an array, the code of its items' type).

    Raises:
        TypeError: it is no buffer.  BufferError: it is not contiguous, or cannot be written to.
    """
    if x is None:
        return np.zeros(0, np.uint8), "B"
    if isinstance(x, np.ndarray):
        raw, code = _of_array(x), _code(x.dtype)
    else:
        raw, code = _of_object(x)
    if writable and not raw.flags.writeable and raw.size:
        raise BufferError("the buffer is read-only")
    return raw, code


def _of_array(x: Any) -> Any:
    if x.flags.c_contiguous:
        flat = x.reshape(-1)
    elif x.flags.f_contiguous:
        flat = x.T.reshape(-1)
    else:
        raise BufferError("ndarray is not contiguous")
    if x.dtype == object:
        raise ValueError("message: an array of Python objects has no bytes to send; use the lowercase call")
    return flat.view(np.uint8)


def _code(dtype: Any) -> str:
    text = dtype.kind == "S" and dtype.itemsize > 1
    return str(dtype.str if text or dtype.kind in "Vmo" or dtype.byteorder == ">" else dtype.char)


def _of_object(x: Any) -> tuple[Any, str]:
    view = _view_of(x)
    if view is None:
        return _of_interface(x)
    if not view.contiguous:
        raise BufferError("the buffer is not contiguous")
    code = view.format
    if code[:1] == ">":
        raise BufferError(f"format string {code!r} with non-native byte order")
    code = code[1:] if code[:1] in "@<=" else code
    if view.nbytes == 0:
        return np.zeros(0, np.uint8), code
    if view.ndim > 1 and not view.c_contiguous:
        return _of_array(np.asarray(view)), code
    return np.frombuffer(x, np.uint8), code


def _view_of(x: Any) -> memoryview | None:
    try:
        return memoryview(x)
    except TypeError:
        return None


def _of_interface(x: Any) -> tuple[Any, str]:
    """The memory of an object with DLPack, or with the array interface of CUDA but in the host's memory."""
    if hasattr(x, "__dlpack__"):
        address, nbytes, kind, readonly, kept = tensor_of(x)
        return at_address(address, nbytes, (x, kept), readonly), kind
    face = getattr(x, "__cuda_array_interface__", None)
    if face is None:
        raise TypeError("message: expecting buffer or list/tuple")
    return _of_cuda_interface(face, x)


def _of_cuda_interface(face: dict[str, Any], x: Any) -> tuple[Any, str]:
    typestr, shape = face["typestr"], face["shape"]
    if not isinstance(typestr, str) or not isinstance(shape, list | tuple):
        raise TypeError("__cuda_array_interface__: typestr is no str, or shape no tuple")
    if typestr[:1] not in "<|=":
        raise BufferError("__cuda_array_interface__: typestr with non-native byte order")
    fields = face.get("descr") or []
    if not isinstance(fields, list):
        raise TypeError("__cuda_array_interface__: descr is no list")
    if len(fields) > 1:
        warnings.warn(
            "__cuda_array_interface__: the fields of descr are moved as bytes", RuntimeWarning, stacklevel=2
        )
        plain = {**face, "shape": (*shape, int(typestr[2:])), "typestr": "|u1", "strides": None, "descr": []}
        return _of_cuda_interface(plain, x)
    if face.get("mask") is not None:
        raise BufferError("__cuda_array_interface__: cannot handle masked arrays")
    try:
        dtype = np.dtype(typestr)
    except TypeError:
        raise ValueError(f"__cuda_array_interface__: typestr {typestr!r}") from None
    if any(exact(size, "shape") < 0 for size in shape):
        raise BufferError(f"__cuda_array_interface__: the shape is {shape}")
    strides = face.get("strides")
    if strides is not None and not contiguous(shape, strides, dtype.itemsize):
        raise BufferError("__cuda_array_interface__: the memory is not contiguous")
    address, readonly = face["data"]
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes and not (address and readable(address)):
        raise BufferError("__cuda_array_interface__: the array is not in the memory of the host")
    return at_address(address or 0, nbytes, x, bool(readonly)), _code(dtype)
