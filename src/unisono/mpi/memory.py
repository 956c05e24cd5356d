"""Memory as bytes: what is in a buffer of any kind, and `buffer`, MPI's own."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from unisono.mpi import constants
from unisono.mpi.errors import Exception


class buffer(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory as bytes: `buffer.allocate(n)`, or `buffer(other)` for that of another object."""

    def __new__(cls, buf: Any = b"") -> Any:
        """The memory of another object."""
        return _as(cls, bytes_of(buf)[0])

    @classmethod
    def allocate(cls, nbytes: int, clear: bool = False) -> buffer:
        """New memory."""
        nbytes = _length(nbytes)
        return _as(cls, np.zeros(nbytes, np.uint8) if clear else np.empty(nbytes, np.uint8))

    @classmethod
    def frombuffer(cls, obj: Any, readonly: bool = False) -> buffer:
        """The memory of another object."""
        raw = bytes_of(obj)[0]
        if readonly:
            raw = raw[:]
            raw.flags.writeable = False
        return _as(cls, raw)

    @classmethod
    def fromaddress(cls, address: int, nbytes: int, readonly: bool = False) -> buffer:
        """The memory at an address. It must stay valid."""
        if _length(nbytes) > 0 and address == 0:
            raise ValueError("expecting non-NULL address")
        raw = at_address(address, nbytes)
        raw.flags.writeable = not readonly
        return _as(cls, raw)

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.ctypes.data if self.size else 0

    @property
    def obj(self) -> Any:
        """The object whose memory it is."""
        return self.base

    @property
    def format(self) -> str:
        """That of bytes."""
        return "B"

    @property
    def readonly(self) -> bool:
        """Whether it cannot be written to."""
        return not self.flags.writeable

    def __getitem__(self, item: Any) -> Any:
        found = super().__getitem__(item)
        return int(found) if np.ndim(found) == 0 else found

    def __bool__(self) -> bool:
        return self.size > 0

    def cast(self, format: str, shape: Any = None) -> memoryview:  # noqa: A002
        """A memoryview of another format."""
        view = memoryview(self.view(np.ndarray))
        return view.cast(format) if shape is None else view.cast(format, shape)

    def toreadonly(self) -> buffer:
        """The same memory, which this object cannot write to."""
        return type(self).frombuffer(self, readonly=True)

    def release(self) -> None:
        """Let go of the memory: it has no bytes any more."""
        self.resize(0, refcheck=False) if self.base is None else self._let_go()

    def _let_go(self) -> None:
        self.shape = (0,) if self.size == 0 else self.shape


memory = buffer


def _as(cls: Any, raw: Any) -> Any:
    return raw.view(cls)


def _length(nbytes: int) -> int:
    if nbytes < 0:
        raise ValueError("expecting non-negative buffer length")
    return nbytes


def at_address(address: int, nbytes: int) -> Any:
    """The memory at an address, as bytes."""
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), np.uint8)


class BottomType(int):
    """The type of BOTTOM: displacements are addresses."""

    def __new__(cls) -> Any:
        """The address 0."""
        return super().__new__(cls, 0)

    def __repr__(self) -> str:
        return "BOTTOM"

    def __reduce__(self) -> Any:
        return "BOTTOM"


class InPlaceType(int):
    """The type of IN_PLACE: the data is in the receive buffer."""

    def __new__(cls) -> Any:
        """Its only value."""
        return super().__new__(cls, -1)

    def __repr__(self) -> str:
        return "IN_PLACE"

    def __reduce__(self) -> Any:
        return "IN_PLACE"


class BufferAutomaticType(int):
    """The type of BUFFER_AUTOMATIC: no memory needs to be attached."""

    def __new__(cls) -> Any:
        """Its only value."""
        return super().__new__(cls, 0)

    def __repr__(self) -> str:
        return "BUFFER_AUTOMATIC"

    def __reduce__(self) -> Any:
        return "BUFFER_AUTOMATIC"


BOTTOM, IN_PLACE, BUFFER_AUTOMATIC = BottomType(), InPlaceType(), BufferAutomaticType()


