"""Two groups of ranks: how they meet, and what both sides tell each other."""

from __future__ import annotations

from typing import Any

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
            if lane.rank == local_leader and (peers := peer_comm._alive()).world is state.world:
                between = peers.lane_of_few(peers.peers, tag)
                (remote,) = yield from object_schedules.exchange(
                    between, [(remote_leader, told)], [remote_leader]
                )
            theirs = yield from object_schedules.broadcast(lane, remote, local_leader)
            if theirs is None:
                raise Exception(constants.ERR_COMM, "peer_comm has ranks of another job: take part of it")
            return told + theirs

        def schedule() -> Schedule:
            told = yield from exchange((state.ranks, lane.number))
            ranks = told[-1][0]
            _, context, serial = yield from agree(exchange, contexts, told[0][1] + told[-1][1])
            return ranks, context, serial

        ranks, context, serial = complete(schedule())
        return handle_of(CommState(state.world, contexts, state.ranks, context, serial, ranks))

    def Spawn(
        self,
        command: Any,
        args: Any = None,
        maxprocs: int = 1,
        info: Any = None,
        root: int = 0,
        errcodes: list[int] | None = None,
    ) -> Any:
        """Start processes on the root's host. Returns the communicator with them; they have `Get_parent`.

        Raises:
            Exception: they cannot be started.
        """
        made, counts = self._spawn(command, args, maxprocs, info, root, False)
        if errcodes is not None:
            errcodes[:] = [constants.SUCCESS] * counts[0]
        return made

    def Spawn_multiple(
        self,
        command: Any,
        args: Any = None,
        maxprocs: Any = 1,
        info: Any = None,
        root: int = 0,
        errcodes: list[list[int]] | None = None,
    ) -> Any:
        """As `Spawn`, of several commands; the new ranks are in their order."""
        made, counts = self._spawn(command, args, maxprocs, info, root, True)
        if errcodes is not None:
            errcodes[:] = [[constants.SUCCESS] * count for count in counts]
        return made

    def _spawn(self, command: Any, args: Any, maxprocs: Any, info: Any, root: int, several: bool) -> Any:
        from unisono.mpi.spawning import orders_of, spawn

        return spawn(self._alive(), orders_of(command, args, maxprocs, info, several), root)

    def Accept(self, port_name: str, info: Any = None, root: int = 0) -> Any:  # noqa: ARG002
        """Wait for ranks that `Connect` to a port of the root. Returns the communicator with them."""
        from unisono.mpi.meetings import pair

        return pair(self._alive(), port_name, root, True)

    def Connect(self, port_name: str, info: Any = None, root: int = 0) -> Any:  # noqa: ARG002
        """Meet the ranks that `Accept` at a port. Returns the communicator with them."""
        from unisono.mpi.meetings import pair

        return pair(self._alive(), port_name, root, False)
