"""`File`: MPI-IO on files of POSIX.

Every rank opens the file itself and reads and writes its own bytes. Ranks meet where MPI says that a call is
collective and its result depends on them: to open, to close, to size a file, and to move the shared pointer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from unisono.mpi import constants
from unisono.mpi.datatype import Datatype
from unisono.mpi.errhandler import HasErrhandler
from unisono.mpi.errors import Exception, whole
from unisono.mpi.file_access import NOT_BOTH, OpenFile, guarded, opened
from unisono.mpi.file_storage import classed
from unisono.mpi.handle import Handle, State, method
from unisono.mpi.info import INFO_NULL, HasInfo, Info
from unisono.mpi.message_spec import Block, simple
from unisono.mpi.named_types import NAMED
from unisono.mpi.request import Request
from unisono.mpi.status import Status

BYTE = NAMED["BYTE"]


def _shown(doc: str, read: Callable[[OpenFile], Any]) -> tuple[Any, Any]:
    """As `getter`, of a file that is open."""
    get = method(doc, lambda self: read(self._open()))
    return get, property(get)


class File(HasErrhandler, HasInfo, Handle):
    """A file that the ranks of a communicator have opened together."""

    _null = constants.ERR_FILE
    _null_file: Any = None  # FILE_NULL, whose error handler counts once a file is closed

    def _alive(self) -> Any:
        if self._state is None and self is not FILE_NULL:
            raise Exception(constants.ERR_FILE, "the file is closed, or null")
        return _default if self._state is None else self._state

    _hints = property(lambda self: self._open().info)

    def _open(self) -> OpenFile:
        if self._state is None:
            raise Exception(constants.ERR_FILE, "the file is closed, or null")
        return self._state  # type: ignore[no-any-return]

    # ---- the file

    @classmethod
    @guarded
    def Open(cls, comm: Any, filename: Any, amode: int = constants.MODE_RDONLY, info: Any = INFO_NULL) -> Any:
        """Open a file. All ranks of `comm` call it; it fails on all of them, or on none."""
        file = cls()
        file._state = opened(comm, os.fsdecode(filename), whole(amode, "amode"), info)
        file._state.handler = _default.handler
        return file

    @guarded
    def Close(self) -> None:
        """Close it. Collective; with MODE_DELETE_ON_CLOSE it is then removed."""
        state, self._state = self._open(), None
        state.close()

    @classmethod
    @guarded
    def Delete(cls, filename: Any, info: Any = INFO_NULL) -> None:
        """Remove a file that is not open."""
        with classed(os.fsdecode(filename)):
            os.unlink(filename)

    @guarded
    def Set_size(self, size: int) -> None:
        """Set its size in bytes. Collective."""
        self._open().resize(whole(size, "size"), os.ftruncate)

    @guarded
    def Preallocate(self, size: int) -> None:
        """Make sure that the first `size` bytes have room on the disk. Collective."""
        self._open().resize(whole(size, "size"), lambda fd, n: os.posix_fallocate(fd, 0, n) if n else None)

    @guarded
    def Get_size(self) -> int:
        """Its size in bytes."""
        return os.fstat(self._open().fd).st_size

    Get_amode, amode = _shown("How it was opened.", lambda state: state.amode)
    Get_group, group = _shown("The ranks that have opened it.", lambda state: state.comm.Get_group())
    size = property(Get_size)
    group_size = _shown("How many ranks have opened it.", lambda state: state.comm.Get_size())[1]
    group_rank = _shown("This process's rank among them.", lambda state: state.comm.Get_rank())[1]

    @guarded
    def Sync(self) -> None:
        """Let what this rank has written reach the disk, and other hosts. Collective."""
        state = self._open()
        os.fsync(state.fd)
        state.comm.Barrier()

    def Get_atomicity(self) -> bool:
        """Whether each access is whole for the others."""
        return self._open().atomic

    @guarded
    def Set_atomicity(self, flag: bool) -> None:
        """Lock the bytes of each access. Collective."""
        state = self._open()
        state.comm.Barrier()
        state.atomic = bool(flag)

    atomicity = property(Get_atomicity, Set_atomicity)

    # ---- the view

    @guarded
    def Set_view(
        self, disp: int = 0, etype: Datatype = BYTE, filetype: Datatype | None = None,
        datarep: str = "native", info: Info = INFO_NULL,
    ) -> None:  # fmt: skip
        """See the bytes that `filetype` covers, from byte `disp` on, in items of `etype`. Collective."""
        state, filetype = self._open(), etype if filetype is None else filetype
        if disp == constants.DISPLACEMENT_CURRENT and state.amode & constants.MODE_SEQUENTIAL:
            disp = state.byte_offset(state.shared.add(0))
        item, seen = etype._alive(), filetype._alive()
        if datarep not in ("native", "internal", "external32"):
            raise Exception(constants.ERR_UNSUPPORTED_DATAREP, f"there is no data representation {datarep!r}")
        if disp < 0 or not item.size or seen.size % item.size:
            raise Exception(
                constants.ERR_ARG, f"disp {disp}, filetype of {seen.size} bytes, etype of {item.size} bytes"
            )
        state.see(disp, etype, filetype, datarep)

    def Get_view(self) -> tuple[int, Datatype, Datatype, str]:
        """(disp, etype, filetype, datarep)."""
        state = self._open()
        etype, filetype, datarep = state.types
        return state.displacement, Datatype(etype), Datatype(filetype), datarep

    @guarded
    def Get_byte_offset(self, offset: int) -> int:
        """Where an item of the view lies in the file."""
        return self._open().byte_offset(_positive(offset))

    def Get_type_extent(self, datatype: Datatype) -> int:
        """Bytes from one item to the next in the file."""
        self._open()
        return datatype.Get_extent()[1]

    # ---- the pointers

    def _seekable(self) -> OpenFile:
        state = self._open()
        state.refuse(constants.MODE_SEQUENTIAL)
        return state

    @guarded
    def Seek(self, offset: int, whence: int = constants.SEEK_SET) -> None:
        """Set this rank's pointer, in items."""
        state = self._seekable()
        state.position = state.sought(offset, whence, state.position)

    @guarded
    def Get_position(self) -> int:
        """This rank's pointer, in items."""
        return self._seekable().position

    @guarded
    def Seek_shared(self, offset: int, whence: int = constants.SEEK_SET) -> None:
        """Set the shared pointer, in items. Collective."""
        self._seekable().move_shared(offset, whence)

    @guarded
    def Get_position_shared(self) -> int:
        """The shared pointer, in items."""
        return self._seekable().shared.add(0)

    # ---- data: the methods are made below

    def _block(self, call: str, buf: Any) -> Block:
        self._open()
        return simple(buf, writable=call.startswith("Read"))