def is_buffer(x: Any) -> bool:
    """Whether it is a buffer, and no list that describes one."""
    if isinstance(x, np.ndarray):
        return True
    try:
        memoryview(x)
    except TypeError:
        return hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")
    except (BufferError, ValueError):
        return True
    return True


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
    return flat.view(np.uint8) if x.dtype != object else _refuse_objects()


def _refuse_objects() -> Any:
    raise ValueError("message: an array of Python objects has no bytes to send; use the lowercase call")


def _code(dtype: Any) -> str:
    if dtype.kind in "Vmo" or dtype.byteorder == ">":
        return str(dtype.str)
    return "S" if dtype.kind == "S" and dtype.itemsize == 1 else dtype.char if dtype.kind != "S" else dtype.str


def _of_object(x: Any) -> tuple[Any, str]:
    try:
        view = memoryview(x)
    except TypeError:
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


def _of_interface(x: Any) -> tuple[Any, str]:
    """The memory of an object with DLPack, or with the array interface of CUDA but in the host's memory."""
    if hasattr(x, "__dlpack__"):
        array = np.from_dlpack(x)
        if not array.flags.writeable:  # a capsule that cannot say so
            flat = at_address(array.ctypes.data, array.nbytes)
            writable: Any = np.ndarray(array.shape, array.dtype, flat, 0, array.strides)
            return _of_array(writable), _code(array.dtype)
        return _of_array(array), _code(array.dtype)
    face = getattr(x, "__cuda_array_interface__", None)
    if face is None:
        raise TypeError("message: expecting buffer or list/tuple")
    return _of_cuda_interface(face)


def _of_cuda_interface(face: dict[str, Any]) -> tuple[Any, str]:
    dtype = np.dtype(face["typestr"])
    if dtype.byteorder == ">":
        raise BufferError("typestr with non-native byte order")
    if face.get("mask") is not None:
        raise BufferError("__cuda_array_interface__: cannot handle masked arrays")
    count = math.prod(face["shape"])
    address, readonly = face["data"]
    if face.get("strides") is not None:
        layout: Any = np.ndarray(face["shape"], dtype, None, 0, face["strides"]) if False else None
        _check_strides(face["shape"], face["strides"], dtype.itemsize, layout)
    raw = at_address(address or 0, count * dtype.itemsize)
    raw.flags.writeable = not readonly
    return raw, _code(dtype)


def _check_strides(shape: Any, strides: Any, itemsize: int, _: Any) -> None:
    for axes in (range(len(shape))[::-1], range(len(shape))):
        step, fits = itemsize, True
        for axis in axes:
            fits = fits and (shape[axis] <= 1 or strides[axis] == step)
            step *= shape[axis]
        if fits:
            return
    raise BufferError("__cuda_array_interface__: the memory is not contiguous")


# ---- attached memory, addresses


def Alloc_mem(size: int, info: Any = None) -> buffer:  # noqa: ARG001
    """New memory."""
    return buffer.allocate(size, clear=True)


def Free_mem(mem: buffer) -> None:
    """Let go of memory of `Alloc_mem`."""
    mem.release()


def Get_address(location: Any) -> int:
    """The address of a buffer."""
    raw = bytes_of(location)[0]
    return int(raw.ctypes.data)


def Aint_add(base: int, disp: int) -> int:
    """The sum of an address and a displacement."""
    return base + disp


def Aint_diff(addr1: int, addr2: int) -> int:
    """The difference of two addresses."""
    return addr1 - addr2


_attached: list[Any] = []


def Attach_buffer(buf: Any) -> None:
    """Give memory for buffered sends. They need none: this only keeps it for `Detach_buffer`."""
    if _attached:
        raise Exception(constants.ERR_BUFFER, "a buffer is attached already")
    _attached.append(buf)


def Detach_buffer() -> Any:
    """The memory that was attached."""
    return _attached.pop() if _attached else None


def Flush_buffer() -> None:
    """Wait until buffered sends have left their buffer: they have."""
