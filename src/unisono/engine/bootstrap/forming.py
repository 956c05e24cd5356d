"""Makes the engine of the next membership from that of the former one: no store, no listening socket.

On a host every rank maps the next part of the same memory file. Between hosts the connections are passed on:
a control frame and a marker in each stream separate the bytes of the two memberships.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
from collections.abc import Iterable

import msgspec

from unisono import _native
from unisono._native import Contact, Fate
from unisono.engine.bootstrap.engine import EngineSettings, connections_of
from unisono.engine.bootstrap.peer_info import Membership

__all__ = ["Identity", "OpenConnections", "next_engine", "next_identity"]


class Identity(msgspec.Struct, frozen=True):
    """What a group keeps about itself, so that the next one can be made from it.

    Attributes:
        generation: 0 for a group that met in a store; each membership that follows has the next number.
    """

    membership: Membership
    settings: EngineSettings
    generation: int = 0


class OpenConnections:
    """Connections to ranks that are out. They stay open as long as this rank takes part in a membership.

    Their end tells the other side that this rank never decides any more, as the end of its process does.
    """

    def __init__(self, descriptors: Iterable[int] = ()) -> None:
        self._descriptors = list(descriptors)

    def add(self, other: OpenConnections) -> None:
        """Take over those of another one. Close all that the other side has ended: nobody looks at them."""
        self._descriptors += other._descriptors
        other._descriptors = []
        ended = select.poll()
        for fd in self._descriptors:
            ended.register(fd, select.POLLRDHUP)
        for fd, _ in ended.poll(0):
            self._descriptors.remove(fd)
            os.close(fd)

    def close(self) -> None:
        """End them."""
        descriptors, self._descriptors = self._descriptors, []
        for fd in descriptors:
            os.close(fd)


def next_identity(identity: Identity, kept: list[int]) -> Identity:
    """The identity of the ranks `kept` of a group, in their order, as its next generation."""
    generation = identity.generation + 1
    peers = [
        msgspec.structs.replace(identity.membership.peers[former], rank=rank)
        for rank, former in enumerate(kept)
    ]
    known = f"{generation} {kept}".encode()
    nonce = hashlib.sha256(identity.membership.nonce + known).digest()
    membership = msgspec.structs.replace(identity.membership, peers=peers, nonce=nonce)
    return Identity(membership, identity.settings, generation)


def next_engine(
    former: _native.Engine, identity: Identity, kept: list[int], rank: int, size: int, timeout_s: float
) -> tuple[_native.Engine, OpenConnections]:
    """This rank's engine in the next membership, and connections to keep open; the former one is left.

    Args:
        identity: of the next membership.  kept: its ranks, as they were numbered.
        rank: of this process in it.  size: of the former one.
        timeout_s: for the other ranks to pass on their ends of the connections.
    """
    membership, settings = identity.membership, identity.settings
    local_ranks = membership.local_ranks(rank)
    region = _region(former, membership, local_ranks)
    for place, other in enumerate(local_ranks):
        # Evicted by a rank that then took over the decision of another one.
        if former.settle(kept[other], Fate.OPEN) == Fate.EVICTED:
            region.give_up(place, "it was evicted")
    here = set(local_ranks)
    pidfds = [_copy(former.pidfd(each)) if other in here else -1 for other, each in enumerate(kept)]
    options = (
        pidfds,
        settings.status_fd,
        membership.cores(rank),
        settings.spin_us,
        membership.machine.segment_bytes,
        settings.placement,
    )
    stay = set(kept)
    wires = former.hand_over([each in stay for each in range(size)], timeout_s)
    held, rest = _sort(former, membership, kept, local_ranks, wires, timeout_s)
    if membership.on_one_host():
        return _native.Engine(region, rank, *options, pids=membership.pids()), rest
    joined = connections_of(membership, rank, *held)
    return _native.Engine(region, rank, *options, joined, membership.pids()), rest


def _region(former: _native.Engine, membership: Membership, local_ranks: list[int]) -> _native.Region:
    if len(local_ranks) == 1:
        return _native.Region(-1, 1, membership.staging_bytes, True)
    region = former.next_region(len(local_ranks))
    if former.zero_copy:
        region.enable_zero_copy()
    return region


def _copy(fd: int) -> int:
    return os.dup(fd) if fd >= 0 else -1


def _sort(
    former: _native.Engine,
    membership: Membership,
    kept: list[int],
    local_ranks: list[int],
    wires: tuple[list[int], list[int], list[int]],
    timeout_s: float,
) -> tuple[list[list[int]], OpenConnections]:
    """The connections by kind and rank, with nothing of the former group in them; and all others.

    A rank may not have passed on its ends, if it was lost since the decision.
    """
    held = [[-1] * len(kept) for _ in wires]
    here = set(local_ranks)
    remote_ranks = [rank for rank in range(len(kept)) if rank not in here]
    passed = [rank for rank in remote_ranks if former.state(kept[rank]) == Contact.NEXT]
    for wire, found in zip(held, wires, strict=True):
        for rank in passed:
            wire[rank], found[kept[rank]] = found[kept[rank]], -1
    marker = hashlib.sha256(membership.nonce + b"marker").digest()
    _native.pass_markers([wire[rank] for wire in held[1:] for rank in passed], marker, timeout_s)
    for rank in set(remote_ranks) - set(passed):
        ended = former.state(kept[rank]) == Contact.ENDED
        for wire in held:
            wire[rank] = _lost(ended)
    return held, OpenConnections(fd for found in wires for fd in found if fd >= 0)


def _lost(ended: bool) -> int:
    """A connection that has ended, for the place of one to a rank that was lost since the decision.

    ended: its process has; otherwise it is only cut off, which reads as a reset.
    """
    ours, theirs = socket.socketpair()
    if not ended:
        ours.send(b"\0")  # a Unix socket that is closed with unread bytes resets its other end
    theirs.close()
    ours.setblocking(False)
    return ours.detach()
