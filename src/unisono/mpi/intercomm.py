"""`Intercomm`: two groups of ranks; messages and collectives go to the other side."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.mpi import object_schedules as objects
from unisono.mpi import schedules, sides
from unisono.mpi.collectives import SUM
from unisono.mpi.comm import COMM_WORLD, Comm, Intracomm, hash_of
from unisono.mpi.comm_state import INTER, CommState, classes
from unisono.mpi.group import Group, group_of
from unisono.mpi.handle import getter
from unisono.mpi.message_spec import repeated, simple
from unisono.mpi.objects import collective
from unisono.mpi.op import Op, check_alike, check_type
from unisono.mpi.plan import Plan
from unisono.mpi.progress import Schedule, complete
from unisono.mpi.sides import both_sides, swap_leaders
from unisono.mpi.transport import Lane


class Intercomm(Comm):
    """Two groups of ranks."""

    @staticmethod
    def _fits(state: CommState) -> bool:
        return state.remote is not None

    Get_remote_size, remote_size = getter("The other side's number of ranks.", lambda state: len(state.peers))
    Get_remote_group, remote_group = getter("Its ranks.", lambda state: group_of(state.world, state.peers))

    def Merge(self, high: bool = False) -> Intracomm:
        """A communicator of both sides; the side that says `high` comes behind."""
        state = self._alive()
        (mine, theirs), *context = complete(self._agree(state.lane(), bool(high)))
        first = not mine[0] if mine[0] != theirs[0] else state.ranks < state.peers
        ranks = state.ranks + state.peers if first else state.peers + state.ranks
        return Intracomm._of(CommState(state.world, state.contexts, ranks, *context))

    @classmethod
    def Create_from_groups(
        cls, local_group: Group, local_leader: int, remote_group: Group, remote_leader: int,
        stringtag: str = "org.mpi4py", info: Any = None, errhandler: Any = None,
    ) -> Any:  # fmt: skip
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

    def _barrier(self, lane: Lane) -> Plan:
        return Plan(both_sides(lane, None))

    def _bcast(self, lane: Lane, buf: Any, root: int = 0) -> Plan:
        return self._scatter(lane, buf, buf, root, parts=repeated)

    def _reduce(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Plan:
        at_root, peer = lane.role(root)
        if peer is None:
            takes = [(0, simple(recvbuf, writable=True))] if at_root else []
            return Plan(schedules.exchange(lane, [], takes))
        source = simple(sendbuf, writable=False)
        check_type(op, source.type)

        def schedule(packed: Any) -> Schedule:
            found = yield from schedules.reduce(lane.local, packed, op, source.type, 0)
            if lane.rank == 0:
                yield [lane.send(peer, found)]

        return Plan(schedule(source.copied()))

    def _allreduce(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        target, source = simple(recvbuf, writable=True), simple(sendbuf, writable=False)
        check_alike(source, target)
        check_type(op, source.type)

        def schedule(packed: Any) -> Schedule:
            found = yield from schedules.reduce(lane.local, packed, op, source.type, 0)
            room = np.empty(target.nbytes, np.uint8)
            yield from swap_leaders(lane, found, room)
            yield from schedules.broadcast(lane.local, room, 0)
            target.fill(room)

        return Plan(schedule(source.copied()))

    def _reduce_scatter_block(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        return self._reduce_scatter(lane, sendbuf, recvbuf, None, op)

    def _reduce_scatter(
        self, lane: Lane, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Op = SUM
    ) -> Plan:  # fmt: skip
        target, source = simple(recvbuf, writable=True), simple(sendbuf, writable=False)
        check_type(op, source.type)

        def schedule(packed: Any) -> Schedule:
            sizes = (yield from objects.gather(lane.local, target.nbytes, 0)) or ()
            found = yield from schedules.reduce(lane.local, packed, op, source.type, 0)
            room, mine = np.empty(sum(sizes), np.uint8), np.empty(target.nbytes, np.uint8)
            yield from swap_leaders(lane, found, room)
            yield from schedules.scatter_bytes(lane.local, room, sizes, mine)
            target.fill(mine)

        return Plan(schedule(source.copied()))

    # ---- collectives of objects that one side performs otherwise

    barrier = collective("See `Barrier`.", lambda lane: sides.both_sides(lane, None))
    bcast = collective("The object of the root, on the other side; on its own side None.", sides.broadcast)
    reduce = collective("The objects of the other side, reduced, on the root.", sides.reduce)
    allreduce = collective("The objects of the other side, reduced.", sides.all_reduce)


classes[INTER] = Intercomm
