"""`Status`: where a message came from, and its size."""

from __future__ import annotations

from typing import Any

from unisono._native import StatusBase
from unisono.mpi import constants
from unisono.mpi.datatype import Datatype
from unisono.mpi.errors import whole, wrong_class
from unisono.mpi.handle import method
from unisono.mpi.named_types import NAMED
from unisono.mpi.progress import Operation

BYTE = NAMED["BYTE"]


def _field(name: str, doc: str, put: Any) -> tuple[Any, Any]:
    """A field: the method that returns it, and the property, which `put` sets."""
    get = method(doc, lambda self: getattr(self, f"_{name}"))
    return get, property(get, put)


class Status(StatusBase):
    """Source, tag, error and size of a message."""

    __slots__ = ("__weakref__",)

    def __new__(cls, status: Status | None = None) -> Any:
        """An empty status, or a copy of one."""
        if status is not None and not isinstance(status, Status):
            raise TypeError(f"expected Status, got {type(status).__name__}")
        self = super().__new__(cls)
        self._set(constants.ANY_SOURCE, constants.ANY_TAG, 0)
        if status is not None:
            self.__setstate__(status.__getstate__())
        return self

    def _set(self, source: int, tag: int, nbytes: int, cancelled: bool = False, error: int = 0) -> None:
        self._source, self._tag, self._nbytes = source, tag, nbytes
        self._cancelled, self._error = cancelled, error

    def Get_count(self, datatype: Datatype = BYTE) -> int:
        """The number of whole items; UNDEFINED: the message is not whole items of this type."""
        size = datatype.Get_size()
        if size == 0:
            return 0
        return self._nbytes // size if self._nbytes % size == 0 else constants.UNDEFINED

    def Get_elements(self, datatype: Datatype) -> int:
        """The number of elements of which its items are made."""
        state = datatype._alive()
        if state.size == 0:
            return 0
        items, rest = divmod(self._nbytes, state.size)
        found = items * sum(count for _, count in state.layout.atoms)
        for nbytes, count in state.layout.atoms:
            taken = min(rest // nbytes, count)
            found, rest = found + taken, rest - taken * nbytes
            if taken < count:
                break
        return found if rest == 0 else constants.UNDEFINED

    def Set_elements(self, datatype: Datatype, count: int) -> None:
        """Set the size, as a number of items."""
        self._nbytes = datatype.Get_size() * whole(count, "count")

    def Set_source(self, source: int) -> None:
        """Set the rank that sent the message."""
        self._source = whole(source, "source")

    def Set_tag(self, tag: int) -> None:
        """Set the tag of the message."""
        self._tag = whole(tag, "tag")

    def Set_error(self, error: int) -> None:
        """Set its error code."""
        self._error = whole(error, "error")

    def Set_cancelled(self, flag: bool) -> None:
        """Set whether the operation was cancelled."""
        if not hasattr(flag, "__bool__"):
            raise wrong_class("flag", "bool", flag)
        self._cancelled = bool(flag)

    Get_source, source = _field("source", "The rank that sent the message.", Set_source)
    Get_tag, tag = _field("tag", "The tag of the message.", Set_tag)
    Get_error, error = _field("error", "Its error code.", Set_error)
    Is_cancelled, cancelled = _field("cancelled", "Whether the operation was cancelled.", Set_cancelled)
    count: Any = property(
        lambda self: self._nbytes,
        lambda self, nbytes: setattr(self, "_nbytes", whole(nbytes, "nbytes")),
        doc="Its size in bytes.",
    )

    def __eq__(self, other: object) -> bool:
        return self.__getstate__() == other.__getstate__() if isinstance(other, Status) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, int]:
        return {
            "source": self._source, "tag": self._tag, "error": self._error, "count": self._nbytes,
            "cancelled": self._cancelled,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, int]) -> None:
        self._set(state["source"], state["tag"], state["count"], bool(state["cancelled"]), state["error"])

    def __reduce__(self) -> Any:
        return type(self), (), self.__getstate__()

    def tomemory(self) -> memoryview:
        """A copy of its five numbers, as read-only memory of ints."""
        return _numbers(self).toreadonly()

    def py2f(self) -> list[int]:
        """Its five numbers."""
        return _numbers(self).tolist()

    @classmethod
    def f2py(cls, arg: list[int]) -> Status:
        """The status of five numbers."""
        status: Status = cls()
        low, high, source, tag, error = arg
        status._set(source, tag, low & 0xFFFFFFFF | (high >> 1) << 32, bool(high & 1), error)
        return status


def check_status(status: Status | None) -> None:
    """Refuse an argument that is no status.

    Raises:
        TypeError: it is none.
    """
    if status is not None and not isinstance(status, Status):
        raise wrong_class("status", "Status", status)


def fill_status(status: Status | None, operation: Operation | None) -> None:
    """What a status says of an operation that has ended; None: there was none."""
    if status is not None and operation is not None:
        status._set(operation.source, operation.tag, operation.nbytes, operation.cancelled)
    elif status is not None:
        status._set(constants.ANY_SOURCE, constants.ANY_TAG, 0)


def _numbers(status: Status) -> memoryview:
    import array

    low = status._nbytes & 0xFFFFFFFF
    numbers = [
        low - (1 << 32) if low >> 31 else low, status._nbytes >> 32 << 1 | status._cancelled,
        status._source, status._tag, status._error,
    ]  # fmt: skip
    return memoryview(array.array("i", numbers))
