"""`Win`: memory that ranks read, write and update without its owner's help, over `unisono.Window`."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np

from unisono import _native
from unisono.engine.memory.arrays import empty
from unisono.engine.memory.buffers import DTYPES
from unisono.mpi import constants
from unisono.mpi.attributes import HasAttributes
from unisono.mpi.buffers import BOTTOM, bytes_of
from unisono.mpi.comm import COMM_SELF, Intracomm
from unisono.mpi.errhandler import HasErrhandler
from unisono.mpi.errors import Exception, whole
from unisono.mpi.group import Group, group_of
from unisono.mpi.handle import Handle, HasName, getter
from unisono.mpi.info import INFO_NULL, HasInfo, Info
from unisono.mpi.message_spec import Block, simple
from unisono.mpi.op import OPS, Op
from unisono.mpi.progress import Ended
from unisono.mpi.request import Request
from unisono.mpi.window_memory import Items, WindowState, check_elements, combine

_SUM = OPS["SUM"]
_PLAIN = frozenset("?bBhilqefdFD")
"""Characters of dtypes that the engine reads from an array by itself."""
_CODES = {char: DTYPES.index(np.dtype(char).name) for char in _PLAIN}


def _plain(x: Any) -> bool:
    return type(x) is np.ndarray and x.dtype.char in _PLAIN and x.flags.c_contiguous


class Win(HasAttributes, HasErrhandler, HasName, HasInfo, Handle, _native.BufferExporter):
    """Memory of every rank of a communicator, which all of them use."""

    _null = constants.ERR_WIN

    # ---- new ones; all ranks of the communicator call them

    @classmethod
    def Create(
        cls, memory: Any, disp_unit: int = 1, info: Info = INFO_NULL, comm: Intracomm = COMM_SELF
    ) -> Any:
        """A window of this memory; None, BOTTOM: of none."""
        raw = bytes_of(None if memory is BOTTOM else memory, memory is not BOTTOM)[0]
        return cls._made(comm, constants.WIN_FLAVOR_CREATE, raw, disp_unit, info)

    @classmethod
    def Allocate(
        cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Intracomm = COMM_SELF
    ) -> Any:
        """A window of new memory, of zeros."""
        memory = empty(_size(size), np.uint8)  # other ranks can map it
        memory.fill(0)  # it may lie where an array was whose pages the system kept
        return cls._made(comm, constants.WIN_FLAVOR_ALLOCATE, memory, disp_unit, info)

    @classmethod
    def Allocate_shared(
        cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Intracomm = COMM_SELF
    ) -> Any:
        """The same, which all ranks map in one piece, in the order of ranks; see `Shared_query`."""
        return cls._made(comm, constants.WIN_FLAVOR_SHARED, _size(size), disp_unit, info)

    @classmethod
    def Create_dynamic(cls, info: Info = INFO_NULL, comm: Intracomm = COMM_SELF) -> Any:
        """A window to which ranks attach memory; displacements are addresses."""
        return cls._made(comm, constants.WIN_FLAVOR_DYNAMIC, np.zeros(0, np.uint8), 1, info)

    @classmethod
    def _made(cls, comm: Intracomm, flavor: int, memory: Any, unit: int, info: Info) -> Any:
        state = WindowState(comm, flavor, memory, whole(unit, "disp_unit"))
        if info:
            state.info = dict(info.items())
        return cls._of(state)

    def Attach(self, memory: Any) -> None:
        """Expose memory, too."""
        state, raw = self._dynamic(), bytes_of(memory, True)[0]
        address = raw.__array_interface__["data"][0]
        self._exposed("Attach", "too many pieces of memory are attached", address, raw.size)
        state.attached[address] = memory

    def Detach(self, memory: Any) -> None:
        """Expose it no longer."""
        address = bytes_of(memory)[0].__array_interface__["data"][0]
        self._exposed("Detach", "this memory is not attached", address)
        self._state.attached.pop(address, None)

    def _exposed(self, call: str, otherwise: str, *where: int) -> None:
        state = self._dynamic()
        fault, done = getattr(state.native, call.lower())(*where)
        state.check(fault, call)
        if not done:
            raise Exception(constants.ERR_RMA_ATTACH, otherwise)

    def _dynamic(self) -> WindowState:
        state: WindowState = self._alive()
        if state.flavor != constants.WIN_FLAVOR_DYNAMIC:
            raise Exception(constants.ERR_RMA_FLAVOR, "only a dynamic window attaches memory")
        return state

    def Shared_query(self, rank: int) -> tuple[Any, int]:
        """(the memory of a rank in this process, its unit); of PROC_NULL: of the first rank with memory."""
        state = self._alive()
        if state.flavor == constants.WIN_FLAVOR_DYNAMIC:
            raise Exception(constants.ERR_RMA_FLAVOR, "a dynamic window shares no memory")
        if rank == constants.PROC_NULL:
            rank = next((i for i, place in enumerate(state.places) if place.nbytes), 0)
        state.place(rank)
        return state.shared(rank)

    def Free(self) -> None:
        """End the window; all ranks call it, and it waits for them."""
        state = self._alive()
        self._delete_all()
        self._state = None
        state.window.close()

    # ---- what it is

    Get_group, group = getter("The ranks as a group.", lambda state: group_of(state.world, state.ranks))
    group_size = getter("The number of ranks.", lambda state: len(state.ranks))[1]
    group_rank = getter("This process's rank.", lambda state: state.rank)[1]
    attrs = getter("(address, bytes, unit) of the memory.", lambda state: state.attrs)[1]
    flavor = getter("How it was made: WIN_FLAVOR_...", lambda state: state.flavor)[1]
    model = getter("WIN_UNIFIED: there is one copy of the memory.", lambda _: constants.WIN_UNIFIED)[1]

    def _predefined(self) -> dict[int, Any]:
        values = (*self.attrs, self.flavor, constants.WIN_UNIFIED)
        return dict(zip(range(constants.WIN_BASE, constants.WIN_MODEL + 1), values, strict=True))

    tomemory, _ = getter("The memory of this rank.", lambda state: state.memory)

    def __buffer__(self, flags: int) -> memoryview:
        return memoryview(self.tomemory())

    # ---- moving

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Write to the target. target: displacement, or (displacement, count, type)."""
        self._move("put", origin, target_rank, target)

    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Read from the target."""
        self._move("get", origin, target_rank, target)

    def _move(self, call: str, origin: Any, rank: int, target: Any) -> None:
        state, reads = self._alive(), call == "get"
        if rank == constants.PROC_NULL:
            return
        if target is None and _plain(origin):
            place = state.place(rank)
            if origin.nbytes <= place.nbytes and (origin.flags.writeable or not reads):
                fault = getattr(state.native, call)(origin, place.home, place.base, state.forever)
                state.check(fault, call.capitalize())
                return
        block = simple(origin, writable=reads)
        items, data = Items(state, rank, block, target), block.room() if reads else block.pack()
        for at, part in items.parts(data):
            state.call(call, part, items.home, at)
        if reads:
            block.fill(data)

    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = _SUM) -> None:
        """Combine with the target, each element atomically."""
        self._alive()
        if target_rank != constants.PROC_NULL:
            self._combine(simple(origin, writable=False), None, target_rank, target, op)

    def Get_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = _SUM
    ) -> None:
        """The same; the former elements go to `result`."""
        self._alive()
        if target_rank == constants.PROC_NULL:
            return
        into = simple(result, writable=True)
        unused = op._state is OPS["NO_OP"]._state  # then only the target's spelling counts
        block = into if unused and origin is None else simple(origin, writable=False)
        self._combine(block, into, target_rank, target, op)

    def _combine(self, block: Block, into: Block | None, rank: int, target: Any, op: Op) -> None:
        state = self._state
        if block.type.dtype is None and op._alive().engine is not None:
            raise Exception(constants.ERR_TYPE, "an accumulate takes elements of one basic type")
        items = Items(state, rank, block, target)
        if into is not None and into.nbytes != items.nbytes:
            raise Exception(
                constants.ERR_ARG, f"the result has {into.nbytes} bytes, the target {items.nbytes}"
            )
        former = None if into is None else into.room()
        combine(state, items, op, block.pack(), former, block.type)
        if into is not None:
            into.fill(former)

    def Fetch_and_op(
        self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Op = _SUM
    ) -> None:
        """Combine one element with the target; its former value goes to `result`."""
        state = self._alive()
        if self._fetched_fast(state, origin, result, target_rank, target_disp, op):
            return
        into = simple(result, writable=True)
        block = into if origin is None else simple(origin, writable=False)
        if target_rank == constants.PROC_NULL:
            return
        check_elements(origin=block, result=into)
        self._combine(block, into, target_rank, target_disp, op)

    def _fetched_fast(
        self, state: WindowState, origin: Any, result: Any, rank: int, disp: int, op: Op
    ) -> bool:
        """An element of an array, by an operation of the engine."""
        operation = op._state
        if operation is None or operation.engine is None or not (_plain(origin) and _plain(result)):
            return False
        kind = origin.dtype.kind
        if kind not in operation.kinds or kind == "b" or not result.flags.writeable:
            return False
        found = state.element(rank, disp, origin, result)
        if found is None or not _native.updates(_CODES[origin.dtype.char], operation.engine):
            return False
        fault = state.native.update(origin, result, *found, operation.engine, state.forever)
        state.check(fault, "Fetch_and_op")
        return True

    def Compare_and_swap(
        self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0
    ) -> None:
        """If the element is that of `compare`, make it that of `origin`; `result`: what it was."""
        state = self._alive()
        arrays = compare, origin, result
        if all(map(_plain, arrays)) and result.flags.writeable:
            found = state.element(target_rank, target_disp, *arrays)
            if found is not None:
                state.check(state.native.swap(*arrays, *found, state.forever), "Compare_and_swap")
                return
        block, old = simple(origin, writable=False), simple(compare, writable=False)
        into = simple(result, writable=True)
        if target_rank == constants.PROC_NULL:
            return
        check_elements(origin=block, compare=old, result=into)
        items = Items(state, target_rank, block, target_disp)
        former = np.empty(block.nbytes, np.uint8)
        state.call("swap", old.pack(), block.pack(), former, items.home, items.runs[0][0])
        into.fill(former)

    # ---- fences

    def Fence(self, assertion: int = 0) -> None:
        """Wait until all ranks come here; all calls before have had their effect."""
        self._alive().call("fence", False)

    # ---- between some ranks

    def Start(self, group: Group, assertion: int = 0) -> None:
        """Wait until each rank of the group has posted for this one."""
        self._begin("started", group, "Start was called without Complete", "start")

    def Complete(self) -> None:
        """End what Start began: this rank's calls have had their effect."""
        state = self._alive()
        ranks, state.started = state.started, None
        if ranks is None:
            raise Exception(constants.ERR_RMA_SYNC, "Complete without Start")
        state.call("complete", ranks)

    def Post(self, group: Group, assertion: int = 0) -> None:
        """Let the ranks of the group use this rank's memory."""
        self._begin("posted", group, "Post was called without Wait", "post")

    def _begin(self, field: str, group: Group, wrong: str, call: str) -> None:
        """Begin an epoch with the ranks of a group."""
        state = self._alive()
        if getattr(state, field) is not None:
            raise Exception(constants.ERR_RMA_SYNC, wrong)
        ranks = state.world.ranks_of(group._alive().ranks)  # of the world
        if any(rank not in state.ranks for rank in ranks):
            raise Exception(constants.ERR_GROUP, "the group has ranks that are not in the window")
        state.call(call, ranks)
        setattr(state, field, ranks)

    def Wait(self) -> Literal[True]:
        """Wait until all of them have completed."""
        self._completed("Wait", True)
        return True

    def Test(self) -> bool:
        """Whether all of them have completed; True ends what Post began."""
        return self._completed("Test", False)

    def _completed(self, call: str, waits: bool) -> bool:
        state = self._alive()
        if state.posted is None:
            raise Exception(constants.ERR_RMA_SYNC, f"{call} without Post")
        fault, done = state.native.completed(state.posted, waits, state.forever)
        state.check(fault, call)
        if done:
            state.posted = None
        return bool(done)

    # ---- locks

    def Lock(self, rank: int, lock_type: int = constants.LOCK_EXCLUSIVE, assertion: int = 0) -> None:
        """Take the lock of a rank, alone or with others."""
        state = self._alive()
        if lock_type not in (constants.LOCK_EXCLUSIVE, constants.LOCK_SHARED):
            raise Exception(constants.ERR_LOCKTYPE, f"there is no type of locks {lock_type}")
        if rank == constants.PROC_NULL:
            return
        state.place(rank)
        if rank in state.locked:
            raise Exception(constants.ERR_RMA_SYNC, f"this rank has the lock of rank {rank} already")
        shared = lock_type == constants.LOCK_SHARED
        state.check(state.native.lock(state.ranks[rank], shared, state.forever), "Lock")
        state.locked[rank] = lock_type

    def Unlock(self, rank: int) -> None:
        """Give it back; this rank's calls have had their effect."""
        state = self._alive()
        if rank == constants.PROC_NULL:
            return
        if state.locked.pop(rank, None) is None:
            raise Exception(constants.ERR_RMA_SYNC, f"this rank does not have the lock of rank {rank}")
        state.check(state.native.unlock(state.ranks[rank], state.forever), "Unlock")

    def Lock_all(self, assertion: int = 0) -> None:
        """Take the locks of all ranks, with others."""
        for rank in range(len(self._alive().ranks)):
            self.Lock(rank, constants.LOCK_SHARED, assertion)

    def Unlock_all(self) -> None:
        """Give them back."""
        for rank in range(len(self._alive().ranks)):
            self.Unlock(rank)

    # ---- flushes

    def Flush(self, rank: int) -> None:
        """Wait until this rank's calls have had their effect at a rank."""
        state = self._alive()
        if rank != constants.PROC_NULL:
            state.flush(state.places[rank].home, "Flush")

    def Flush_all(self) -> None:
        """The same at all ranks."""
        self._alive().flush(None, "Flush_all")

    def Flush_local(self, rank: int) -> None:
        """The buffers of this rank's calls may be used again: they may when a call returns."""
        self._alive().place(rank)

    def Flush_local_all(self) -> None:
        """See `Flush_local`."""
        self._alive()

    def Sync(self) -> None:
        """Order this rank's own loads and stores with those of others."""
        state = self._alive()
        state.flush(state.world.rank, "Sync")


def _with_request(name: str) -> Any:
    """A method that makes a call, and returns a request that has ended."""
    call = getattr(Win, name)

    @functools.wraps(call)
    def method(self: Win, *args: Any, **options: Any) -> Request:
        call(self, *args, **options)
        return Request._for(Ended())

    method.__name__ = f"R{name.lower()}"
    method.__qualname__, method.__doc__ = f"Win.{method.__name__}", f"See `{name}`; returns a Request."
    return method


for _name in ("Put", "Get", "Accumulate", "Get_accumulate"):
    setattr(Win, f"R{_name.lower()}", _with_request(_name))


def _size(size: int) -> int:
    if whole(size, "size") < 0:
        raise Exception(constants.ERR_SIZE, f"the size is {size}")
    return size


WIN_NULL = Win()
