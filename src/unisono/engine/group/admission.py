"""`Group.listen`, `Group.waiting` and `Group.admit`: the members take newcomers in.

`admit` makes the next group beside this one. The ranks then agree that all of them have made it, by the rules
of `shrink`, and only then leave this one. If a rank could not make it, all of them keep this one.
"""

from __future__ import annotations

import contextlib
import os
import time

import msgspec

from unisono.engine.base.validation import text, whole
from unisono.engine.bootstrap.engine import EngineSettings, EngineSetup, open_engine
from unisono.engine.bootstrap.forming import Identity
from unisono.engine.bootstrap.interfaces import local_address
from unisono.engine.group.listening import Invitation, Listener, Report
from unisono.engine.group.membership import Former, MembershipGroup
from unisono.engine.group.notices import announce
from unisono.engine.group.parent_group import ParentGroup
from unisono.engine.group.shrink import CallMismatch, agree, refuse
from unisono.engine.group.succession import await_first_barrier, hand_over_group
from unisono.engine.store import PrefixStore, TCPStore
from unisono.engine.store.address import address_text
from unisono.engine.store.liveness_store import LivenessStore
from unisono.errors import GroupError, RendezvousError, StoreError, UnisonoError

__all__ = ["addresses_of", "admission_store", "admitted", "listen_again", "look_for_newcomers"]

MEET_S = 5.0
"""For the members and the newcomers to meet; a newcomer that is stopped meanwhile delays them no longer."""

MEET_EACH_S = 0.1
"""More of it for each rank: many ranks share few cores."""


class Newcomers(msgspec.Struct, frozen=True):
    """Who waits, the same on all ranks: the ranks' reports, and (rank, number) of those that are taken in."""

    reports: tuple[Report, ...]
    taken: tuple[tuple[int, int], ...]


_decode_report = msgspec.msgpack.Decoder(Report).decode


# ---- members -------------------------------------------------------------------------------------------


def addresses_of(group: MembershipGroup, address: str, port: int) -> tuple[str, ...]:
    """Listen on the first rank of each host, and return the addresses, in the order of ranks."""
    group._planner.listening = text(address, "address"), whole(port, "port", 0, 65535)
    _listen(group)
    _publish(group, _gather(group, ()))
    return group._planner.addresses


def _listen(group: MembershipGroup) -> None:
    """Listen, if this is the first rank of its host and does not yet."""
    identity, planner = group._identity, group._planner
    assert identity is not None
    assert planner.listening is not None
    if planner.listener is not None or group.rank != identity.membership.local_ranks(group.rank)[0]:
        return
    address, port = planner.listening
    network = identity.settings.network
    host = address or local_address(identity.settings.master, network)
    layout = identity.membership.peers[group.rank].layout
    ports = _ports(group, host, port)
    for each in ports:
        try:
            planner.listener = Listener(host, each, network, layout)
            return
        except StoreError:  # such as an evicted rank that still has that port
            if each == ports[-1]:
                raise


def _ports(group: MembershipGroup, host: str, port: int) -> list[int]:
    """Where this rank may listen, the best first: newcomers that wait know the port of a lost rank only."""
    if group.generation == 0:
        return [port]
    known = (each.rpartition(":") for each in group._planner.addresses)
    former = [int(number) for name, _, number in known if name.strip("[]") == host]
    return [*([port] if port else former), 0]


def listen_again(group: MembershipGroup) -> None:
    """After a change: listen in place of a rank that is gone. If that fails, `waiting` tries again."""
    if group._planner.listening is not None:
        with contextlib.suppress(StoreError, OSError):
            _listen(group)


def _publish(group: MembershipGroup, reports: tuple[Report, ...]) -> None:
    """Tell newcomers, and the launcher, where all ranks listen."""
    planner = group._planner
    found = tuple(address_text(*each.address) for each in reports if each.address is not None)
    if planner.listener is not None:
        planner.listener.publish(list(found))
    if found != planner.addresses:
        planner.addresses = found
        announce(group)


def _gather(
    group: MembershipGroup, waiting: tuple[int, ...], maximum: int | None = None
) -> tuple[Report, ...]:
    listener, least = group._planner.listener, 0 if group._loop is None else group._loop.minimum
    mine = Report(least=least, most=maximum or 0)
    if listener is not None:
        mine = Report(listener.address, os.urandom(8).hex(), waiting, least, maximum or 0)
    found = group._gather_all("all_gather_object", msgspec.msgpack.encode(mine), False, None)
    return tuple(_decode_report(each) for each in found)


def look_for_newcomers(group: MembershipGroup, maximum: int | None) -> Newcomers:
    """Who waits; the same answer on every rank, which all call it. The smallest maximum counts."""
    if group._planner.listening is None:
        raise RuntimeError(f"group {group.name!r} does not listen: call listen() on every rank first")
    _listen(group)
    listener = group._planner.listener
    reports = _gather(group, () if listener is None else listener.waiting(), maximum)
    _publish(group, reports)
    if group._loop is not None:
        group._loop.minimum = max(1, *(each.least for each in reports))
    everybody = [(rank, number) for rank, each in enumerate(reports) for number in each.waiting]
    most = min((each.most for each in reports if each.most), default=None)
    room = len(everybody) if most is None else max(0, most - group.size)
    return Newcomers(reports, tuple(everybody[:room]))


