"""MPI, through mpi4py: the ranks are those that `mpiexec` has started.

A reduction that MPI does not have is built from one that it has, see `_MpiReduction`. mpi4py is imported when
a group is made; its import initializes MPI.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import accumulate
from typing import Any

import numpy as np

from unisono.engine.backends.driver import CompletedRequest, LibraryCall, LibraryDriver, LibraryRequest
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES, REDUCIBLE
from unisono.engine.operations.reduction import PremulSum, ReduceOp

Array = Any  # a flat NumPy array; bfloat16 has the dtype uint16
_OPS = {
    "SUM": "SUM",
    "PRODUCT": "PROD",
    "MIN": "MIN",
    "MAX": "MAX",
    "BAND": "BAND",
    "BOR": "BOR",
    "BXOR": "BXOR",
}
_OF_BOOL = {"SUM": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR"}


class MpiDriver(LibraryDriver):
    """One rank of a communicator. Collectives and messages use private duplicates of it."""

    name = "mpi"
    matched_probe = True

    def __init__(self, comm: Any = None) -> None:
        self._mpi: Any = import_module("mpi4py.MPI")
        _watch_exit()
        self.failures = (self._mpi.Exception,)
        parent = self._mpi.COMM_WORLD if comm is None else comm
        self._comm, self._messages, self._objects = parent.Dup(), parent.Dup(), parent.Dup()
        for one in (self._comm, self._messages, self._objects):
            one.Set_errhandler(self._mpi.ERRORS_RETURN)
        if comm is not None:
            comm.Free()
        self.rank, self.size = int(self._comm.Get_rank()), self._comm.Get_size()
        self.most_tag = min(self.most_tag, int(self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB)))

    def flat(self, address: int, numel: int, dtype: str) -> Array:
        """See `LibraryDriver.flat`."""
        plain = dtype in REDUCIBLE and dtype != "bfloat16"
        kind = np.dtype(dtype if plain else f"u{ITEMSIZES[DTYPES.index(dtype)]}")
        if numel == 0:
            return np.empty(0, kind)
        memory: Any = (ctypes.c_char * (numel * kind.itemsize)).from_address(address)
        return np.frombuffer(memory, kind)

    def copy(self, x: Array) -> Array:
        """See `LibraryDriver.copy`."""
        return x.copy()

    def start(self, call: LibraryCall, later: bool) -> LibraryRequest:
        """See `LibraryDriver.start`."""
        self.issued += 1
        started: LibraryRequest = getattr(self, f"_{call.kind}")(call, later)
        return started

    def _run(
        self, name: str, later: bool, *arguments: Any, finish: Callable[[], None] | None = None
    ) -> LibraryRequest:
        """Call "Allreduce" of mpi4py, or begin its "Iallreduce"."""
        if later:
            request = getattr(self._comm, f"I{name.lower()}")(*arguments)
            return _MpiRequest(self, request, arguments, finish)
        getattr(self._comm, name)(*arguments)
        return CompletedRequest(finish)

    # ---- reductions --------------------------------------------------------------------------------------

    def _all_reduce(self, call: LibraryCall, later: bool, name: str = "Allreduce") -> LibraryRequest:
        way = _MpiReduction(self, call)
        x = call.out[0]
        work = way.contribution(x)
        return self._run(name, later, self._mpi.IN_PLACE, work, way.op, finish=lambda: way.store(work, x))

    def _scan(self, call: LibraryCall, later: bool) -> LibraryRequest:
        return self._all_reduce(call, later, "Scan")

    def _exclusive_scan(self, call: LibraryCall, later: bool) -> LibraryRequest:
        if self.rank:
            return self._all_reduce(call, later, "Exscan")
        way = _MpiReduction(self, call)  # MPI leaves the buffer of rank 0 undefined: it must not change
        work = way.contribution(call.out[0], own=True)
        return self._run("Exscan", later, self._mpi.IN_PLACE, work, way.op)

    def _reduce(self, call: LibraryCall, later: bool) -> LibraryRequest:
        way = _MpiReduction(self, call)
        x = call.out[0]
        work = way.contribution(x)
        if self.rank != call.root:
            return self._run("Reduce", later, work, None, way.op, call.root)
        arguments = (self._mpi.IN_PLACE, work, way.op, call.root)
        return self._run("Reduce", later, *arguments, finish=lambda: way.store(work, x))

    def _reduce_scatter(self, call: LibraryCall, later: bool) -> LibraryRequest:
        way = _MpiReduction(self, call)
        out = call.out[0]
        work = way.contribution(_joined(call.sendbuf))
        result = np.empty(out.size, work.dtype)  # `out` may be a block of the input, which MPI forbids
        return self._run(
            "Reduce_scatter_block", later, work, result, way.op, finish=lambda: way.store(result, out)
        )

    # ---- moves: bytes of any dtype --------------------------------------------------------------------

    def _broadcast(self, call: LibraryCall, later: bool) -> LibraryRequest:
        return self._run("Bcast", later, self._octets(call.out[0]), call.root)

    def _barrier(self, call: LibraryCall, later: bool) -> LibraryRequest:  # noqa: ARG002
        return self._run("Barrier", later)

    def _all_gather(self, call: LibraryCall, later: bool) -> LibraryRequest:
        whole, finish = _room(call.out)
        sizes = _sizes(call.out, self.size)
        mine = self._octets(call.sendbuf[0])
        if len(call.out) == 1 and _address(call.sendbuf[0]) == _address(whole) + self.rank * sizes[0]:
            mine = self._mpi.IN_PLACE
        if call.even:
            return self._run("Allgather", later, mine, self._octets(whole), finish=finish)
        return self._run("Allgatherv", later, mine, self._blocks(whole, sizes), finish=finish)

    def _gather(self, call: LibraryCall, later: bool) -> LibraryRequest:
        mine = self._octets(call.sendbuf[0])
        if self.rank != call.root:
            return self._run("Gatherv", later, mine, None, call.root)
        whole, finish = _room(call.out)
        sizes = _sizes(call.out, self.size)
        if len(call.out) == 1 and _address(call.sendbuf[0]) == _address(whole) + self.rank * sizes[0]:
            mine = self._mpi.IN_PLACE
        return self._run("Gatherv", later, mine, self._blocks(whole, sizes), call.root, finish=finish)

    def _scatter(self, call: LibraryCall, later: bool) -> LibraryRequest:
        out = self._octets(call.out[0])
        if self.rank != call.root:
            return self._run("Scatterv", later, None, out, call.root)
        whole, sizes = _joined(call.sendbuf), _sizes(call.sendbuf, self.size)
        if len(call.sendbuf) == 1 and _address(call.out[0]) == _address(whole) + self.rank * sizes[0]:
            out = self._mpi.IN_PLACE
        return self._run("Scatterv", later, self._blocks(whole, sizes), out, call.root)

    def _all_to_all(self, call: LibraryCall, later: bool) -> LibraryRequest:
        whole, finish = _room(call.out)
        sent = self._blocks(_joined(call.sendbuf), _sizes(call.sendbuf, self.size))
        got = self._blocks(whole, _sizes(call.out, self.size))
        return self._run("Alltoallv", later, sent, got, finish=finish)

    def _octets(self, x: Array) -> Any:
        return [x.view(np.uint8), self._mpi.BYTE]

    def _blocks(self, whole: Array, sizes: list[int]) -> Any:
        places = [0, *accumulate(sizes)][:-1]
        return [whole.view(np.uint8), sizes, places, self._mpi.BYTE]

    # ---- messages ----------------------------------------------------------------------------------------

    def send(self, x: Array, dst: int, tag: int, is_object: bool) -> LibraryRequest:
        """See `LibraryDriver.send`."""
        comm = self._objects if is_object else self._messages
        return _MpiRequest(self, comm.Isend(self._octets(x), dst, tag), (x,), None)

    def receive(self, x: Array, src: int, tag: int, is_object: bool) -> LibraryRequest:
        """See `LibraryDriver.receive`."""
        comm = self._objects if is_object else self._messages
        source = self._mpi.ANY_SOURCE if src < 0 else src
        wanted = self._mpi.ANY_TAG if tag < 0 else tag
        return _MpiRequest(self, comm.Irecv(self._octets(x), source, wanted), (x,), None)

    def receive_object(self, src: int, tag: int) -> tuple[Array, int, int]:
        """See `LibraryDriver.receive_object`. No other thread can receive the message that was probed."""
        status = self._mpi.Status()
        source = self._mpi.ANY_SOURCE if src < 0 else src
        message = self._objects.Mprobe(source, self._mpi.ANY_TAG if tag < 0 else tag, status)
        data = np.empty(self.counted(status), np.uint8)
        message.Recv(self._octets(data))
        return data, status.source, status.tag

    # ---- the group -----------------------------------------------------------------------------------------

    def subgroup(self, ranks: tuple[int, ...], number: int) -> MpiDriver | None:  # noqa: ARG002
        """See `LibraryDriver.subgroup`."""
        inside = self.rank in ranks
        color = 0 if inside else self._mpi.UNDEFINED
        comm = self._comm.Split(color, ranks.index(self.rank) if inside else 0)
        return MpiDriver(comm) if inside else None

    def members(self, ranks: Sequence[int], tag: int) -> MpiDriver:
        """The driver of a group of these ranks, who alone call it. tag: the same on all of them."""
        mine = self._comm.Get_group()
        chosen = mine.Incl(list(ranks))
        try:
            return MpiDriver(self._comm.Create_group(chosen, tag % (self.most_tag + 1)))
        finally:
            chosen.Free()
            mine.Free()

    def leave(self) -> None:
        """Free the communicators, without waiting for other ranks."""
        if self._mpi.Is_finalized():
            return
        for comm in (self._comm, self._messages, self._objects):
            comm.Free()

    def is_mismatch(self, failure: Exception) -> bool:
        """See `LibraryDriver.is_mismatch`."""
        return bool(self._mpi.Exception.Get_error_class(failure) == self._mpi.ERR_TRUNCATE)

    def status(self) -> Any:
        """A new MPI status."""
        return self._mpi.Status()

    def counted(self, status: Any) -> int:
        """The bytes of a message."""
        return int(status.Get_count(self._mpi.BYTE))

    def operation(self, name: str, dtype: np.dtype[Any]) -> Any:
        """MPI's operation of a name. Its own MIN and MAX may lose a NaN."""
        if dtype.kind == "f" and name in ("MIN", "MAX"):
            return _folding_operation(name)
        return getattr(self._mpi, _OPS[name])


