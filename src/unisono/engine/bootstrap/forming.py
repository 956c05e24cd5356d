"""Makes the engine of the next membership from that of the former one: no store, no listening socket.

On a host every rank maps the next part of the same memory file. Between hosts the connections are passed on:
a control frame and a marker in each stream separate the bytes of the two memberships.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket

import msgspec

from unisono import _native
from unisono._native import Contact, Fate
from unisono.engine.bootstrap.engine import EngineSettings, connections_of
from unisono.engine.bootstrap.membership import Membership

__all__ = ["Identity", "next_engine", "next_identity"]


class Identity(msgspec.Struct, frozen=True):
    """What a group keeps about itself, so that the next one can be made from it.

    Attributes:
        generation: 0 for a group that met in a store; each membership that follows has the next number.
    """

    membership: Membership
    settings: EngineSettings
    generation: int = 0


def next_identity(identity: Identity, kept: list[int]) -> Identity:
    """The identity of the ranks `kept` of a group, in their order, as its next generation."""
    generation = identity.generation + 1
    cards = [
        msgspec.structs.replace(identity.membership.cards[former], rank=rank)
        for rank, former in enumerate(kept)
    ]
    known = f"{generation} {kept}".encode()
    nonce = hashlib.sha256(identity.membership.nonce + known).digest()
    membership = msgspec.structs.replace(identity.membership, cards=cards, nonce=nonce)
    return Identity(membership, identity.settings, generation)


def next_engine(
    former: _native.Engine, identity: Identity, kept: list[int], rank: int, size: int, timeout_s: float
) -> _native.Engine:
    """The engine of this rank in the next membership; the former one is left.

    Args:
        identity: of the next membership.  kept: its ranks, as they were numbered.
        rank: of this process in it.  size: of the former one.
        timeout_s: for the other ranks to pass on their ends of the connections.
    """
    membership, settings = identity.membership, identity.settings
    local_ranks = membership.local_ranks(rank)
    region = _region(former, membership, local_ranks)
    for place, other in enumerate(local_ranks):
        if (
            former.settle(kept[other], Fate.OPEN) == Fate.EVICTED
        ):  # by a rank that then took over the decision
            region.give_up(place, "it was evicted")
    pidfds = [_copy(former.pidfd(each)) if other in local_ranks else -1 for other, each in enumerate(kept)]
    options = (
        pidfds,
        settings.status_fd,
        membership.cores(rank),
        settings.spin_us,
        membership.machine.segment_bytes,
        settings.placement,
    )
    held = _hand_over(former, membership, kept, size, local_ranks, timeout_s)
    if membership.on_one_host():
        return _native.Engine(region, rank, *options)
    return _native.Engine(region, rank, *options, connections_of(membership, rank, *held))


def _region(former: _native.Engine, membership: Membership, local_ranks: list[int]) -> _native.Region:
    if len(local_ranks) == 1:
        return _native.Region(-1, 1, membership.staging_bytes, True)
    region = former.next_region(len(local_ranks))
    if former.lending:
        region.allow_lending()
    return region


def _copy(fd: int) -> int:
    return os.dup(fd) if fd >= 0 else -1


def _hand_over(
    former: _native.Engine,
    membership: Membership,
    kept: list[int],
    size: int,
    local_ranks: list[int],
    timeout_s: float,
) -> tuple[list[int], list[int], list[int]]:
    """The connections by rank, with nothing of the former membership in them."""
    wires = former.hand_over([each in kept for each in range(size)], timeout_s)
    size = len(kept)
    if membership.on_one_host():
        return [], [], []
    far = [rank for rank in range(size) if rank not in local_ranks]
    held = [[-1] * size for _ in wires]
    try:
        for wire, found in zip(held, wires, strict=True):
            for rank in far:
                wire[rank] = found[kept[rank]]
        marker = hashlib.sha256(membership.nonce + b"marker").digest()
        alive = [rank for rank in far if held[0][rank] >= 0]
        _native.pass_markers([wire[rank] for wire in held[1:] for rank in alive], marker, timeout_s)
        for rank in far:
            if held[0][rank] < 0:
                ended = former.state(kept[rank]) == Contact.ENDED
                for wire in held:
                    wire[rank] = _lost(ended, wire[rank])
    except BaseException:
        for wire in held:
            for fd in wire:
                with contextlib.suppress(OSError):
                    os.close(fd)
        raise
    return held[0], held[1], held[2]


def _lost(ended: bool, fd: int) -> int:
    """A connection that has ended, for the place of one to a rank that was lost since the decision.

    ended: its process has; otherwise it is only cut off, which reads as a reset.
    """
    if fd >= 0:
        os.close(fd)
    ours, theirs = socket.socketpair()
    if not ended:
        ours.send(b"\0")  # a Unix socket that is closed with unread bytes resets its other end
    theirs.close()
    ours.setblocking(False)
    return ours.detach()
