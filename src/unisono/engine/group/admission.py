"""`Group.listen`, `Group.admit` and `join`: newcomers meet a group in a store that its members serve.

The first rank of each host serves one. In it:

    addresses      of all such stores: a newcomer reads it at once, and goes to another one if its own ends
    joiners        a counter; joiner/3 is the card of a newcomer, answer/3 the `Invitation` that it gets
    admit/...      where the ranks of the next group meet, as in bootstrap/

`admit` makes the next group beside this one. The ranks then agree that all of them have made it, by the rules
of `shrink`, and only then leave this one. If a rank could not make it, all of them keep this one.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from unisono.engine.base.checking import text, whole
from unisono.engine.bootstrap.engine import EngineSettings, Opened, open_engine
from unisono.engine.bootstrap.forming import Identity
from unisono.engine.bootstrap.interfaces import local_address
from unisono.engine.bootstrap.membership import Build, write_card
from unisono.engine.diagnosis import uncaught
from unisono.engine.environment import env
from unisono.engine.group.parent import making
from unisono.engine.group.shrink import agree
from unisono.engine.group.work import seconds
from unisono.engine.store import PrefixStore, StoreServer, TCPStore
from unisono.engine.store.address import shown
from unisono.errors import AuthenticationError, GroupError, RendezvousError, StoreError, StoreTimeout, message

if TYPE_CHECKING:
    from datetime import timedelta

    from unisono.engine.group.native import NativeGroup

__all__ = ["Listener", "Newcomers", "addresses_of", "admit", "join_group", "look_for_newcomers"]

STORE_S = 5.0
"""For one call to a store of a member, which answers at once or has ended."""

POLL_S = 0.5
"""How often a newcomer looks whether its member is alive."""


class Invitation(msgspec.Struct, frozen=True, array_like=True):
    """What a newcomer is told: where the next group meets, and as which rank of it. refused: or why not."""

    host: str = ""
    port: int = 0
    keys: str = ""
    rank: int = 0
    size: int = 0
    generation: int = 0
    name: str = ""
    timeout_s: float = 0.0
    reproducible: bool = False
    elastic: bool = False
    members: tuple[int, ...] = ()
    refused: str = ""


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What each rank knows before an admission: its own store, if it serves one, and who waits there."""

    address: tuple[str, int] | None = None
    keys: str = ""
    waiting: tuple[int, ...] = ()


class Newcomers(msgspec.Struct, frozen=True):
    """Who waits, the same on all ranks: the ranks' reports, and (rank, number) of those that are taken in."""

    reports: tuple[Report, ...]
    taken: tuple[tuple[int, int], ...]


_decode_invitation = msgspec.msgpack.Decoder(Invitation).decode
_decode_build = msgspec.msgpack.Decoder(Build).decode
_decode_addresses = msgspec.msgpack.Decoder(list[str]).decode
_decode_report = msgspec.msgpack.Decoder(Report).decode


class Listener:
    """The store that this rank serves for newcomers."""

    def __init__(self, host: str, port: int, settings: env.Settings, layout: int) -> None:
        self._server = StoreServer(host, port, token=settings.token, tls=settings.tls)
        self.address = self._server.host, self._server.port
        self._layout = layout
        self._settings = settings
        self._store = self.connect(STORE_S)
        self._done = 0

    def connect(self, timeout_s: float) -> TCPStore:
        """A client of it."""
        settings = self._settings
        return TCPStore(*self.address, token=settings.token, tls=settings.tls, timeout_s=timeout_s)

    def publish(self, addresses: list[str]) -> None:
        """Tell newcomers where else they may ask."""
        self._store.set("addresses", msgspec.msgpack.encode(addresses))

    def waiting(self) -> tuple[int, ...]:
        """The numbers of those that wait. A newcomer of another build is refused here."""
        numbers = []
        for number in range(self._done + 1, self._store.add("joiners", 0) + 1):
            card = self._store.peek(f"joiner/{number}")
            if card is None:
                continue
            if refused := self._refusal(card):
                warnings.warn(refused, stacklevel=2)
                self.answer(number, Invitation(refused=refused))
            elif not self._store.check([f"answer/{number}"]):
                numbers.append(number)
        return tuple(numbers)

    def _refusal(self, card: bytes) -> str:
        try:
            build = _decode_build(card)
        except msgspec.DecodeError:
            build = Build(0, 0, "unknown")
        if build.layout == self._layout:
            return ""
        return message(
            f"a newcomer of host {build.name} runs another build of Unisono than the group",
            observed=f"version {build.layout or 'unknown'}",
            expected=str(self._layout),
            remedy="Install the same build on all hosts.",
        )

    def answer(self, number: int, invitation: Invitation) -> None:
        """Invite a newcomer, or refuse it."""
        self._store.set(f"answer/{number}", msgspec.msgpack.encode(invitation))

    def close(self) -> None:
        """Stop listening."""
        self._store.close()
        self._server.close()


# ---- members -------------------------------------------------------------------------------------------


def addresses_of(group: NativeGroup, address: str, port: int) -> tuple[str, ...]:
    """Listen on the first rank of each host, and return the addresses, in the order of ranks."""
    _listen(group, text(address, "address"), whole(port, "port", 0, 65535))
    reports = _gather(group, ())
    found = [shown(*each.address) for each in reports if each.address is not None]
    if group._planner.listener is not None:
        group._planner.listener.publish(found)
    return tuple(found)


