"""Two groups of ranks: how they meet, and what both sides tell each other."""

from __future__ import annotations

from typing import Any, NoReturn

from unisono.mpi import constants, object_schedules
from unisono.mpi.comm_state import CommState, handle_of
from unisono.mpi.context import agree
from unisono.mpi.errors import Exception
from unisono.mpi.lane import Lane
from unisono.mpi.pickling import pickle
from unisono.mpi.progress import Schedule, complete


def both_sides(lane: Lane, obj: Any) -> Schedule:
    """(the objects of this side's ranks, those of the other side's), on every rank."""
    mine = yield from object_schedules.gather(lane.local, obj, 0)
    theirs = None
    if lane.rank == 0:
        incoming = lane.receive_bytes(0)
        yield [incoming, lane.send_bytes(0, pickle.dumps(mine))]
        theirs = pickle.loads(incoming.value)
    return (yield from object_schedules.broadcast(lane.local, (mine, theirs), 0))


def swap_leaders(lane: Lane, packed: Any, room: Any) -> Schedule:
    """Ranks 0 of both sides exchange bytes."""
    if lane.rank == 0:
        yield [lane.receive(0, room), lane.send(0, packed)]


class SideCreation:
    """The methods of `Intracomm` that reach other ranks."""

    _alive: Any

    def Create_intercomm(self, local_leader: int, peer_comm: Any, remote_leader: int, tag: int = 0) -> Any:
        """Two communicators whose leaders know each other in `peer_comm`."""
        state = self._alive()
        lane, contexts = state.lane(), state.contexts
        if not 0 <= local_leader < state.size:
            raise Exception(constants.ERR_RANK, f"local_leader is {local_leader}")

        def exchange(obj: Any) -> Schedule:
            """The objects of all ranks of both sides."""
            told = yield from object_schedules.all_gather(lane, obj)
            remote = None
            if lane.rank == local_leader:
                peers = peer_comm._alive()
                between = peers.lane_of_few(peers.peers, tag)
                (remote,) = yield from object_schedules.exchange(
                    between, [(remote_leader, told)], [remote_leader]
                )
            return told + (yield from object_schedules.broadcast(lane, remote, local_leader))

        def schedule() -> Schedule:
            told = yield from exchange((state.ranks, lane.number))
            ranks = told[-1][0]
            _, context, serial = yield from agree(exchange, contexts, told[0][1] + told[-1][1])
            return ranks, context, serial

        ranks, context, serial = complete(schedule())
        return handle_of(CommState(state.world, contexts, state.ranks, context, serial, ranks))

    def Spawn(self, *args: Any, **options: Any) -> NoReturn:
        """Not there: the launcher starts all ranks."""
        raise NotImplementedError(
            "Spawn: the launcher starts all ranks of a job. Start more ranks (unisono run -n N) and split "
            "them, or use mpi4py.futures, which needs no spawning."
        )

    Spawn_multiple = Accept = Connect = Spawn
