"""`CommState`: the ranks of a communicator, its contexts, and the group of the engine that it may have.

Contexts are numbers that keep the messages of communicators apart, on which their ranks agree. Several
agreements may be under way on a rank, of threads or of requests. Each holds what it offers, so what it takes
is not another's. Each begins elsewhere, so they meet only when few contexts are left.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from unisono._native import MOST_CONTEXTS
from unisono.mpi import constants
from unisono.mpi.constants import ANY_SOURCE, ANY_TAG
from unisono.mpi.errors import Exception, whole
from unisono.mpi.handle import State
from unisono.mpi.progress import Schedule, moving
from unisono.mpi.transport import MOST_TAG, Lane, Messages, World

_CONTEXTS = (MOST_CONTEXTS - 1) // 2
"""Each communicator has two: for its program's messages, and for its collectives."""
WORLD_CONTEXT, SELF_CONTEXT, PARENT_CONTEXT = 0, 1, 2
_FIRST_OFFER, _GROWTH, _ATTEMPTS = 4, 4, 24
_SPREAD = 1597  # no divisor of it divides _CONTEXTS: neighbouring keys begin far from each other


class Contexts:
    """Which contexts this rank uses, and how often it has used each."""

    def __init__(self, last: int = SELF_CONTEXT) -> None:
        """The contexts to `last` are in use from the beginning."""
        self._guard = threading.Lock()
        self._free = set(range(last + 1, _CONTEXTS))
        self._uses: dict[int, int] = {}
        self._held = 0

    def hold(self, first: int, count: int) -> tuple[dict[int, int], bool]:
        """(contexts and how often each was used, whether there may be more): held until `settle`."""
        held: dict[int, int] = {}
        with self._guard:
            for one in itertools.chain(range(first, _CONTEXTS), range(first)):
                if one in self._free:
                    held[one] = self._uses.get(one, 0)
                    if len(held) == count:
                        break
            self._free.difference_update(held)
            more = bool(self._free) or self._held > 0
            self._held += len(held)
        return held, more

    def settle(self, held: dict[int, int], chosen: int | None, serial: int) -> None:
        """Give back all contexts but the chosen one."""
        with self._guard:
            self._held -= len(held)
            self._free.update(held)
            if chosen is not None:
                self._free.remove(chosen)
                self._uses[chosen] = serial

    def give_back(self, context: int) -> None:
        """A communicator was freed."""
        if context > SELF_CONTEXT:
            with self._guard:
                self._free.add(context)

    def unused(self) -> bool:
        """Whether no communicator is left but those of the world's beginning."""
        with self._guard:
            return len(self._free) + SELF_CONTEXT + 1 == _CONTEXTS


def agree(exchange: Callable[[Any], Schedule], contexts: Contexts, key: int, payload: Any = None) -> Schedule:
    """Agree on a context. Returns (what each rank has given, context, which use of it this is).

    exchange: a schedule that returns the objects of all ranks.  key: the same on all of them, and another one
    for each agreement that may be under way.

    Raises:
        Exception: no context is free on all ranks.
    """
    for attempt in range(_ATTEMPTS):
        first = (key + attempt) * _SPREAD % _CONTEXTS
        held, more = contexts.hold(first, _FIRST_OFFER * _GROWTH**attempt)
        told = yield from exchange((payload, held, more))
        offers = [offer for _, offer, _ in told]  # each from `first` on: the nearest one that all have
        chosen = next((one for one in offers[0] if all(one in offer for offer in offers)), None)
        serial = 0 if chosen is None else 1 + max(offer[chosen] for offer in offers)
        contexts.settle(held, chosen, serial)
        if chosen is not None:
            return [one for one, _, _ in told], chosen, serial
        if not any(another for _, _, another in told):
            break
    raise Exception(constants.ERR_NO_MEM, f"{_CONTEXTS} communicators are in use; free some")


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
        every = self.peers == tuple(range(world.size))
        self.places: Any = self.peers if every else {peer: rank for rank, peer in enumerate(self.peers)}
        self.context, self.serial = context, serial
        self.messages = Messages(world, 2 * context + 1)
        for name in ("send", "isend", "recv", "irecv", "recv_object", "irecv_bytes", "peek"):
            call = getattr(self.messages.quick, f"_{name}")
            setattr(self, name, call if every else _renumbered(call, self.peers))
        self.hidden = Messages(world, 2 * context + 2)
        self.handler: Any = None
        self.info: dict[str, str] = {}
        self.locks: dict[str, Any] = {}
        self.topology: Any = None
        self.calls = self._sequence = self._agreements = 0
        self.group = world.group if context == WORLD_CONTEXT and 1 < self.size == world.size else None

    def destination(self, dest: int, tag: int) -> tuple[int, int]:
        """The rank of the world and the tag of a message to a rank.

        Raises:
            Exception: there is no such rank, or no such tag.
        """
        if type(dest) is not int or type(tag) is not int:
            dest, tag = whole(dest, "dest"), whole(tag, "tag")
        if not 0 <= dest < len(self.peers):
            raise Exception(constants.ERR_RANK, f"dest is {dest}, expected 0..{len(self.peers) - 1}")
        if not 0 <= tag <= MOST_TAG:
            raise Exception(constants.ERR_TAG, f"tag is {tag}, expected 0..{MOST_TAG}")
        return self.peers[dest], tag

    def origin(self, source: int, tag: int) -> tuple[int | None, int]:
        """The rank of the world (None: any) and the tag of a message from a rank.

        Raises:
            Exception: there is no such rank, or no such tag.
        """
        if type(source) is not int or type(tag) is not int:
            source, tag = whole(source, "source"), whole(tag, "tag")
        if source != ANY_SOURCE and not 0 <= source < len(self.peers):
            raise Exception(constants.ERR_RANK, f"source is {source}, expected 0..{len(self.peers) - 1}")
        if tag != ANY_TAG and not 0 <= tag <= MOST_TAG:
            raise Exception(constants.ERR_TAG, f"tag is {tag}, expected 0..{MOST_TAG}")
        peer = None if source == ANY_SOURCE else self.peers[source]
        return peer, tag

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
            made.inter, made.local = True, Lane(self.hidden, self.ranks, self.rank, self.size, places, tag)
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
