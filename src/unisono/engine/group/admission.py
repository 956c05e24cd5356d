"""`Group.listen`, `Group.waiting` and `Group.admit`: the members take newcomers in.

`admit` makes the next group beside this one. The ranks then agree that all of them have made it, by the rules
of `shrink`, and only then leave this one. If a rank could not make it, all of them keep this one.
"""

from __future__ import annotations

import contextlib
import os
import time

import msgspec

from unisono.engine.base.checking import text, whole
from unisono.engine.bootstrap.engine import EngineSettings, Opened, open_engine
from unisono.engine.bootstrap.forming import Identity
from unisono.engine.bootstrap.interfaces import local_address
from unisono.engine.group.listening import Invitation, Listener, Report
from unisono.engine.group.membership import Former, MembershipGroup
from unisono.engine.group.shrink import agree
from unisono.engine.group.succession import begun, succeed
from unisono.engine.store import PrefixStore, TCPStore
from unisono.engine.store.address import shown
from unisono.errors import RendezvousError, StoreError

__all__ = ["addresses_of", "admitted", "look_for_newcomers", "meeting"]


class Newcomers(msgspec.Struct, frozen=True):
    """Who waits, the same on all ranks: the ranks' reports, and (rank, number) of those that are taken in."""

    reports: tuple[Report, ...]
    taken: tuple[tuple[int, int], ...]


_decode_report = msgspec.msgpack.Decoder(Report).decode


# ---- members -------------------------------------------------------------------------------------------


def addresses_of(group: MembershipGroup, address: str, port: int) -> tuple[str, ...]:
    """Listen on the first rank of each host, and return the addresses, in the order of ranks."""
    _listen(group, text(address, "address"), whole(port, "port", 0, 65535))
    reports = _gather(group, ())
    found = [shown(*each.address) for each in reports if each.address is not None]
    if group._planner.listener is not None:
        group._planner.listener.publish(found)
    return tuple(found)


def _listen(group: MembershipGroup, address: str = "", port: int = 0) -> None:
    identity = group._identity
    assert identity is not None
    first = identity.membership.local_ranks(group.rank)[0]
    if group.rank == first and group._planner.listener is None:
        network = identity.settings.network
        host = address or local_address(identity.settings.master, network)
        layout = identity.membership.cards[group.rank].layout
        group._planner.listener = Listener(host, port, network, layout)
    group._planner.listening = True


def _gather(group: MembershipGroup, waiting: tuple[int, ...]) -> tuple[Report, ...]:
    listener = group._planner.listener
    mine = Report() if listener is None else Report(listener.address, os.urandom(8).hex(), waiting)
    found = group._gather_all("all_gather_object", msgspec.msgpack.encode(mine), False, None)
    return tuple(_decode_report(each) for each in found)


def look_for_newcomers(group: MembershipGroup, maximum: int | None) -> Newcomers:
    """Who waits; the same answer on every rank, which all call it."""
    if not group._planner.listening:
        raise RuntimeError(f"group {group.name!r} does not listen: call listen() on every rank first")
    _listen(group)
    listener = group._planner.listener
    reports = _gather(group, () if listener is None else listener.waiting())
    everybody = [(rank, number) for rank, each in enumerate(reports) for number in each.waiting]
    room = len(everybody) if maximum is None else max(0, maximum - group.size)
    if listener is not None:
        listener.publish([shown(*each.address) for each in reports if each.address is not None])
    return Newcomers(reports, tuple(everybody[:room]))


def admit(
    group: MembershipGroup, newcomers: Newcomers, deadline: float
) -> tuple[Opened, Identity, TCPStore, PrefixStore, tuple[int, ...]]:
    """Make the next group with the newcomers, and agree that all ranks have made it.

    Returns its engine, its identity, the store that it met in, its part of that, and its world ranks.

    Raises:
        RendezvousError: a rank could not make it; this group goes on.  Evicted: it went on without this rank.
    """
    identity = group._identity
    assert identity is not None
    home = next(each for each in newcomers.reports if each.address is not None)
    assert home.address is not None
    members = (
        *group._members,
        *range(max(group._members) + 1, max(group._members) + 1 + len(newcomers.taken)),
    )
    settings = msgspec.structs.replace(identity.settings, master=home.address[0])
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
    listener = group._planner.listener
    for place, (rank, number) in enumerate(newcomers.taken):
        if rank == group.rank and listener is not None:
            listener.answer(number, msgspec.structs.replace(offer, rank=group.size + place))
    opened, failure = None, ""
    with contextlib.ExitStack() as stack:
        try:
            base, keys = meeting(offer, settings, deadline)
            stack.callback(base.close)
            left_s = max(0.1, deadline - time.monotonic())
            opened = open_engine(keys, group.rank, offer.size, timeout_s=left_s, settings=settings)
            stack.callback(opened.engine.leave)
        except (RendezvousError, StoreError, OSError) as error:
            failure = f"{type(error).__name__}: {error}"
        group._attempts += 1
        try:
            agree(
                group, (), deadline, group._attempts, home.keys if opened else f"rank {group.rank}: {failure}"
            )
        except ValueError as error:
            why = failure or str(error)
            raise RendezvousError(
                f"admit: not all ranks could make the next group, so this one goes on: {why}"
            ) from None
        assert opened is not None
        stack.pop_all()
    return opened, Identity(opened.membership, settings, offer.generation), base, keys, members


def meeting(offer: Invitation, settings: EngineSettings, deadline: float) -> tuple[TCPStore, PrefixStore]:
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
    following._planner.ends.append(base.close)
    succeed(group, following)
    return begun(following, deadline)
