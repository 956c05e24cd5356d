"""From a group to the next one: what the next one takes over, and the end of the former one."""

from __future__ import annotations

import contextlib
import time

import msgspec

from unisono import _native
from unisono.engine.bootstrap.forming import OpenConnections
from unisono.engine.group.departure import Departure
from unisono.engine.group.membership import Former, MembershipGroup
from unisono.engine.group.shrink import CallMismatch, agree, await_last_calls, departures, form
from unisono.engine.membership.agreement import Agreement
from unisono.engine.membership.eviction import eviction
from unisono.engine.store import PrefixStore
from unisono.errors import Evicted, GroupError, NotSupported

__all__ = ["await_first_barrier", "hand_over_group", "shrink_group"]

BEGIN_S = 10.0
"""So long after the deadline the ranks of a group may still be lost before it has begun."""


def shrink_group(group: MembershipGroup, excluded: tuple[int, ...], deadline: float) -> MembershipGroup:
    """The next group, of the living ranks; this one is closed."""
    if group._identity is None:
        raise NotSupported("shrink: this group has no memory that a next one could continue in")
    engine = group._planner.engine
    await_last_calls(group, excluded)
    try:
        agreement = _agreed(group, excluded, deadline)
    except Evicted:
        if group.rank not in excluded:  # other ranks may still be in an earlier call: close in order
            _drop_connections(engine, group.size)
        raise
    left = departures(group, agreement, group.generation)
    made, identity, kept, rest = form(group, group._identity, agreement, deadline)
    store = None if group._store is None else PrefixStore(f"generation/{identity.generation}", group._store)
    rank = kept.index(group.rank)
    following = group._next(
        made,
        rank,
        store,
        tuple(group._members[former] for former in kept),
        tuple(group._hosts[former] for former in kept),
        group._planner.machine,
        identity,
        Former(left, tuple(kept)),
    )
    following._planner.former_connections.add(rest)
    hand_over_group(group, following)
    following = await_first_barrier(following, deadline)
    if identity.membership.local_ranks(rank)[0] == rank:  # one rank of each host: all share its memory
        engine.discard_region()
    return following


def _agreed(group: MembershipGroup, excluded: tuple[int, ...], deadline: float) -> Agreement:
    """The agreement of one call of shrink. Ranks that were in a call of admit come in another attempt."""
    found = eviction(group._planner.engine, group.rank, group.size)
    if found is not None:  # the others have gone on, or this rank has resigned before
        raise group._planner.evicted("shrink", found.why)
    while True:
        group._attempts += 1
        try:
            return agree(group, excluded, deadline, group._attempts)
        except CallMismatch as refused:
            if not refused.again:
                raise
            group._attempts = max(group._attempts, refused.newest - 1)


def _drop_connections(engine: _native.Engine, size: int) -> None:
    """Leave without a close message: no other rank waits for this one."""
    with contextlib.suppress(RuntimeError):  # it has left before
        wires = engine.hand_over([False] * size, 0.0)
        OpenConnections(fd for wire in wires for fd in wire if fd >= 0).close()


def hand_over_group(group: MembershipGroup, following: MembershipGroup) -> None:
    """Close a group whose next one is made, which takes over what both need."""
    planner, after = group._planner, following._planner
    after.former_connections.add(planner.former_connections)
    after.listener, planner.listener = planner.listener, None
    after.listening, after.addresses = planner.listening, planner.addresses
    after.leave_callbacks, planner.leave_callbacks = planner.leave_callbacks + after.leave_callbacks, []
    if after.admission_store is None:
        after.admission_store, planner.admission_store = planner.admission_store, None
    following.elastic = group.elastic
    following._loop = group._loop
    rendezvous = group._hand_over()
    if rendezvous is not None:
        after.leave_callbacks.append(rendezvous.close)


def await_first_barrier(group: MembershipGroup, deadline: float) -> MembershipGroup:
    """The group, once all its ranks have come. If one is lost before, the next group without it.

    The former group is closed already: also behind the deadline the caller needs a group that it can use.
    """
    try:
        group.barrier(timeout=max(1.0, deadline - time.monotonic()))
        return group
    except GroupError:
        if time.monotonic() > deadline + BEGIN_S:
            group.close()
            raise
    except BaseException:  # such as Ctrl-C: no one else has this group
        group.close()
        raise
    later = shrink_group(group, (), max(deadline, time.monotonic() + 1.0))
    own = group.previous_ranks
    ranks = tuple(None if each is None else own[each] for each in later.previous_ranks)
    left = (_as_numbered_before(each, own, group.generation - 1) for each in later.left)
    later._former = Former((*group.left, *left), ranks)
    return later


def _as_numbered_before(one: Departure, former: tuple[int | None, ...], generation: int) -> Departure:
    """A rank that left a group which no program has seen, by its number in the group before that."""
    rank = former[one.rank]
    return one if rank is None else msgspec.structs.replace(one, rank=rank, generation=generation)