def _positive(offset: int) -> int:
    if whole(offset, "offset") < 0:
        raise Exception(constants.ERR_ARG, f"offset {offset} is negative")
    return offset


def _fill(status: Status | None, nbytes: int) -> None:
    if status is not None:
        status._set(constants.ANY_SOURCE, constants.ANY_TAG, nbytes)


def _now(file: File, call: str, at: tuple[int, ...], buf: Any, status: Status | None = None) -> None:
    _fill(status, file._open().access(call, file._block(call, buf), *map(_positive, at)))


def _started(file: File, call: str, at: tuple[int, ...], buf: Any) -> Request:
    return Request._for(file._open().start(call, file._block(call, buf), *map(_positive, at)))


def _begun(file: File, call: str, at: tuple[int, ...], buf: Any) -> None:
    state = file._open()
    state.begin()
    state.split = call, state.access(call, file._block(call, buf), *map(_positive, at))


def _ended(file: File, call: str, _at: Any, buf: Any, status: Status | None = None) -> None:
    _fill(status, file._open().end(call))  # `begin` has used the buffer


def _method(call: str, form: Any) -> Any:
    """A method with the arguments of `form`; an offset is the first, if the call's name says so."""
    if "_at" in call and form is not _ended:
        return lambda file, offset, buf, *args, **named: form(file, call, (offset,), buf, *args, **named)
    return lambda file, buf, *args, **named: form(file, call, (), buf, *args, **named)


def _make_methods() -> None:
    """Read and Write: at an offset, at a pointer, at the shared one, in the order of ranks, by all ranks."""
    kinds = {
        "": "at this rank's pointer", "_at": "at an offset", "_shared": "at the shared pointer",
        "_all": "at this rank's pointer, collective", "_at_all": "at an offset, collective",
        "_ordered": "at the shared pointer, in the order of ranks, collective",
    }  # fmt: skip
    for call, where in ((verb + kind, text) for verb in ("Read", "Write") for kind, text in kinds.items()):
        forms: list[tuple[str, Any, str]] = [(call, _now, "")]
        if not call.endswith("_ordered"):
            forms.append(("I" + call.lower(), _started, ", without waiting; returns a Request"))
        if call.endswith(NOT_BOTH):
            forms += [(call + "_begin", _begun, "; begin"), (call + "_end", _ended, "; end")]
        for name, form, more in forms:
            method = _method(call, form)
            method.__name__, method.__qualname__ = name, f"File.{name}"
            method.__doc__ = f"{call.partition('_')[0]} {where}{more}."
            setattr(File, name, guarded(method))


_make_methods()
FILE_NULL = File()
File._null_file = FILE_NULL
_default: Any = State()
_default.handler = None


def Register_datarep(datarep: str, read_fn: Any, write_fn: Any, extent_fn: Any) -> None:
    """Refused: files are native, or external32."""
    raise NotImplementedError(f"data representation {datarep!r}: files are native, internal or external32")
