"""Two groups of ranks: how they meet, and what both sides tell each other."""

from __future__ import annotations

from typing import Any, NamedTuple

from unisono.mpi import constants
from unisono.mpi import object_schedules as objects
from unisono.mpi.comm_state import CommState, agree, handle_of
from unisono.mpi.errors import Exception, whole
from unisono.mpi.handle import Handle
from unisono.mpi.op import OPS
from unisono.mpi.pickling import pickle
from unisono.mpi.progress import Schedule, complete
from unisono.mpi.transport import Lane

SUM = OPS["SUM"]


def both_sides(lane: Lane, obj: Any) -> Schedule:
    """(the objects of this side's ranks, those of the other side's), on every rank."""
    mine = yield from objects.gather(lane.local, obj, 0)
    theirs = None
    if lane.rank == 0:
        incoming = lane.receive_bytes(0)
        yield [incoming, lane.send_bytes(0, pickle.dumps(mine))]
        theirs = pickle.loads(incoming.value)
    return (yield from objects.broadcast(lane.local, (mine, theirs), 0))


def every(lane: Lane, obj: Any) -> Schedule:
    """The objects of all ranks, of this side first."""
    if not lane.inter:
        return (yield from objects.all_gather(lane, obj))
    mine, theirs = yield from both_sides(lane, obj)
    return mine + theirs


def swap_leaders(lane: Lane, packed: Any, room: Any) -> Schedule:
    """Ranks 0 of both sides exchange bytes."""
    if lane.rank == 0:
        yield [lane.receive(0, room), lane.send(0, packed)]


# ---- collectives of objects: what goes to a side comes from the other one


def broadcast(lane: Lane, obj: Any, root: int = 0) -> Schedule:
    """The object of the root, for every rank of the other side."""
    return objects.scatter(lane, [obj] * lane.size, root)


def reduce(lane: Lane, sendobj: Any, op: Any = SUM, root: int = 0) -> Schedule:
    """The objects of the other side, reduced, for the root."""
    (at_root, peer), found = lane.role(root), None
    if peer is not None:
        found = yield from objects.reduce(lane.local, sendobj, op, 0)
    gives = [(peer, found)] if peer is not None and lane.rank == 0 else []
    got = yield from objects.exchange(lane, gives, [0] if at_root else [])
    return got[0] if got else None


def all_reduce(lane: Lane, sendobj: Any, op: Any = SUM) -> Schedule:
    """The objects of the other side, reduced."""
    found = yield from objects.reduce(lane.local, sendobj, op, 0)
    if lane.rank == 0:
        (found,) = yield from objects.exchange(lane, [(0, found)], [0])
    return (yield from objects.broadcast(lane.local, found, 0))


class Meeting(NamedTuple):
    """How two sides that are not of one world meet: at a store. first: this side's ranks come first."""

    address: tuple[str, int]
    first: bool
    others: int


def _leader(state: CommState, peers: CommState, remote_leader: int, tag: int, told: list[Any]) -> Schedule:
    """The objects of the other side's ranks, from its leader; a Meeting if the sides are of two worlds."""
    between, foreign = peers.lane_of_few(peers.peers, tag), peers.world is not state.world
    asked = [(remote_leader, (told, foreign))]
    ((theirs, other),) = yield from objects.exchange(between, asked, [remote_leader])
    if not foreign and not other:
        return theirs
    first, address = peers.world.rank < peers.peers[remote_leader], None
    if first:
        from unisono.mpi.meetings import serve

        server = serve(peers.world)
        address = server.host, server.port
    (found,) = yield from objects.exchange(between, [(remote_leader, address)], [remote_leader])
    return Meeting(address or found, first, len(theirs))


class SideCreation(Handle):
    """The methods of `Intracomm` that reach other ranks."""

    def Create_intercomm(self, local_leader: int, peer_comm: Any, remote_leader: int, tag: int = 0) -> Any:
        """Two communicators whose leaders know each other in `peer_comm`."""
        state = self._alive()
        if not 0 <= (local_leader := whole(local_leader, "local_leader")) < state.size:
            raise Exception(constants.ERR_RANK, f"local_leader is {local_leader}")
        if state.rank == local_leader:
            peer_comm._alive().destination(remote_leader, tag)
        lane, contexts = state.lane(), state.contexts

        def exchange(obj: Any) -> Schedule:
            """The objects of this side's ranks, and those of the other's, or how both sides meet."""
            told, remote = (yield from objects.all_gather(lane, obj)), None
            if lane.rank == local_leader:
                remote = yield from _leader(state, peer_comm._alive(), remote_leader, tag, told)
            return told, (yield from objects.broadcast(lane, remote, local_leader))

        def every(obj: Any) -> Schedule:
            told, theirs = yield from exchange(obj)
            return told + theirs

        def schedule() -> Schedule:
            told, theirs = yield from exchange((state.ranks, lane.number))
            if isinstance(theirs, Meeting):
                return theirs
            _, context, serial = yield from agree(every, contexts, told[0][1] + theirs[0][1])
            return CommState(state.world, contexts, state.ranks, context, serial, theirs[0][0])

        made = complete(schedule())
        if isinstance(made, Meeting):  # the sides are of two jobs
            from unisono.mpi.meetings import meet, store_at

            return meet(state, store_at(made.address), made.first, made.others)
        return handle_of(made)

    def Spawn(
        self, command: Any, args: Any = None, maxprocs: int = 1, info: Any = None, root: int = 0,
        errcodes: list[int] | None = None,
    ) -> Any:  # fmt: skip
        """Start processes on the root's host. Returns the communicator with them; they have `Get_parent`.

        Raises:
            Exception: they cannot be started.
        """
        made, counts = self._spawn(command, args, maxprocs, info, root, False)
        if errcodes is not None:
            errcodes[:] = [constants.SUCCESS] * counts[0]
        return made

    def Spawn_multiple(
        self, command: Any, args: Any = None, maxprocs: Any = 1, info: Any = None, root: int = 0,
        errcodes: list[list[int]] | None = None,
    ) -> Any:  # fmt: skip
        """As `Spawn`, of several commands; the new ranks are in their order."""
        made, counts = self._spawn(command, args, maxprocs, info, root, True)
        if errcodes is not None:
            errcodes[:] = [[constants.SUCCESS] * count for count in counts]
        return made

    def _spawn(self, command: Any, args: Any, maxprocs: Any, info: Any, root: int, several: bool) -> Any:
        from unisono.mpi.meetings import orders_of, spawn

        return spawn(self._alive(), orders_of(command, args, maxprocs, info, several), root)

    def Accept(self, port_name: str, info: Any = None, root: int = 0) -> Any:
        """Wait for ranks that `Connect` to a port of the root. Returns the communicator with them."""
        from unisono.mpi.meetings import pair

        return pair(self._alive(), port_name, root, True)

    def Connect(self, port_name: str, info: Any = None, root: int = 0) -> Any:
        """Meet the ranks that `Accept` at a port. Returns the communicator with them."""
        from unisono.mpi.meetings import pair

        return pair(self._alive(), port_name, root, False)