def admit(
    group: MembershipGroup, newcomers: Newcomers, deadline: float
) -> tuple[EngineSetup, Identity, TCPStore, PrefixStore, tuple[int, ...]]:
    """Make the next group with the newcomers, and agree that all ranks have made it.

    Returns its engine, its identity, the store that it met in, its part of that, and its world ranks.

    Raises:
        RendezvousError: a rank could not make it; this group goes on.  Evicted: it went on without this rank.
    """
    identity, (home, offer) = group._identity, _invited(group, newcomers)
    assert identity is not None
    settings = msgspec.structs.replace(identity.settings, master=offer.host)
    opened, failure = None, ""
    with contextlib.ExitStack() as stack:
        until = min(deadline, time.monotonic() + MEET_S + MEET_EACH_S * offer.size)
        try:
            base, keys = admission_store(offer, settings, until)
            stack.callback(base.close)
            opened = _opened(group, newcomers, offer, keys, settings, until)
            stack.callback(opened.engine.leave)
        except GroupError:  # this group has a fault: all its ranks see it
            raise
        except (UnisonoError, OSError, MemoryError) as error:
            failure = f"{type(error).__name__}: {error}"
        group._attempts += 1
        if opened is None:  # it must not decide, also not when it is left alone
            refuse(group, group._attempts, f"rank {group.rank}: {failure}")
            raise _not_made(group, failure)
        try:
            agree(group, (), deadline, group._attempts, home.keys)
        except CallMismatch as refused:
            group._attempts = max(group._attempts, refused.newest - 1)
            raise _not_made(group, str(refused)) from None
        stack.pop_all()
    return opened, Identity(opened.membership, settings, offer.generation), base, keys, offer.members


def _not_made(group: MembershipGroup, why: str) -> GroupError | RendezvousError:
    """The error of an admission that did not come about."""
    engine = group._planner.engine
    if engine.faulted:
        return group._planner.failure("admit", group.timeout_s, engine)
    return RendezvousError(f"admit: not all ranks could make the next group, so this one goes on: {why}")


def _invited(group: MembershipGroup, newcomers: Newcomers) -> tuple[Report, Invitation]:
    """Invite those that wait at this rank; returns where the next group meets, and the invitation."""
    identity, listener = group._identity, group._planner.listener
    assert identity is not None
    home = next(each for each in newcomers.reports if each.address is not None)
    assert home.address is not None
    first = max(group._members) + 1
    members = (*group._members, *range(first, first + len(newcomers.taken)))
    offer = Invitation(
        *home.address,
        home.keys,
        0,
        len(members),
        identity.generation + 1,
        group.name,
        group.timeout_s,
        group.reproducible,
        group.elastic,
        members,
    )
    for place, (rank, number) in enumerate(newcomers.taken):
        if rank == group.rank and listener is not None:
            listener.answer(number, msgspec.structs.replace(offer, rank=group.size + place))
    return home, offer


def _opened(
    group: MembershipGroup,
    newcomers: Newcomers,
    offer: Invitation,
    keys: PrefixStore,
    settings: EngineSettings,
    until: float,
) -> EngineSetup:
    """This member's engine in the next group; it is given up when a member or a newcomer is lost.

    Raises:
        GroupError: this group has a fault, or gets one here.  RendezvousError: a newcomer has gone.
    """
    listener = group._planner.listener
    parent = ParentGroup(group._planner, "admit", range(group.size))
    invited = [number for rank, number in newcomers.taken if rank == group.rank]

    def check() -> None:
        parent.check()
        for number in invited:
            if listener is not None and listener.gone(number):
                raise RendezvousError(f"a newcomer that waited at rank {group.rank} has gone")

    try:
        watched = LivenessStore(keys, check)
        left_s = max(0.1, until - time.monotonic())
        return open_engine(watched, group.rank, offer.size, timeout_s=left_s, settings=settings)
    except GroupError:
        parent.abort()
        raise


def admission_store(
    offer: Invitation, settings: EngineSettings, deadline: float
) -> tuple[TCPStore, PrefixStore]:
    """The store in which the ranks of the next group meet, and its part for that group."""
    network = settings.network
    left_s = max(0.1, deadline - time.monotonic())
    base = TCPStore(offer.host, offer.port, token=network.token, tls=network.tls, timeout_s=left_s)
    return base, PrefixStore(f"admit/{offer.keys}", base)


def admitted(group: MembershipGroup, newcomers: Newcomers, deadline: float) -> MembershipGroup:
    """The next group, with the newcomers; this one is closed."""
    opened, identity, base, keys, members = admit(group, newcomers, deadline)
    following = group._next(
        opened.engine,
        group.rank,
        PrefixStore("group", keys),
        members,
        opened.hosts,
        opened.machine,
        identity,
        Former((), (*range(group.size), *(None for _ in newcomers.taken))),
    )
    following._planner.admission_store = base
    hand_over_group(group, following)
    return await_first_barrier(following, deadline)