def _listen(group: NativeGroup, address: str = "", port: int = 0) -> None:
    identity = group._identity
    assert identity is not None
    first = identity.membership.local_ranks(group.rank)[0]
    if group.rank == first and group._planner.listener is None:
        network = identity.settings.network
        host = address or local_address(identity.settings.master, network)
        layout = identity.membership.cards[group.rank].layout
        group._planner.listener = Listener(host, port, network, layout)
    group._planner.listening = True


def _gather(group: NativeGroup, waiting: tuple[int, ...]) -> tuple[Report, ...]:
    listener = group._planner.listener
    mine = Report() if listener is None else Report(listener.address, os.urandom(8).hex(), waiting)
    found = group._gather_all("all_gather_object", msgspec.msgpack.encode(mine), False, None)
    return tuple(_decode_report(each) for each in found)


def look_for_newcomers(group: NativeGroup, maximum: int | None) -> Newcomers:
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
    group: NativeGroup, newcomers: Newcomers, deadline: float
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
            base, keys = _meeting(offer, settings, deadline)
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


def _meeting(offer: Invitation, settings: EngineSettings, deadline: float) -> tuple[TCPStore, PrefixStore]:
    network = settings.network
    left_s = max(0.1, deadline - time.monotonic())
    base = TCPStore(offer.host, offer.port, token=network.token, tls=network.tls, timeout_s=left_s)
    return base, PrefixStore(f"admit/{offer.keys}", base)


# ---- newcomers -----------------------------------------------------------------------------------------


def join_group(address: str | Sequence[str], timeout: float | timedelta | None) -> NativeGroup:
    """See `unisono.join`."""
    from unisono.engine.group.native import Former, NativeGroup

    settings = env.read(strict=False)
    uncaught.install(settings)
    timeout_s = seconds(timeout, settings.timeout_s)
    deadline = time.monotonic() + timeout_s
    known = _addresses(address)
    while True:
        invitation = _ask(known, settings, deadline)
        engine_settings = EngineSettings.of(settings, invitation.host)
        try:
            with making(invitation.size):
                base, keys = _meeting(invitation, engine_settings, deadline)
                left_s = max(0.1, deadline - time.monotonic())
                opened = open_engine(
                    keys, invitation.rank, invitation.size, timeout_s=left_s, settings=engine_settings
                )
        except (RendezvousError, StoreError):
            if time.monotonic() >= deadline:
                raise
            continue  # the members keep their group, and may invite again
        former = range(invitation.size)
        group = NativeGroup(
            opened.engine,
            invitation.rank,
            invitation.size,
            invitation.name,
            invitation.timeout_s,
            PrefixStore("group", keys),
            None,
            invitation.members,
            invitation.reproducible,
            opened.hosts,
            opened.machine,
            settings,
            Identity(opened.membership, engine_settings, invitation.generation),
            Former((), tuple(None for _ in former)),
        )
        group._planner.ends.append(base.close)
        group._planner.listening = True
        group.elastic = invitation.elastic
        try:
            group.barrier(timeout=max(0.1, deadline - time.monotonic()))
            return group
        except GroupError:  # the members could not all make it
            group.close()
            if time.monotonic() >= deadline:
                raise


def _addresses(address: str | Sequence[str]) -> list[tuple[str, int]]:
    given = [address] if isinstance(address, str) else list(address)
    found = []
    for each in given:
        host, _, port = text(each, "address").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"join: {each!r} is no address of a group, expected HOST:PORT")
        found.append((host.strip("[]"), int(port)))
    if not found:
        raise ValueError("join: got no address, expected HOST:PORT")
    return found


def _ask(known: list[tuple[str, int]], settings: env.Settings, deadline: float) -> Invitation:
    """Wait for an invitation at one of the addresses; `known` gets those that members tell."""
    card = msgspec.msgpack.encode(write_card(0, 0))
    failure: BaseException | None = None
    while True:
        for host, port in list(known):
            left_s = min(STORE_S, max(0.1, deadline - time.monotonic()))
            try:
                options: Any = {"token": settings.token, "tls": settings.tls, "timeout_s": left_s}
                store = TCPStore(host, port, retry=False, **options)
            except AuthenticationError:
                raise
            except StoreError as error:
                failure = error
                continue
            with contextlib.closing(store):
                try:
                    return _wait(store, card, known, deadline)
                except StoreTimeout as error:
                    failure = error
                except StoreError as error:  # that member has ended
                    failure = error
        if time.monotonic() >= deadline:
            tried = ", ".join(shown(*each) for each in known)
            what = f"join: no group took this process in at {tried}"
            remedy = "See whether the group runs, and calls admit(); or raise timeout=."
            raise RendezvousError(message(what, observed=str(failure or ""), remedy=remedy)) from failure
        time.sleep(0.05)


def _wait(store: TCPStore, card: bytes, known: list[tuple[str, int]], deadline: float) -> Invitation:
    for each in _addresses(_decode_addresses(store.get("addresses"))):
        if each not in known:
            known.append(each)
    number = store.add("joiners", 1)
    store.set(f"joiner/{number}", card)
    while True:
        left_s = deadline - time.monotonic()
        try:
            answer = store.get(f"answer/{number}", max(0.05, min(POLL_S, left_s)))
            break
        except StoreTimeout:
            if left_s <= 0:
                store.set(f"answer/{number}", msgspec.msgpack.encode(Invitation(refused="it has gone")))
                raise
    invitation = _decode_invitation(answer)
    if invitation.refused:
        raise RendezvousError(f"join: {invitation.refused}")
    return invitation
