"""`Intercomm`: two groups of ranks; messages and collectives go to the other side."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.mpi import constants, object_schedules, schedules
from unisono.mpi.collectives import SHARED, SUM, copy_of
from unisono.mpi.comm import COMM_NULL, COMM_WORLD, Comm, Intracomm, hash_of
from unisono.mpi.comm_state import INTER, CommState, classes
from unisono.mpi.errors import Exception, whole
from unisono.mpi.group import Group, group_of
from unisono.mpi.lane import Lane
from unisono.mpi.message_spec import Block, by_types, equal, simple, vector
from unisono.mpi.op import Op, check_alike, check_type
from unisono.mpi.plan import Plan, forms
from unisono.mpi.progress import Schedule, complete
from unisono.mpi.sides import both_sides, swap_leaders

ROOT, PROC_NULL = constants.ROOT, constants.PROC_NULL


class Intercomm(Comm):
    """Two groups of ranks."""

    @staticmethod
    def _fits(state: CommState) -> bool:
        return state.remote is not None

    def Get_remote_size(self) -> int:
        """The number of ranks of the other side."""
        return len(self._alive().peers)

    def Get_remote_group(self) -> Group:
        """The ranks of the other side."""
        state = self._alive()
        return group_of(state.world, state.peers)

    remote_size, remote_group = property(Get_remote_size), property(Get_remote_group)

    def _agree(self, lane: Lane, payload: Any = None) -> Schedule:
        told, context, serial = yield from super()._agree(lane, payload)
        own = lane.local.size
        return (told[:own], told[own:]), context, serial

    @staticmethod
    def _all_objects(lane: Lane, obj: Any) -> Schedule:
        mine, theirs = yield from both_sides(lane, obj)
        return mine + theirs

    def _split(self, color: Any, key: int) -> Any:
        state = self._alive()
        sides, context, serial = complete(self._agree(state.lane(), (color, key)))
        ranks, remote = (
            [all_ranks[rank] for _, rank in sorted((k, r) for r, (c, k) in enumerate(told) if c == color)]
            for told, all_ranks in zip(sides, (state.ranks, state.peers), strict=True)
        )
        return self._side(state, ranks, remote, context, serial, color != constants.UNDEFINED)

    def Create(self, group: Group) -> Any:
        """A communicator of a group of each side."""
        state = self._alive()
        ranks = state.world.ranks_of(group._alive().ranks)
        sides, context, serial = complete(self._agree(state.lane(), ranks))
        mine = state.world.rank in ranks
        return self._side(state, ranks, sides[1][0], context, serial, mine)

    def _side(self, state: CommState, ranks: Any, remote: Any, context: int, serial: int, mine: bool) -> Any:
        if not mine or not ranks or not remote:
            state.contexts.give_back(context)
            return COMM_NULL
        return Intercomm._of(CommState(state.world, state.contexts, ranks, context, serial, remote))

    def Merge(self, high: bool = False) -> Intracomm:
        """A communicator of both sides; the side that says `high` comes behind."""
        state = self._alive()
        (mine, theirs), context, serial = complete(self._agree(state.lane(), bool(high)))
        first = not mine[0] if mine[0] != theirs[0] else state.ranks < state.peers
        ranks = state.ranks + state.peers if first else state.peers + state.ranks
        return Intracomm._of(CommState(state.world, state.contexts, ranks, context, serial))

    @classmethod
    def Create_from_groups(
        cls,
        local_group: Group,
        local_leader: int,
        remote_group: Group,
        remote_leader: int,
        stringtag: str = "org.mpi4py",
        info: Any = None,  # noqa: ARG003
        errhandler: Any = None,
    ) -> Any:
        """Two groups, of which only these ranks call it."""
        state = COMM_WORLD._alive()
        local = COMM_WORLD.Create_group(local_group, hash_of(stringtag))
        (peer,) = state.world.ranks_of(remote_group._alive().ranks[remote_leader : remote_leader + 1])
        made = local.Create_intercomm(local_leader, COMM_WORLD, state.ranks.index(peer), hash_of(stringtag))
        local.Free()
        if errhandler is not None:
            made.Set_errhandler(errhandler)
        return made

    # ---- collectives of buffers. root: ROOT on the root, PROC_NULL on its side, its rank on the other one.

    def _root(self, lane: Lane, root: int) -> int:
        root = whole(root, "root")
        if root not in (ROOT, PROC_NULL) and not 0 <= root < lane.size:
            raise Exception(constants.ERR_ROOT, f"root is {root}")
        return root

    def _barrier(self, lane: Lane) -> Plan:
        """Wait until every rank of the other side has called it."""
        return Plan(both_sides(lane, None))

    def _bcast(self, lane: Lane, buf: Any, root: int = 0) -> Plan:
        """Copy the items of the root to every rank of the other side."""
        root = self._root(lane, root)
        if root == PROC_NULL:
            return Plan(_nothing())
        if root == ROOT:
            block = simple(buf, writable=False)
            return Plan(_sends(lane, [block] * lane.size))
        return Plan(_receives(lane, [(root, simple(buf, writable=True))]))

    def _gather(self, lane: Lane, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
        """Gather blocks of one size of the other side on the root."""
        return self._gather_by(lane, sendbuf, recvbuf, root, equal)

    def _gatherv(self, lane: Lane, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
        """Gather blocks of any sizes of the other side on the root."""
        return self._gather_by(lane, sendbuf, recvbuf, root, vector)

    def _gather_by(self, lane: Lane, sendbuf: Any, recvbuf: Any, root: int, parts: Any) -> Plan:
        root = self._root(lane, root)
        if root == PROC_NULL:
            return Plan(_nothing())
        if root == ROOT:
            return Plan(_receives(lane, list(enumerate(parts(recvbuf, lane.size, writable=True)))))
        return Plan(_sends(lane, [simple(sendbuf, writable=False)], root))

    def _scatter(self, lane: Lane, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
        """Give every rank of the other side a block of the root, of one size."""
        return self._scatter_by(lane, sendbuf, recvbuf, root, equal)

    def _scatterv(self, lane: Lane, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
        """Give every rank of the other side a block of the root, of any sizes."""
        return self._scatter_by(lane, sendbuf, recvbuf, root, vector)

    def _scatter_by(self, lane: Lane, sendbuf: Any, recvbuf: Any, root: int, parts: Any) -> Plan:
        root = self._root(lane, root)
        if root == PROC_NULL:
            return Plan(_nothing())
        if root == ROOT:
            return Plan(_sends(lane, parts(sendbuf, lane.size, writable=False)))
        return Plan(_receives(lane, [(root, simple(recvbuf, writable=True))]))

    def _allgather(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Gather blocks of one size of the other side on every rank."""
        mine = simple(sendbuf, writable=False)
        return self._swap(lane, [mine] * lane.size, equal(recvbuf, lane.size, writable=True))

    def _allgatherv(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Gather blocks of any sizes of the other side on every rank."""
        mine = simple(sendbuf, writable=False)
        return self._swap(lane, [mine] * lane.size, vector(recvbuf, lane.size, writable=True))

    def _alltoall(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Exchange blocks of one size with the other side."""
        return self._swap(lane, *(self._two(lane, sendbuf, recvbuf, equal)))

    def _alltoallv(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Exchange blocks of any sizes with the other side."""
        return self._swap(lane, *(self._two(lane, sendbuf, recvbuf, vector)))

    def _alltoallw(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Exchange blocks of any sizes and types with the other side."""
        return self._swap(lane, *(self._two(lane, sendbuf, recvbuf, by_types)))

    @staticmethod
    def _two(lane: Lane, sendbuf: Any, recvbuf: Any, parts: Any) -> tuple[list[Block], list[Block]]:
        incoming = parts(recvbuf, lane.size, writable=True)
        return parts(sendbuf, lane.size, writable=False), incoming

    @staticmethod
    def _swap(lane: Lane, outgoing: list[Block], incoming: list[Block]) -> Plan:
        return Plan(schedules.exchange(lane, list(enumerate(outgoing)), list(enumerate(incoming))))

    def _reduce(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Plan:
        """Reduce the items of the other side to the root."""
        root = self._root(lane, root)
        if root == PROC_NULL:
            return Plan(_nothing())
        if root == ROOT:
            return Plan(_receives(lane, [(0, simple(recvbuf, writable=True))]))
        source = simple(sendbuf, writable=False)
        check_type(op, source.type)
        packed = copy_of(source)

        def schedule() -> Schedule:
            found = yield from schedules.reduce(lane.local, packed, op, source.type, 0)
            if lane.rank == 0:
                yield [lane.send(root, found)]

        return Plan(schedule())

    def _allreduce(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        """Reduce the items of the other side to every rank."""
        target, source = simple(recvbuf, writable=True), simple(sendbuf, writable=False)
        check_alike(source, target)
        check_type(op, source.type)
        packed = copy_of(source)

        def schedule() -> Schedule:
            found = yield from schedules.reduce(lane.local, packed, op, source.type, 0)
            room = np.empty(target.nbytes, np.uint8)
            yield from swap_leaders(lane, found, room)
            yield from schedules.broadcast(lane.local, room, 0)
            target.fill(room)

        return Plan(schedule())

    def _reduce_scatter_block(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        """Reduce the items of the other side, and give every rank a block of one size."""
        return self._reduce_parts(lane, sendbuf, recvbuf, op)

    def _reduce_scatter(
        self,
        lane: Lane,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Any = None,  # noqa: ARG002
        op: Op = SUM,
    ) -> Plan:
        """Reduce the items of the other side, and give every rank a block of any size."""
        return self._reduce_parts(lane, sendbuf, recvbuf, op)

    def _reduce_parts(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op) -> Plan:
        target, source = simple(recvbuf, writable=True), simple(sendbuf, writable=False)
        check_type(op, source.type)
        packed, byte = copy_of(source), Block(None, 0, 0, _BYTE).type

        def schedule() -> Schedule:
            sizes = yield from object_schedules.gather(lane.local, target.nbytes, 0)
            found = yield from schedules.reduce(lane.local, packed, op, source.type, 0)
            room = np.empty(sum(sizes) if lane.rank == 0 else 0, np.uint8)
            yield from swap_leaders(lane, found, room)
            parts, at = [], 0
            for nbytes in sizes or ():
                parts.append(Block(room, at, nbytes, byte))
                at += nbytes
            mine = np.empty(target.nbytes, np.uint8)
            own = Block(mine, 0, mine.size, byte)
            yield from schedules.scatter(lane.local, parts if lane.rank == 0 else None, own, 0)
            target.fill(mine)

        return Plan(schedule())

    # ---- collectives of objects

    def barrier(self) -> None:
        """See `Barrier`."""
        complete(both_sides(self._alive().lane(), None))

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """The object of the root, on the other side; on its own side None."""
        return self.scatter(_Repeated(obj), root)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """The objects of the other side, on the root."""
        lane = self._alive().lane()
        root = self._root(lane, root)
        if root == PROC_NULL:
            return None
        if root == ROOT:
            found: list[Any] = complete(object_schedules.exchange(lane, [], list(range(lane.size))))
            return found
        complete(object_schedules.exchange(lane, [(root, sendobj)], []))
        return None

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        """Object i of the root's list, on rank i of the other side."""
        lane = self._alive().lane()
        root = self._root(lane, root)
        if root == PROC_NULL:
            return None
        if root == ROOT:
            objects = [sendobj.obj] * lane.size if isinstance(sendobj, _Repeated) else list(sendobj)
            if len(objects) != lane.size:
                raise ValueError(f"expecting {lane.size} items, got {len(objects)}")
            complete(object_schedules.exchange(lane, list(enumerate(objects)), []))
            return None
        return complete(object_schedules.exchange(lane, [], [root]))[0]

    def allgather(self, sendobj: Any) -> list[Any]:
        """The objects of the other side."""
        return complete(both_sides(self._alive().lane(), sendobj))[1]

    def alltoall(self, sendobj: Any) -> list[Any]:
        """Object i goes to rank i of the other side."""
        lane = self._alive().lane()
        objects = [None] * lane.size if sendobj is None else list(sendobj)
        if len(objects) != lane.size:
            raise ValueError(f"expecting {lane.size} items, got {len(objects)}")
        ranks = list(range(lane.size))
        return complete(object_schedules.exchange(lane, list(enumerate(objects)), ranks))

    def reduce(self, sendobj: Any, op: Any = SUM, root: int = 0) -> Any:
        """The objects of the other side, reduced, on the root."""
        lane = self._alive().lane()
        root = self._root(lane, root)
        if root == PROC_NULL:
            return None
        if root == ROOT:
            return complete(object_schedules.exchange(lane, [], [0]))[0]

        def schedule() -> Schedule:
            found = yield from object_schedules.reduce(lane.local, sendobj, op, 0)
            if lane.rank == 0:
                yield from object_schedules.exchange(lane, [(root, found)], [])

        return complete(schedule())

    def allreduce(self, sendobj: Any, op: Any = SUM) -> Any:
        """The objects of the other side, reduced."""
        lane = self._alive().lane()

        def schedule() -> Schedule:
            found = yield from object_schedules.reduce(lane.local, sendobj, op, 0)
            if lane.rank == 0:
                (found,) = yield from object_schedules.exchange(lane, [(0, found)], [0])
            return (yield from object_schedules.broadcast(lane.local, found, 0))

        return complete(schedule())


class _Repeated:
    """The object that every rank gets."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj


_BYTE = simple(b"", writable=False).type
forms(Intercomm, SHARED)
classes[INTER] = Intercomm


def _nothing() -> Schedule:
    yield []


def _sends(lane: Lane, blocks: list[Block], rank: int | None = None) -> Schedule:
    """Block i to rank i; or the only one to a rank."""
    yield [lane.send_block(number if rank is None else rank, block) for number, block in enumerate(blocks)]


def _receives(lane: Lane, blocks: list[tuple[int, Block]]) -> Schedule:
    yield [lane.receive_block(rank, block) for rank, block in blocks]
