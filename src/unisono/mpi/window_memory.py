"""The state of a window, and the items that a one-sided call names there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from unisono import _native
from unisono.engine.memory.arrays import empty
from unisono.engine.memory.buffers import DTYPES
from unisono.mpi import constants, object_schedules
from unisono.mpi.byte_memory import buffer
from unisono.mpi.comm import Comm
from unisono.mpi.datatype import Datatype, Type
from unisono.mpi.errors import Exception, exact, whole
from unisono.mpi.handle import State
from unisono.mpi.message_spec import Block
from unisono.mpi.op import Op, check_type
from unisono.mpi.progress import complete

_CALLS = dict.fromkeys(("update", "hold", "release"), "Accumulate") | {"swap": "Compare_and_swap"}
"""The calls of MPI that calls of the engine serve, where they have other names."""
_PREDEFINED = {"MPI_REPLACE": _native.REPLACE, "MPI_NO_OP": _native.NO_OP}


class MemoryPlace(NamedTuple):
    """Where the memory of a rank is: that of rank `home` of the world, from byte `base` on.

    Attributes:
        unit: bytes of a displacement.
    """

    home: int
    base: int
    nbytes: int
    unit: int


class WindowState(State):
    """The state of a window: the engine's one, and what MPI says of it. Places are by rank of `comm`."""

    def __init__(self, comm: Comm, flavor: int, memory: Any, unit: int) -> None:
        super().__init__()
        state = comm._alive()
        self.world, self.ranks, self.rank, self.flavor = state.world, state.ranks, state.rank, flavor
        self.info: dict[str, str] = {}
        self.handler: Any = None
        self.attached: dict[int, Any] = {}
        self.locked: dict[int, int] = {}  # the kind of lock that this rank has, by rank
        self.started: list[int] | None = None
        self.posted: list[int] | None = None
        if whole(unit, "disp_unit") <= 0:
            raise Exception(constants.ERR_DISP, f"the unit of displacements is {unit}")
        nbytes = memory if flavor == constants.WIN_FLAVOR_SHARED else memory.size
        told = complete(object_schedules.all_gather(state.lane(), (nbytes, unit)))
        if flavor == constants.WIN_FLAVOR_SHARED:  # one piece, as MPI wants it; it is the first rank's
            memory = empty(sum(size for size, _ in told) if state.rank == 0 else 0, np.uint8)
        self.kept = memory
        self.open(comm, memory)
        self.places = self._placed(told)
        self.memory, _ = self.shared(self.rank)
        nbytes = self.places[self.rank].nbytes
        if self.memory.size < nbytes:
            self.window.end()
            raise Exception(constants.ERR_RMA_SHARED, "the ranks of the communicator share no memory")
        self.attrs = self.memory.address, nbytes, unit

    def open(self, comm: Comm, memory: Any) -> None:
        """Make the engine's window, of the ranks of the communicator."""
        from unisono.engine.windows.opening import open_window  # most programs have no window

        state, group = comm._alive(), self.world.group
        dynamic = self.flavor == constants.WIN_FLAVOR_DYNAMIC
        base = 0 if dynamic else memory.__array_interface__["data"][0]  # displacements are addresses
        self.window = open_window(
            group._planner,
            self.ranks,
            lambda given: complete(object_schedules.all_gather(state.lane(), given)),
            None,
            (base, memory.size, -1),
            memory,
            typed=False,
            dynamic=dynamic,
            meeting=group._meeting(),
        )
        self.native, self.forever = self.window.native, group.timeout_s

    def _placed(self, told: Sequence[tuple[int, int]]) -> list[MemoryPlace]:
        if self.flavor != constants.WIN_FLAVOR_SHARED:
            return [MemoryPlace(rank, 0, *of) for rank, of in zip(self.ranks, told, strict=True)]
        bases = accumulate((nbytes for nbytes, _ in told), initial=0)
        return [MemoryPlace(self.ranks[0], base, *of) for base, of in zip(bases, told, strict=False)]

    def shared(self, rank: int) -> tuple[Any, int]:
        """(the memory of a rank in this process, its unit). Empty: it is not mapped here."""
        place = self.places[rank]
        address = self.window.parts[place.home].base + place.base
        at = self.native.mapped(place.home, address, place.nbytes) if place.nbytes else 0
        return buffer.fromaddress(at, place.nbytes if at else 0), place.unit

    def element(self, rank: int, disp: int, *arrays: Any) -> tuple[int, int] | None:
        """Where an element is, for the engine; None: the arrays are not one element each of one dtype."""
        first = arrays[0]
        if not 0 <= rank < len(self.places) or self.flavor == constants.WIN_FLAVOR_DYNAMIC:
            return None
        place = self.places[rank]
        at, dtype = whole(disp, "target_disp") * place.unit, first.dtype
        if any(one.size != 1 or one.dtype != dtype for one in arrays):
            return None
        return (place.home, place.base + at) if 0 <= at <= place.nbytes - dtype.itemsize else None

    def check(self, fault: int, call: str) -> None:
        """Raise the error of a call that returned a fault."""
        if fault:
            self.window.fail(call, self.forever)

    def flush(self, home: int | None, call: str) -> None:
        """Wait until this rank's calls have had their effect in the memory of a rank; None: of all."""
        self.check(self.native.flush(home, self.forever), call)

    def call(self, name: str, *args: Any) -> None:
        """Make a call of the engine's window."""
        try:
            fault = getattr(self.native, name)(*args, self.forever)
        except IndexError:  # a dynamic window: the target itself has looked
            raise Exception(
                constants.ERR_RMA_RANGE, f"{name}: this memory is not attached at the target"
            ) from None
        if fault:
            self.window.fail(_CALLS.get(name, name.capitalize()), self.forever)

    def place(self, rank: int) -> MemoryPlace:
        """Where the memory of a rank is."""
        if not 0 <= rank < len(self.places):
            raise Exception(constants.ERR_RANK, f"rank {rank} of a window of {len(self.places)} ranks")
        return self.places[rank]


