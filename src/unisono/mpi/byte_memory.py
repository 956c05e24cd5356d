"""`buffer`: memory as bytes, and the memory that a program attaches for buffered sends."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.mpi import constants
from unisono.mpi.buffers import BUFFER_AUTOMATIC, BottomType, at_address, bytes_of
from unisono.mpi.errors import Exception, exact, whole, wrong_class
from unisono.mpi.handle import Handle
from unisono.mpi.progress import Ended
from unisono.mpi.request import Request

_U8 = np.dtype(np.uint8)


class buffer(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory as bytes: `buffer.allocate(n)`, or `buffer(other)` for that of another object."""

    _obj: Any = None

    def __new__(cls, *buf: Any) -> Any:
        """The memory of another object."""
        return cls.frombuffer(*buf) if buf else _over(cls, np.empty(0, np.uint8), None)

    @classmethod
    def allocate(cls, nbytes: int, clear: bool = False) -> buffer:
        """New memory."""
        raw = (np.zeros if clear else np.empty)(_length(nbytes), np.uint8)
        return _over(cls, raw, raw)

    @classmethod
    def frombuffer(cls, obj: Any, readonly: bool = False) -> buffer:
        """The memory of another object."""
        if obj is None:
            raise TypeError("expecting a buffer, got None")
        made = _over(cls, bytes_of(obj)[0], obj)
        if readonly:
            made.flags.writeable = False
        return made

    @classmethod
    def fromaddress(cls, address: int, nbytes: int, readonly: bool = False) -> buffer:
        """The memory at an address. It must stay valid."""
        if _length(nbytes) > 0 and address == 0:
            raise ValueError("expecting non-NULL address")
        return _over(cls, at_address(address, nbytes, None, readonly), None)

    @property
    def address(self) -> int:
        """Where it begins; 0: nowhere."""
        return 0 if self.base is None else int(self.__array_interface__["data"][0])

    @property
    def obj(self) -> Any:
        """The object whose memory it is."""
        return self._obj

    @property
    def format(self) -> str:
        """That of bytes."""
        return "B"

    @property
    def readonly(self) -> bool:
        """Whether it cannot be written to."""
        return not self.flags.writeable

    def __bool__(self) -> bool:
        return self.size > 0

    def __getitem__(self, item: Any) -> Any:
        found = super().__getitem__(_place(item))
        return found if isinstance(found, np.ndarray) else int(found)

    def __setitem__(self, item: Any, value: Any) -> None:
        if self.readonly and self.size:
            raise TypeError("the memory is read-only")
        place = _place(item)
        if not isinstance(value, int):
            value = bytes_of(value)[0]
            expected = len(range(*place.indices(self.size))) if isinstance(place, slice) else 1
            if value.size != expected:
                raise ValueError(f"{value.size} bytes for {expected}")
        super().__setitem__(place, value)

    def __delitem__(self, item: Any) -> None:
        raise NotImplementedError("memory has no items to delete")

    def cast(self, format: str, shape: Any = None) -> memoryview:  # noqa: A002
        """A memoryview of another format."""
        view: Any = self.view(np.ndarray).data
        return view.cast(format) if shape is None else view.cast(format, shape)

    def tobytes(self, order: str | None = None) -> bytes:
        """A copy of the bytes."""
        return super().tobytes()

    def toreadonly(self) -> buffer:
        """The same memory, which this object cannot write to."""
        made = _over(type(self), self.view(np.ndarray), self._obj)
        made.flags.writeable = False
        return made

    def release(self) -> None:
        """Let go of the memory: it has no bytes any more."""
        np.ndarray.__setstate__(self, (1, (0,), _U8, False, b""))  # type: ignore[arg-type]
        self._obj = None


memory = buffer


def _over(cls: Any, raw: Any, obj: Any) -> Any:
    """A buffer that does not own its memory, so that it can let go of it."""
    made = raw.view(cls)
    made._obj = obj
    if obj is None and raw.size == 0:
        made.release()
    return made


def _place(item: Any) -> Any:
    if isinstance(item, slice):
        if item.step not in (None, 1):
            raise IndexError("slice with step not supported")
        return item
    return exact(item, "index")


def _length(nbytes: int) -> int:
    nbytes = whole(nbytes, "nbytes")
    if nbytes < 0:
        raise ValueError("expecting non-negative buffer length")
    return nbytes


def Alloc_mem(size: int, info: Any = None) -> buffer:
    """New memory."""
    return buffer.allocate(size, clear=True)


def Free_mem(mem: buffer) -> None:
    """Let go of memory of `Alloc_mem`."""
    if not isinstance(mem, buffer):
        raise wrong_class("mem", "buffer", mem)
    mem.release()


def Get_address(location: Any) -> int:
    """The address of a buffer."""
    if isinstance(location, buffer):
        return location.address
    if isinstance(location, BottomType):
        return 0
    return int(bytes_of(location)[0].__array_interface__["data"][0])


def Aint_add(base: int, disp: int) -> int:
    """The sum of an address and a displacement."""
    return base + disp


def Aint_diff(addr1: int, addr2: int) -> int:
    """The difference of two addresses."""
    return addr1 - addr2


class HasBuffer(Handle):
    """The methods of an object to which memory for buffered sends can be attached. They need none."""

    def Attach_buffer(self, buf: Any) -> None:
        """Give memory for buffered sends, which is only kept."""
        state = self._alive()
        if getattr(state, "attached", None) is not None:
            raise Exception(constants.ERR_BUFFER, "a buffer is attached already")
        if buf is not BUFFER_AUTOMATIC and buf is not None:
            bytes_of(buf, writable=True)
        state.attached = buf

    def Detach_buffer(self) -> Any:
        """The memory that was attached."""
        state = self._alive()
        found, state.attached = getattr(state, "attached", None), None
        return found

    def Flush_buffer(self) -> None:
        """Wait until buffered sends have left their buffer: they have."""
        self._alive()

    def Iflush_buffer(self) -> Any:
        """See `Flush_buffer`."""
        self._alive()
        return Request._for(Ended())


class _Process(HasBuffer):
    def _alive(self) -> Any:
        return self


_process = _Process()
Attach_buffer, Detach_buffer = _process.Attach_buffer, _process.Detach_buffer
Flush_buffer, Iflush_buffer = _process.Flush_buffer, _process.Iflush_buffer
