"""An open file: its view, its pointers, and how ranks read and write it together."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono.mpi import constants, errhandler
from unisono.mpi.environment import Get_processor_name
from unisono.mpi.errors import Exception
from unisono.mpi.file_storage import (
    EXCHANGED_NBYTES,
    WINDOW_NBYTES,
    SharedNumber,
    classed,
    locked,
    read,
    write,
    write_sorted,
)
from unisono.mpi.handle import State
from unisono.mpi.layout import Pieces
from unisono.mpi.message_spec import Block
from unisono.mpi.named_types import NAMED
from unisono.mpi.progress import Operation

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

NOT_BOTH = ("_all", "_ordered")
"""What split collectives are named after; one at a time may be under way."""
_ACCESS = constants.MODE_RDONLY | constants.MODE_WRONLY | constants.MODE_RDWR
_FLAGS = {
    constants.MODE_RDONLY: os.O_RDONLY,
    constants.MODE_WRONLY: os.O_WRONLY,
    constants.MODE_RDWR: os.O_RDWR,
}
_SHARED = ("_shared", "_ordered")
_BYTE = NAMED["BYTE"]
_SPARSE = 8  # pieces that cover less than 1/8 of what they span are not written together


def guarded(function: Callable[..., Any]) -> Any:
    """A method of File whose errors of the system are MPI's; one of MPI first calls the error handler."""

    @functools.wraps(function)
    def guard(file: Any, *args: Any, **options: Any) -> Any:
        try:
            with classed("" if file._state is None else file._state.path):
                return function(file, *args, **options)
        except Exception as error:
            errhandler.call(file if file._state is not None else file._null_file, error.Get_error_code())
            raise

    return guard


def opened(comm: Any, path: str, amode: int, info: Any) -> OpenFile:
    """Open on all ranks of `comm`, or raise the same class of error on all of them."""
    comm = comm.Dup()
    token = comm.bcast(os.urandom(8).hex())
    fd, error = -1, _wrong_mode(amode)
    told = comm.allgather((amode, error, Get_processor_name()))
    if error is None and len({mode for mode, _, _ in told}) > 1:
        error = Exception(constants.ERR_NOT_SAME, f"amode differs between ranks: {[one[0] for one in told]}")
    if comm.Get_rank() == 0 and error is None:
        fd, error = _open_here(path, amode)
    failed = comm.bcast(error is not None)
    if not failed and comm.Get_rank() > 0:
        fd, error = _open_here(path, amode & ~(constants.MODE_CREATE | constants.MODE_EXCL))
    try:
        agree(comm, error)
    except Exception:
        if fd >= 0:
            os.close(fd)
        comm.Free()
        raise
    one_host = len({host for _, _, host in told}) == 1
    folder, name = os.path.split(os.path.abspath(path))
    folder = _folder_of_host() if one_host else folder
    shared = SharedNumber(os.path.join(folder, f".{name[:100]}.{token}.shared"))
    return OpenFile(comm, path, fd, amode, dict(info.items()) if info else {}, shared)


def _folder_of_host() -> str:
    import tempfile  # like concurrent.futures below, slow to import: most programs open no file

    return tempfile.gettempdir()


def _wrong_mode(amode: int) -> Exception | None:
    reads_only = amode & constants.MODE_RDONLY and amode & (constants.MODE_CREATE | constants.MODE_EXCL)
    both = amode & constants.MODE_RDWR and amode & constants.MODE_SEQUENTIAL
    if amode & _ACCESS not in _FLAGS or reads_only or both:
        return Exception(constants.ERR_AMODE, f"amode {amode} contradicts itself")
    return None


def _open_here(path: str, amode: int) -> tuple[int, Exception | None]:
    flags = _FLAGS[amode & _ACCESS] | os.O_CLOEXEC
    flags |= os.O_CREAT if amode & constants.MODE_CREATE else 0
    flags |= os.O_EXCL if amode & constants.MODE_EXCL else 0
    try:
        with classed(path):
            fd = os.open(path, flags, 0o666)
    except Exception as error:
        return -1, error
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.close(fd)
        return -1, Exception(constants.ERR_BAD_FILE, f"{path} is a directory")
    return fd, None