class Items:
    """The items of a target: from byte `first` of its window on, as runs of (byte, length)."""

    def __init__(self, state: WindowState, rank: int, block: Block, target: Any) -> None:
        """target: None, a displacement, or (displacement, count, type)."""
        place = state.place(rank)
        disp, count, self.type = _spelled(target, block)
        layout = self.type.layout
        self.home, self.nbytes = place.home, count * layout.size
        first = whole(disp, "target: displacement") * place.unit
        if layout.dense:
            self.runs = [(first, self.nbytes)] if self.nbytes else []
        else:
            pieces = layout.within(0, self.nbytes)
            self.runs = list(zip((pieces.starts + first).tolist(), pieces.lengths.tolist(), strict=True))
        if state.flavor != constants.WIN_FLAVOR_DYNAMIC:
            for at, length in self.runs:
                if at < 0 or at + length > place.nbytes:
                    raise Exception(
                        constants.ERR_RMA_RANGE,
                        f"bytes {at} to {at + length} are not in the window of rank {rank}, which has "
                        f"{place.nbytes}",
                    )
        self.runs = [(place.base + at, length) for at, length in self.runs]
        if self.nbytes != block.nbytes:
            raise Exception(
                constants.ERR_ARG, f"the origin has {block.nbytes} bytes of data, the target {self.nbytes}"
            )

    def parts(self, packed: Any) -> Iterator[tuple[int, Any]]:
        """(where it is at the target, the packed bytes) of each run."""
        at = 0
        for offset, length in self.runs:
            yield offset, packed[at : at + length]
            at += length


def _spelled(target: Any, block: Block) -> tuple[int, int, Type]:
    if target is None:
        return 0, block.count, block.type
    if not isinstance(target, list | tuple):
        if not hasattr(target, "__index__"):
            raise ValueError("target: expecting integral or list/tuple")
        return target, block.count, block.type
    if len(target) > 3:
        raise ValueError("target: expecting 3 items at most")
    given: tuple[Any, ...] = (*target, *(0, block.count, None)[len(target) :])
    disp, count, kind = given
    if kind is not None and not isinstance(kind, Datatype):
        raise TypeError(f"target: expecting a datatype, got {type(kind).__name__}")
    disp, count = exact(disp, "target: displacement"), exact(count, "target: count")
    return disp, count, block.type if kind is None else kind._alive()


def check_elements(origin: Block, **others: Block) -> None:
    """Check that each is one element, of one type."""
    for name, one in {"origin": origin, **others}.items():
        if one.count != 1:
            raise ValueError(f"{name}: expecting a single element, got {one.count}")
        if one.type is not origin.type:
            raise ValueError(f"mismatch in origin and {name} MPI datatypes")


def combine(state: WindowState, items: Items, op: Op, operand: Any, former: Any, element: Type) -> None:
    """target = target op operand, element by element; `former` gets the values before, if it is no None."""
    check_type(op, element)
    operation = op._alive()
    if operation.user is not None:
        raise Exception(constants.ERR_OP, "an accumulate takes predefined operations only")
    dtype, number = _engine_elements(operation, element)
    size = 1 if element.dtype is None else element.dtype.itemsize
    for (at, part), (_, old) in zip(
        items.parts(operand), items.parts(operand if former is None else former), strict=True
    ):
        into = None if former is None else old
        if dtype is None:
            _combine_here(state, items.home, at, op, part, into, element)
            continue
        for first in range(0, part.size, _WHOLE * size):  # no piece of the engine cuts an element
            piece = slice(first, first + _WHOLE * size)
            given, before = part[piece].view(dtype), None if into is None else into[piece].view(dtype)
            state.call("update", given, before, items.home, at + first, number)


_WHOLE = 8192
"""Elements that the engine updates at one time."""


def _engine_elements(operation: Any, element: Type) -> tuple[Any, int]:
    """(the dtype as which the engine combines elements, its operation); None: it does not."""
    if operation.name in _PREDEFINED:
        return np.uint8, _PREDEFINED[operation.name]
    if operation.engine is None or element.dtype is None:
        return None, 0
    dtype, number = element.dtype, int(operation.engine)
    if dtype.kind == "u" and operation.name not in ("MPI_MAX", "MPI_MIN"):
        dtype = np.dtype(f"i{dtype.itemsize}")  # the same bits
    known = dtype.name in DTYPES and _native.updates(DTYPES.index(dtype.name), number)
    return (dtype if known else None), number


def _combine_here(
    state: WindowState, home: int, at: int, op: Op, operand: Any, former: Any, element: Type
) -> None:
    """The same in this process, while the target lets nobody else update."""
    memory, tight = np.empty(operand.size, np.uint8), _tight(element.dtype)
    state.call("hold", home)
    try:
        state.call("get", memory, home, at)
        if former is not None:
            former[:] = memory
        values = memory.view(tight)
        values[...] = op._state.arrays(operand.view(tight), values)
        state.call("put", memory, home, at)
        state.call("flush", home)
    finally:
        state.call("release", home)


def _tight(dtype: Any) -> Any:
    """The dtype of packed elements: pairs lose their padding."""
    return dtype if dtype.names is None else np.dtype([(name, dtype[name]) for name in dtype.names])
