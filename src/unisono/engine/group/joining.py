"""`join`: a newcomer asks the members of a group to take it in. `listening` lists what both write."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec

from unisono.engine.base.validation import listed, text
from unisono.engine.bootstrap.engine import EngineSettings, open_engine
from unisono.engine.bootstrap.forming import Identity
from unisono.engine.bootstrap.peer_info import local_peer_info
from unisono.engine.diagnosis import except_hook
from unisono.engine.environment import env
from unisono.engine.environment.event_log import LOG
from unisono.engine.group.admission import MEET_EACH_S, MEET_S, admission_store
from unisono.engine.group.listening import STORE_S, Invitation
from unisono.engine.group.membership import Former
from unisono.engine.group.native import NativeGroup
from unisono.engine.group.notices import announce
from unisono.engine.group.parent_group import making
from unisono.engine.group.work import seconds
from unisono.engine.store import PrefixStore, TCPStore
from unisono.engine.store.address import address_text
from unisono.errors import AuthenticationError, GroupError, RendezvousError, StoreError, StoreTimeout, message

__all__ = ["join_group"]

POLL_S = 0.5
"""How often a newcomer looks whether its member is alive."""

SILENT_S = 1.0
"""If an answer comes so much too late, the newcomer asks another member."""

_decode_invitation = msgspec.msgpack.Decoder(Invitation).decode
_decode_addresses = msgspec.msgpack.Decoder(list[str]).decode


def join_group(address: str | Sequence[str], timeout: float | timedelta | None) -> NativeGroup:
    """See `unisono.join`."""
    settings = env.read(strict=False)
    except_hook.install(settings)
    LOG.configure(settings)
    timeout_s = seconds(timeout, settings.timeout_s)
    deadline = time.monotonic() + timeout_s
    known = _addresses(address)
    while True:
        invitation, asked = _ask(known, settings, deadline)
        with contextlib.closing(asked):  # until then its end tells the members that this process has ended
            try:
                group = _member(invitation, settings, deadline)
                group._planner.addresses = tuple(address_text(*each) for each in known)
                announce(group)
                return group
            except (
                RendezvousError,
                StoreError,
                GroupError,
            ):  # the members keep their group, may invite again
                if time.monotonic() >= deadline:
                    raise


def _member(invitation: Invitation, settings: env.Settings, deadline: float) -> NativeGroup:
    """The group, once all its ranks have come.

    Raises:
        RendezvousError, StoreError, GroupError: it could not be made, or one of them was lost.
    """
    engine_settings = EngineSettings.of(settings, invitation.host)
    until = min(deadline, time.monotonic() + MEET_S + MEET_EACH_S * invitation.size)
    with contextlib.ExitStack() as stack:
        with making(invitation.size):
            base, keys = admission_store(invitation, engine_settings, until)
            stack.callback(base.close)
            left_s = max(0.1, until - time.monotonic())
            opened = open_engine(
                keys, invitation.rank, invitation.size, timeout_s=left_s, settings=engine_settings
            )
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
            Former((), (None,) * invitation.size),
        )
        stack.pop_all()
    group._planner.admission_store = base
    group._planner.listening = settings.listen
    group.elastic = invitation.elastic
    try:
        group.barrier(timeout=max(0.1, deadline - time.monotonic()))
    except BaseException:
        group.close()
        raise
    return group


def _addresses(address: str | Sequence[str]) -> list[tuple[str, int]]:
    given = address.split(",") if isinstance(address, str) else listed(address, "address")
    found: list[tuple[str, int]] = []
    for each in given:
        host, _, port = text(each, "address").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"join: {each!r} is no address of a group, expected HOST:PORT")
        found.append((host.strip("[]"), int(port)))
    if not found:
        raise ValueError("join: got no address, expected HOST:PORT")
    return found


def _ask(
    known: list[tuple[str, int]], settings: env.Settings, deadline: float
) -> tuple[Invitation, TCPStore]:
    """Wait for an invitation at one of the addresses; `known` gets those that members tell.

    Returns also the connection to the member, which the caller closes.
    """
    info = msgspec.msgpack.encode(local_peer_info(0, 0))
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
            try:
                return _wait(store, info, known, deadline), store
            except StoreError as error:  # in time there was no answer, or that member has ended
                store.close()
                failure = error
            except BaseException:
                store.close()
                raise
        if time.monotonic() >= deadline:
            tried = ", ".join(address_text(*each) for each in known)
            what = f"join: no group took this process in at {tried}"
            remedy = "See whether the group runs, and calls admit(); or raise timeout=."
            observed = str(failure or "").partition(". ")[0]  # its remedy is for the ranks of a start
            raise RendezvousError(message(what, observed=observed, remedy=remedy)) from failure
        time.sleep(0.05)


def _wait(store: TCPStore, info: bytes, known: list[tuple[str, int]], deadline: float) -> Invitation:
    for each in _addresses(_decode_addresses(store.get("addresses"))):
        if each not in known:
            known.append(each)
    number = store.add("joiners", 1)
    store.set(f"client/{number}", store.name)
    store.set(f"joiner/{number}", info)
    while True:
        left_s, asked = deadline - time.monotonic(), time.monotonic()
        try:
            answer = store.get(f"answer/{number}", max(0.05, min(POLL_S, left_s)))
            break
        except StoreTimeout as error:
            if time.monotonic() > asked + POLL_S + SILENT_S:
                raise StoreError("that member does not answer: it is stopped, or cut off") from error
            if left_s <= 0:
                store.set(f"answer/{number}", msgspec.msgpack.encode(Invitation(refused="it has gone")))
                raise
    invitation = _decode_invitation(answer)
    if invitation.refused:
        raise RendezvousError(f"join: {invitation.refused}")
    return invitation
