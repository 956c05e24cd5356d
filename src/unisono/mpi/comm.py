"""`Comm` and `Intracomm`: ranks that communicate, and how new ones are made of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from unisono.mpi import constants
from unisono.mpi.attributes import HasAttributes
from unisono.mpi.buffers import bytes_of
from unisono.mpi.byte_memory import HasBuffer
from unisono.mpi.collectives import FastCollectives, Prefixes
from unisono.mpi.comm_state import INTER, CommState, agree, classes, handle_of
from unisono.mpi.errhandler import HasErrhandler
from unisono.mpi.errors import Exception, last_code, whole
from unisono.mpi.group import GROUP_EMPTY, Group, group_of
from unisono.mpi.handle import Handle, HasName, getter
from unisono.mpi.info import HasInfo, Info
from unisono.mpi.neighbourhoods import TopologyCreation
from unisono.mpi.objects import Objects
from unisono.mpi.op import OPS
from unisono.mpi.point_to_point import PointToPoint
from unisono.mpi.progress import Schedule, ScheduleRun, complete
from unisono.mpi.request import Request
from unisono.mpi.sides import SideCreation, every
from unisono.mpi.transport import MOST_TAG, Lane, abort


class Comm(
    FastCollectives, Objects, PointToPoint, HasAttributes, HasErrhandler, HasBuffer,
    HasName, HasInfo, Handle,
):  # fmt: skip
    """Ranks that communicate."""

    _null = constants.ERR_COMM

    # ---- who it is

    def _adopt(self, other: Any) -> None:
        if other._state is not None and not self._fits(other._state):
            raise TypeError(f"this communicator is no {type(self).__name__}")
        self._state = other._state

    @staticmethod
    def _fits(state: CommState) -> bool:
        """Whether this class is one of a communicator's."""
        return True

    Get_size, size = getter("The number of ranks, of this side.", lambda state: state.size)
    Get_rank, rank = getter("This process's rank.", lambda state: state.rank)
    Get_group, group = getter("The ranks as a group.", lambda state: group_of(state.world, state.ranks))
    Is_inter, is_inter = getter("Whether it has two sides.", lambda state: state.remote is not None)
    Is_intra, is_intra = getter("Whether it has one side.", lambda state: state.remote is None)

    def Get_topology(self) -> int:
        """CART, GRAPH, DIST_GRAPH or UNDEFINED."""
        topology = self._alive().topology
        return constants.UNDEFINED if topology is None else topology.kind

    topology = property(Get_topology)
    is_topo = property(
        lambda self: self.Get_topology() != constants.UNDEFINED, doc="Whether it has a topology."
    )

    def Compare(self, comm: Comm) -> int:
        """IDENT: the same; CONGRUENT: the same ranks in the same order; SIMILAR: the same ranks; UNEQUAL."""
        mine, other = self._alive(), comm._alive()
        if mine is other:
            return constants.IDENT
        if (mine.remote is None) != (other.remote is None):
            return constants.UNEQUAL
        sides = [
            (mine.world.ids_of(mine.ranks), other.world.ids_of(other.ranks)),
            (mine.world.ids_of(mine.remote or ()), other.world.ids_of(other.remote or ())),
        ]
        if all(one == two for one, two in sides):
            return constants.CONGRUENT
        alike = all(set(one) == set(two) for one, two in sides)
        return constants.SIMILAR if alike else constants.UNEQUAL

    def _predefined(self) -> dict[int, Any]:
        return {
            constants.TAG_UB: MOST_TAG, constants.IO: constants.ANY_SOURCE, constants.WTIME_IS_GLOBAL: 0,
            constants.UNIVERSE_SIZE: self._alive().world.size, constants.HOST: constants.PROC_NULL,
            constants.APPNUM: 0, constants.LASTUSEDCODE: last_code(),
        }  # fmt: skip

    # ---- new ones

    def _like(self, state: Any, context: int, serial: int) -> CommState:
        """A state of the same ranks."""
        made = CommState(state.world, state.contexts, state.ranks, context, serial, state.remote)
        made.topology, made.handler = state.topology, state.handler
        return made

    def Dup(self, info: Info | None = None) -> Any:
        """A communicator of the same ranks, with the attributes that are copied."""
        made, schedule = self._duplicate(info)
        complete(schedule)
        return made

    def Idup(self, info: Info | None = None) -> tuple[Any, Request]:
        """See `Dup`. The communicator can be used when the request has ended."""
        made, schedule = self._duplicate(info)
        return made, Request._for(ScheduleRun(schedule))

    Clone, Dup_with_info, Idup_with_info = Dup, Dup, Idup

    def _duplicate(self, info: Info | None) -> tuple[Any, Schedule]:
        state = self._alive()
        made, lane = type(self).__new__(type(self)), state.lane()
        kept = dict(state.info if info is None else info.items())

        def schedule() -> Schedule:
            _, context, serial = yield from self._agree(lane)
            new = self._like(state, context, serial)
            new.info = kept
            self._copy_all(new)
            made._refer(new)

        return made, schedule()

    def _agree(self, lane: Lane, payload: Any = None) -> Schedule:
        """((what the ranks of this side, of the other, have given), a context, which use of it this is)."""
        state = self._alive()
        told, *made = yield from agree(functools.partial(every, lane), state.contexts, lane.number, payload)
        return (told[: state.size], told[state.size :]), *made

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """One communicator for each color; its ranks in the order of `key`. UNDEFINED: none for this rank."""
        return self._split(whole(color, "color"), whole(key, "key"))

    def _split(self, color: Any, key: int) -> Any:
        state = self._alive()
        if isinstance(color, int) and color < 0 and color != constants.UNDEFINED:
            raise Exception(constants.ERR_ARG, f"color is {color}")
        told, *context = complete(self._agree(state.lane(), (color, key)))
        sides = [
            [ranks[rank] for _, rank in sorted((k, rank) for rank, (c, k) in enumerate(side) if c == color)]
            for side, ranks in zip(told, (state.ranks, state.peers), strict=True)
        ]
        return self._new(sides, context, color != constants.UNDEFINED)

    def _new(self, sides: Sequence[Any], context: Sequence[int], mine: bool = True) -> Any:
        """A communicator of these sides; COMM_NULL if this rank is not in it, or a side is empty."""
        state = self._alive()
        remote = sides[1] if state.remote is not None else None
        if not mine or remote == [] or not sides[0]:
            state.contexts.give_back(context[0])
            return COMM_NULL
        made = CommState(state.world, state.contexts, sides[0], context[0], context[1], remote)
        made.handler = state.handler
        return handle_of(made)

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> Any:
        """COMM_TYPE_SHARED: the ranks of each host. UNDEFINED: none for this rank."""
        state, split_type, key = self._alive(), whole(split_type, "split_type"), whole(key, "key")
        guided = split_type in (constants.COMM_TYPE_HW_GUIDED, constants.COMM_TYPE_RESOURCE_GUIDED)
        if guided and info and info.get("mpi_hw_resource_type") == "mpi_shared_memory":
            split_type = constants.COMM_TYPE_SHARED
        if split_type == constants.COMM_TYPE_SHARED:
            return self._split(state.world.group.host_of(state.world.rank), key)
        if guided or split_type in (constants.UNDEFINED, constants.COMM_TYPE_HW_UNGUIDED):
            return self._split(constants.UNDEFINED, key)
        raise Exception(constants.ERR_ARG, f"there is no type {split_type}")

    def Create(self, group: Group) -> Any:
        """A communicator of the ranks of a group, of one on each side; all ranks call it."""
        state = self._alive()
        ranks = state.world.ranks_of(group._alive().ranks)
        if any(rank not in state.ranks for rank in ranks):
            raise Exception(constants.ERR_GROUP, "the group has ranks that are not in the communicator")
        told, *context = complete(self._agree(state.lane(), None if state.remote is None else ranks))
        return self._new((ranks, *(side[0] for side in told[1:] if side)), context, state.world.rank in ranks)

    def _release(self) -> None:
        self.Free()

    def Free(self) -> None:
        """Release it."""
        state = self._alive()
        self._refuse_constant("freed")
        self._delete_all()
        state.close()
        self._state = None

    def Disconnect(self) -> None:
        """Release it, when all ranks have come here."""
        self._alive()
        self._refuse_constant("disconnected")
        self.Barrier()
        self.Free()

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End the job."""
        abort(errorcode)

    @classmethod
    def Get_parent(cls) -> Any:
        """The communicator with the ranks that have started this job; COMM_NULL: a launcher has."""
        state = COMM_WORLD._alive().world.parent if COMM_WORLD._state is not None else None
        return classes[INTER]() if state is None else classes[INTER]._of(state)

    @classmethod
    def Join(cls, fd: int) -> Any:
        """A communicator with the process at the other end of a socket."""
        from unisono.mpi.meetings import join

        return join(COMM_SELF._alive(), whole(fd, "fd"))

    # ---- failures

    def Get_failed(self) -> Group:
        """The ranks that have failed: none."""
        self._alive()
        return Group(GROUP_EMPTY)

    def Ack_failed(self, num_to_ack: int | None = None) -> int:
        """How many failed ranks the program knows of: 0."""
        self._alive()
        return 0

    def Agree(self, flag: int) -> int:
        """The bits that all ranks have set."""
        bits = np.array([flag], np.int32)
        complete(self._agreement(bits))
        return int(bits[0])

    def Iagree(self, flag: Any) -> Request:
        """See `Agree`; the result is left in the buffer."""
        raw = bytes_of(flag, writable=True)[0]
        if raw.size != np.dtype(np.int32).itemsize:
            raise ValueError(f"flag: {raw.size} bytes, expected those of one int")
        return Request._for(ScheduleRun(self._agreement(raw.view(np.int32))))

    def _agreement(self, bits: Any) -> Schedule:
        found: Schedule = self._allreduce(
            self._alive().lane_of_agreement(), bits.copy(), bits, OPS["BAND"]
        ).schedule
        return found

    def Shrink(self) -> Any:
        """A communicator of the ranks that have not failed: all."""
        return self.Dup()

    def Ishrink(self) -> tuple[Any, Request]:
        """See `Shrink`."""
        return self.Idup()

    def Revoke(self) -> None:
        """Not there."""
        raise NotImplementedError("Revoke: a fault ends every operation of the job; see unisono.Group.shrink")

    def Is_revoked(self) -> bool:
        """False: see `Revoke`."""
        self._alive()
        return False


class Intracomm(TopologyCreation, SideCreation, Prefixes, Comm):
    """Ranks of one side."""

    @staticmethod
    def _fits(state: CommState) -> bool:
        return state.remote is None

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        """A communicator of the ranks of a group; only they call it. Others get COMM_NULL at once."""
        state = self._alive()
        if state.world.ids[state.world.rank] not in group._alive().ranks:
            return COMM_NULL
        ranks = state.world.ranks_of(group._alive().ranks)
        lane = state.lane_of_few(ranks, whole(tag, "tag"))
        _, *context = complete(self._agree(lane))
        return self._new((ranks,), context)

    @classmethod
    def Create_from_group(
        cls, group: Group, stringtag: str = "org.mpi4py", info: Any = None, errhandler: Any = None
    ) -> Any:
        """A communicator of the ranks of a group; only they call it."""
        if not group._alive().ranks:
            return COMM_NULL
        made = COMM_WORLD.Create_group(group, hash_of(stringtag))
        if errhandler is not None:
            made.Set_errhandler(errhandler)
        return made


def hash_of(text: str) -> int:
    """A number of a text, the same on every rank."""
    import zlib

    return zlib.crc32(text.encode()) & MOST_TAG


classes[None] = Intracomm
COMM_NULL = Comm()
COMM_WORLD, COMM_SELF = Intracomm(), Intracomm()
"""They get their states when MPI is initialized."""