class _MpiRequest(LibraryRequest):
    """A request of MPI. It progresses while a caller tests it or waits for it."""

    def __init__(self, driver: MpiDriver, request: Any, keep: Any, finish: Callable[[], None] | None) -> None:
        self._driver, self._request, self._keep, self._finish = driver, request, keep, finish
        self._status = driver.status()
        self._ended = False

    def done(self) -> bool:
        if not self._ended and self._request.Test(self._status):
            self._end()
        return self._ended

    def block(self) -> None:
        if not self._ended:
            self._request.Wait(self._status)
            self._end()

    def _end(self) -> None:
        self._ended = True
        self.source, self.tag = self._status.Get_source(), self._status.Get_tag()
        self.nbytes = self._driver.counted(self._status)
        self._keep = None

    def finish(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def cancel(self) -> bool:
        if self._ended:
            return False
        self._request.Cancel()
        self.block()
        return bool(self._status.Is_cancelled())


class _MpiReduction:
    """Reductions for which MPI has no operation or no type.

    bool: as bytes, with the bit operations. 16-bit floats: widened to float32, and rounded once, as Unisono's
    engine does. AVG: the sum, divided. PREMUL_SUM: multiplied, summed.
    """

    def __init__(self, driver: MpiDriver, call: LibraryCall) -> None:
        self._dtype, self._op, self._size = call.dtype, call.op, driver.size
        name = "SUM" if isinstance(call.op, PremulSum) or call.op is ReduceOp.AVG else call.op.name
        wide = {"float16": "float32", "bfloat16": "float32", "bool": "uint8"}.get(call.dtype, call.dtype)
        if name == "SUM" and call.dtype in ("int8", "uint8", "int16") and _saturates():
            wide = "int32"
        self._wide = np.dtype(wide)
        if call.dtype == "bool":
            name = _OF_BOOL.get(name, name)
        self.op = driver.operation(name, self._wide)

    def contribution(self, x: Array, own: bool = False) -> Array:
        """This rank's contribution: `x` itself if it needs no conversion and need not be `own`."""
        if self._dtype == "bfloat16":
            work = _widened(x)
        elif self._dtype == "bool":
            work = x.view(np.uint8)
        else:
            work = x.astype(self._wide, copy=False)
        if isinstance(self._op, PremulSum):
            return work * self._wide.type(self._op.factor)
        return work.copy() if own else work

    def store(self, work: Array, x: Array) -> None:
        """Store a result in the caller's buffer."""
        if self._op is ReduceOp.AVG:
            np.divide(work, self._wide.type(self._size), out=work)
        if self._dtype == "bfloat16":
            x[...] = _narrowed(work)
        elif _address(work) != _address(x):
            with np.errstate(over="ignore"):
                x[...] = work.view(bool) if self._dtype == "bool" else work


@lru_cache(maxsize=1)
def _watch_exit() -> None:
    """Make an exception that ends this process end the job, as `python -m mpi4py` does.

    Otherwise the other ranks would wait for ever, and this rank for them in MPI_Finalize.
    """
    atexit.register(_end_job)


def _end_job() -> None:
    mpi = import_module("mpi4py.MPI")
    if getattr(sys, "last_value", None) is not None and not mpi.Is_finalized():
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(1)


@lru_cache(maxsize=1)
def _saturates() -> bool:
    """Whether the library's sums of small integers saturate, as in Open MPI with AVX.

    Those of other libraries, and of Unisono, wrap around.
    """
    x, y = (np.full(1024, 100, np.int8) for _ in range(2))
    import_module("mpi4py.MPI").SUM.Reduce_local(x, y)
    return bool((y != np.int8(-56)).any())


@lru_cache(maxsize=2)
def _folding_operation(name: str) -> Any:
    """An MPI handle for a NumPy operation, cached for the process: mpi4py has few of them."""
    fold = np.minimum if name == "MIN" else np.maximum
    return import_module("mpi4py.MPI").Op.Create(_folding(fold), commute=True)


def _folding(fold: Callable[..., Any]) -> Callable[[Any, Any, Any], None]:
    """A function for MPI_Op_create that applies a NumPy operation to elements."""

    def combine(invec: Any, inout: Any, datatype: Any) -> None:
        dtype = np.float32 if datatype.Get_size() == 4 else np.float64
        into = np.frombuffer(inout, dtype)
        fold(np.frombuffer(invec, dtype), into, out=into)

    return combine


def _widened(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrowed(wide: Array) -> Array:
    """float32 -> bfloat16, to nearest, ties to even; NaN stays NaN."""
    bits = wide.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(wide), quiet, rounded).astype(np.uint16)


def _address(x: Array) -> int:
    return int(x.__array_interface__["data"][0])


def _joined(blocks: list[Array]) -> Array:
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def _sizes(blocks: list[Array], count: int) -> list[int]:
    """The bytes of each block."""
    return [blocks[0].nbytes // count] * count if len(blocks) == 1 else [block.nbytes for block in blocks]


def _room(blocks: list[Array]) -> tuple[Array, Callable[[], None] | None]:
    """One array for all blocks, and a function that copies the blocks out at the end."""
    if len(blocks) == 1:
        return blocks[0], None
    whole = np.empty(sum(block.size for block in blocks), blocks[0].dtype)

    def cut() -> None:
        start = 0
        for block in blocks:
            block[...] = whole[start : start + block.size]
            start += block.size

    return whole, cut