def agree(comm: Any, error: Exception | None) -> None:
    """Raise on all ranks if one of them has an error: its own, or that of the first that has one."""
    told = comm.allgather(None if error is None else (error.Get_error_class(), str(error)))
    if error is not None:
        raise error
    for rank, found in enumerate(told):
        if found is not None:
            raise Exception(found[0], f"on rank {rank}: {found[1]}")


class OpenFile(State):
    """The state of a File.

    comm: a duplicate of the communicator that has opened it.  position: this rank's pointer, in items.
    split: the split collective that has begun, and its bytes.
    """

    def __init__(
        self, comm: Any, path: str, fd: int, amode: int, info: dict[str, str], shared: SharedNumber
    ) -> None:
        super().__init__()
        self.comm, self.path, self.fd, self.amode = comm, path, fd, amode
        self.info, self.shared = info, shared
        self.handler: Any = None
        self.atomic = False
        self.split: tuple[str, int] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._turn = threading.Lock()  # of the threads that use this rank's pointer
        self._whole = threading.Lock()  # of its atomic accesses, which `locked` does not keep apart
        self.see(0, _BYTE, _BYTE, "native")
        if amode & constants.MODE_APPEND:
            self.position = self.sought(0, constants.SEEK_END, 0)
            self.move_shared(0, constants.SEEK_END)

    # ---- the view and the pointers

    def see(self, displacement: int, etype: Any, filetype: Any, datarep: str) -> None:
        """See the bytes that items of `filetype` cover, one after another; pointers begin again. Collective.

        Example: displacement 16, a filetype of 2 items every 4

            file    |16 bytes|A B . .|C D . .|E F . .|
            view    |A B C D E F|
        """
        self.displacement, self.types = displacement, (etype, filetype, datarep)
        self._layout, self._item_nbytes = filetype._state.layout, etype._state.size
        self.position = 0
        self.comm.Barrier()
        self._let_first(lambda: os.path.exists(self.shared.path) and self.shared.add(0, replace=True))

    def _pieces(self, item: int, nbytes: int) -> Pieces:
        """Where bytes of the view lie in the file."""
        found = self._layout.within(item * self._item_nbytes, nbytes)
        return Pieces(found.starts + self.displacement, found.lengths)

    def byte_offset(self, item: int) -> int:
        """Where an item of the view lies in the file."""
        return int(self._pieces(item, 1).starts[0]) if self._layout.size else self.displacement

    def _items_in(self, file_nbytes: int) -> int:
        """How many items of the view a file of that size has; one that it has in part counts."""
        where, rest = self._layout, file_nbytes - self.displacement
        if rest <= 0 or where.size == 0:
            return 0
        items, rest = divmod(rest, where.extent) if where.extent > 0 else (1, where.true_lb)
        nbytes = items * where.size + int(np.clip(rest - where.pieces.starts, 0, where.pieces.lengths).sum())
        return -(-nbytes // self._item_nbytes)

    def sought(self, offset: int, whence: int, now: int) -> int:
        """The item that a seek means."""
        base = {constants.SEEK_SET: 0, constants.SEEK_CUR: now}.get(whence)
        if whence == constants.SEEK_END:
            base = self._items_in(os.fstat(self.fd).st_size)
        if base is None or base + offset < 0:
            raise Exception(constants.ERR_ARG, f"seek to {offset}, whence {whence}")
        return int(base + offset)

    def move_shared(self, offset: int, whence: int) -> None:
        """Set the shared pointer. Collective."""
        self.comm.Barrier()  # all have read or written what they had to
        self._let_first(
            lambda: self.shared.add(self.sought(offset, whence, self.shared.add(0)), replace=True)
        )

    def _let_first(self, change: Callable[[], object]) -> None:
        """Let rank 0 change something; all ranks raise if that failed."""
        error = None
        if self.comm.Get_rank() == 0:
            try:
                with classed(self.path):
                    change()
            except Exception as found:
                error = found
        agree(self.comm, error)

    def refuse(self, mode: int) -> None:
        """Raise if it was opened in this mode."""
        if self.amode & mode:
            raise Exception(constants.ERR_UNSUPPORTED_OPERATION, f"{self.path} is opened MODE_SEQUENTIAL")

    # ---- the file

    def resize(self, nbytes: int, change: Callable[[int, int], object]) -> None:
        """Let rank 0 change its size; all ranks learn whether that worked."""
        self._check("Write", None)
        sizes = self.comm.allgather(nbytes)
        if min(sizes) < 0 or len(set(sizes)) > 1:
            raise Exception(constants.ERR_ARG, f"sizes of all ranks: {sizes}")
        self._let_first(lambda: change(self.fd, nbytes))

    def close(self) -> None:
        """Finish what is under way, and close. Collective."""
        if self._thread is not None:
            self._thread.shutdown()
        os.close(self.fd)
        self.shared.close()
        self.comm.Barrier()
        if self.comm.Get_rank() == 0:
            deleted = self.amode & constants.MODE_DELETE_ON_CLOSE
            for path in (self.shared.path, self.path) if deleted else (self.shared.path,):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        self.comm.Barrier()
        self.comm.Free()

    # ---- data

    def access(self, call: str, block: Block, *at: int) -> int:
        """Read or write as the call's name says; how many bytes."""
        moves = not at and not call.endswith(_SHARED)
        with self._turn if moves and not call.endswith("_all") else contextlib.nullcontext():
            where = self._located(call, block, at)
            together = call.endswith("_all") and call.startswith("Write") and not self.atomic
            done = self._move(call, block, self._pieces(where, block.nbytes), together)
            if moves:
                self.position = where + done // self._item_nbytes
        return done

    def start(self, call: str, block: Block, *at: int) -> Operation:
        """The same in a thread of this file, one after the other. Pointers move now."""
        with self._turn:
            where = self._located(call, block, at)
            if not at and not call.endswith(_SHARED):
                self.position = where + block.nbytes // self._item_nbytes
            if self._thread is None:
                from concurrent.futures import ThreadPoolExecutor

                self._thread = ThreadPoolExecutor(1, "MPI.File")
        move = classed(self.path)(self._move)
        return _Access(self._thread.submit(move, call, block, self._pieces(where, block.nbytes)))

    def _located(self, call: str, block: Block, at: tuple[int, ...]) -> int:
        """The item of the view at which an access begins; the shared pointer moves behind it."""
        self._check(call, block)
        items = block.nbytes // self._item_nbytes
        if call.endswith("_ordered"):  # all ranks take turns
            counts, rank = self.comm.allgather(items), self.comm.Get_rank()
            first = self.shared.add(sum(counts)) if rank == 0 else 0
            return int(self.comm.bcast(first)) + sum(counts[:rank])
        if call.endswith("_shared"):
            return self.shared.add(items)
        self.refuse(constants.MODE_SEQUENTIAL)
        return at[0] if at else self.position

    def begin(self) -> None:
        """A split collective begins."""
        if self.split is not None:
            raise Exception(constants.ERR_IO, f"{self.split[0]}_begin is under way")

    def end(self, call: str) -> int:
        """A split collective ends; its bytes."""
        begun, self.split = self.split, None
        if begun is None or begun[0] != call:
            under_way = "none" if begun is None else begun[0]
            raise Exception(constants.ERR_IO, f"{call}_end: the split collective under way is {under_way}")
        return begun[1]

    def _check(self, call: str, block: Block | None) -> None:
        reads = call.startswith("Read")
        if self.amode & (constants.MODE_WRONLY if reads else constants.MODE_RDONLY):
            code = constants.ERR_ACCESS if reads else constants.ERR_READ_ONLY
            raise Exception(code, f"{call}: {self.path} is opened to {'write' if reads else 'read'} only")
        if block is not None and block.nbytes % self._item_nbytes:
            text = f"{call}: {block.nbytes} bytes are no whole number of items of {self._item_nbytes} bytes"
            raise Exception(constants.ERR_IO, text)
        if block is not None and self.types[2] == "external32" and not _convertible(block):
            raise Exception(constants.ERR_UNSUPPORTED_DATAREP, f"{call}: external32 of this datatype")

    def _move(self, call: str, block: Block, pieces: Pieces, together: bool = False) -> int:
        external, reads = self.types[2] == "external32", call.startswith("Read")
        whole = self._whole if self.atomic else contextlib.nullcontext()
        with whole, locked(self.fd, *pieces.span(), reads, self.atomic):
            if not reads:
                data = block.type.swapped(block.pack()) if external else block.pack()
                if not together or not self._write_together(pieces, data):
                    write(self.fd, pieces, data)
                return block.nbytes
            room = block.room()
            done = read(self.fd, pieces, room)
            block.fill((block.type.swapped(room) if external else room)[:done])
            return done

    def _write_together(self, pieces: Pieces, data: Any) -> bool:
        """Write interleaved small pieces of all ranks: each writes a part of the file. False: none did.

        Source: Thakur, Gropp, Lusk, "Data sieving and collective I/O in ROMIO", 1999 (two phases).
        """
        ordered = bool(np.all(pieces.starts[1:] >= (pieces.starts + pieces.lengths)[:-1]))
        told = self.comm.allgather((*pieces.span(), len(pieces.starts), pieces.nbytes, ordered))
        spans = sorted(one[:2] for one in told if one[3])
        nbytes, count = sum(one[3] for one in told), sum(one[2] for one in told)
        apart = all(before[1] <= after[0] for before, after in pairwise(spans))
        if apart or nbytes >= count * EXCHANGED_NBYTES or not all(one[4] for one in told):
            return False
        first, end = spans[0][0], max(span[1] for span in spans)
        if end - first > _SPARSE * nbytes:
            return False
        size, error = self.comm.Get_size(), None
        for begin in range(first, end, size * WINDOW_NBYTES):
            bounds = [begin + rank * WINDOW_NBYTES for rank in range(size + 1)]
            parts = [_cut(pieces, data, *two) for two in pairwise(bounds)]
            starts, lengths, came = zip(*self.comm.alltoall(parts), strict=True)
            try:
                with classed(self.path):
                    gathered = Pieces(np.concatenate(starts), np.concatenate(lengths))
                    write_sorted(self.fd, gathered, np.concatenate(came))
            except Exception as found:
                error = error or found
        agree(self.comm, error)
        return True


def _cut(pieces: Pieces, data: Any, begin: int, end: int) -> tuple[Any, Any, Any]:
    """The pieces within a part of the file, which are in order, and their bytes."""
    ends = pieces.starts + pieces.lengths
    first, last = int(np.searchsorted(ends, begin, "right")), int(np.searchsorted(pieces.starts, end, "left"))
    starts = np.maximum(pieces.starts[first:last], begin)
    lengths = np.minimum(ends[first:last], end) - starts
    if not len(starts):
        return starts, lengths, data[:0]
    at = int(pieces.lengths[:first].sum() + starts[0] - pieces.starts[first])
    return starts, lengths, data[at : at + int(lengths.sum())]


def _convertible(block: Block) -> bool:
    """Whether external32 has the sizes of this type; of C's long and long double it has others."""
    return block.type.dtype is not None and block.type.dtype.char not in "lLgG"


class _Access(Operation):
    """A read or a write in the file's thread."""

    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def poll(self) -> bool:
        return self.done or (self._future.done() and self._finish())

    def block(self) -> None:
        self._finish()

    def _finish(self) -> bool:
        try:
            self.nbytes = self._future.result()
        finally:
            self.done = True
        return True
