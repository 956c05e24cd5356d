"""`CommState`: the ranks of a communicator, its contexts, and the group of the engine that it may have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.mpi.context import WORLD_CONTEXT
from unisono.mpi.handle import State
from unisono.mpi.lane import Lane
from unisono.mpi.progress import moving
from unisono.mpi.transport import MOST_TAG, Messages, World

classes: dict[int | None, Any] = {}
"""The class of communicators with a topology (CART ...), without one (None), with two sides (INTER)."""
INTER = -1


def handle_of(state: CommState) -> Any:
    """A communicator of a state."""
    family = INTER if state.remote is not None else None if state.topology is None else state.topology.kind
    return classes[family]._of(state)


_COLLECTIVE_TAGS, _FEW_TAGS = MOST_TAG >> 2, MOST_TAG >> 1
"""Below: of collectives; between: of agreements, see `Recovery`; above: of some ranks."""
_CALLS_BEFORE_GROUP = 4
"""Making a group of the engine takes milliseconds: the first collectives of a communicator do without."""


def _renumbered(call: Callable[..., Any], peers: Sequence[int]) -> Callable[..., Any]:
    """A native call of a message, with ranks of these peers."""

    def renumbered(given: Any, rank: int | None, tag: int, timeout: None) -> Any:
        if rank is None:
            return call(given, None, tag, timeout)
        known = type(rank) is int and 0 <= rank < len(peers)
        return call(given, peers[rank], tag, timeout) if known else None

    return renumbered


class CommState(State):
    """The state of a communicator.

    ranks: of the world, of this side.  remote: those of the other side of an intercommunicator, or None.
    serial: which use of its context by these ranks this is.  calls: blocking collectives that the engine has.
    """

    def __init__(
        self, world: World, contexts: Any, ranks: Sequence[int], context: int, serial: int,
        remote: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.world, self.contexts, self.ranks = world, contexts, tuple(ranks)
        self.rank, self.size = self.ranks.index(world.rank), len(self.ranks)
        self.remote = None if remote is None else tuple(remote)
        self.peers = self.ranks if self.remote is None else self.remote
        whole = self.peers == tuple(range(world.size))
        self.places: Any = self.peers if whole else {peer: rank for rank, peer in enumerate(self.peers)}
        self.context, self.serial = context, serial
        self.messages = Messages(world, 2 * context + 1)
        for name in ("send", "isend", "recv", "irecv", "recv_object", "irecv_bytes", "peek"):
            call = getattr(self.messages.quick, f"_{name}")
            setattr(self, name, call if whole else _renumbered(call, self.peers))
        self.hidden = Messages(world, 2 * context + 2)
        self.handler: Any = None
        self.info: dict[str, str] = {}
        self.locks: dict[str, Any] = {}
        self.topology: Any = None
        self.calls = self._sequence = self._agreements = 0
        self.group = world.group if context == WORLD_CONTEXT and 1 < self.size == world.size else None

    def lane(self) -> Lane:
        """The messages of the next collective."""
        self._sequence += 1
        return self.lane_of(self._sequence)

    def planned(self, body: Callable[[Lane], Any]) -> Any:
        """What `body` makes of the lane of the next collective. If it raises there was no collective."""
        made = body(self.lane_of(self._sequence + 1))
        self._sequence += 1
        return made

    def lane_of(self, number: int) -> Lane:
        """The messages of the collective with a number."""
        return self._lane(number & _COLLECTIVE_TAGS)

    def lane_of_agreement(self) -> Lane:
        """The messages of the next agreement: they are in no order with collectives."""
        self._agreements += 1
        return self._lane(self._agreements & _COLLECTIVE_TAGS | _COLLECTIVE_TAGS + 1)

    def _lane(self, tag: int) -> Lane:
        made = Lane(self.hidden, self.peers, self.rank, len(self.peers), self.places, tag)
        if self.remote is not None:
            places = {rank: place for place, rank in enumerate(self.ranks)}
            made.local = Lane(self.hidden, self.ranks, self.rank, self.size, places, tag)
        return made

    def lane_of_few(self, ranks: Sequence[int], tag: int) -> Lane:
        """The messages of some ranks of the world, whose program has agreed on a tag."""
        places = {rank: place for place, rank in enumerate(ranks)}
        mine = places.get(self.world.rank, 0)
        return Lane(self.hidden, ranks, mine, len(ranks), places, tag & _FEW_TAGS | _FEW_TAGS + 1)

    def fast_group(self) -> Any:
        """The group of the engine for a blocking call whose arguments need no reading, or None.

        The call counts as a collective, as on ranks whose arguments do.
        """
        if self.group is None or moving():
            return None
        self._sequence += 1
        return self.group

    def engine_group(self) -> Any:
        """The group of the engine for a blocking collective; None: not yet, see `calls`."""
        due = self.calls > _CALLS_BEFORE_GROUP and self.size > 1 and self.remote is None
        if self.group is None and due:
            parent = self.world.group
            name = f"{parent.name}/comm{self.context}.{self.serial}"
            self.group = parent._connect(self.ranks, name, self.ranks)
        return self.group

    def close(self) -> None:
        """The communicator was freed."""
        if self.group is not None and self.group is not self.world.group:
            self.group.close()
        self.group = None
        self.contexts.give_back(self.context)
        if self.world.parent is self:
            self.world.parent = None
        if self.world.ends_with is not None and self.contexts.unused():
            self.world.close()
