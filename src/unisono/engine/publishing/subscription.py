"""`subscribe`: the side that takes the arrays. All of one `get` is of one version."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

from unisono.engine.base.closing import Closing
from unisono.engine.base.validation import text, whole
from unisono.engine.environment import env
from unisono.engine.group.group import Group
from unisono.engine.group.native import NativeGroup
from unisono.engine.group.work import seconds
from unisono.engine.publishing import meeting
from unisono.engine.publishing.boxes import Box, PieceTransfer, transfers
from unisono.engine.publishing.cuts import Buffers, Cut, prepared
from unisono.engine.publishing.pieces import source_of
from unisono.errors import GroupClosed, Timeout


def subscribe(
    address: str,
    name: str,
    *,
    cut: Cut | None = None,
    into: Any = None,
    group: Group | None = None,
    codec: str | None = None,
    timeout: float | timedelta | None = None,
) -> Subscription:
    """Take arrays that another job publishes, in a cut of one's own. All ranks of the group call it.

    Args:
        address: "HOST:PORT", the publisher's `address`. If nobody listens there yet, it waits.
        cut: None: each rank takes all arrays whole. Or pattern -> dimension, as `{"*.weight": 0}`: arrays
            that a pattern matches (the first one counts) are cut along it into as many parts as the group
            has ranks, as `torch.chunk` cuts; others are whole. Or a function of (name, shape) that gives this
            rank's slices, or None where it does not take the array.
        into: what is filled, instead of new arrays: as the arrays of `publish`, so a `Run`, too.
        group: the ranks that take the same version, each its part; None: this process alone.
        codec: float32 values are encoded between hosts, such as "bf16"; see docs/codecs.md.
        timeout: seconds for the meeting; default UNISONO_TIMEOUT_S, 300 s. It is also that of `get`.
    Raises:
        ValueError: the publication has another name, or no such array, or it has another shape or type; no
            byte of an array has moved.
        AuthenticationError: the publisher has another token.  StoreTimeout: nobody publishes there in time.
        RendezvousError: the ranks of both sides could not connect.
    Example: subscription = un.subscribe("host-a:29600", "policy", cut={"*": 0}, group=world)
        version, arrays = subscription.get()
    """
    return Subscription(address, name, cut, into, group, codec, timeout)


class NoNewVersion(Timeout):
    """There was no newer version in time; the subscription goes on."""


class Subscription(Closing):
    """Arrays of another job, in this rank's cut. Made by `subscribe`.

    There are two sets of arrays, unless `into` was given: a `get` fills the set that the last one did not
    return. So what a `get` returned stays as it is during the next `get`, not during the one after.

    Attributes:
        name: of the publication.  version: of the last `get`; 0: none yet.
    """

    def __init__(
        self,
        address: str,
        name: str,
        cut: Cut | None,
        into: Any,
        group: Group | None,
        codec: str | None,
        timeout: float | timedelta | None,
    ) -> None:
        ranks = source_of(into)[1] if into is not None else None
        self._own = meeting.side(group, ranks)
        self.name, self.version, self.closed, self._asks, self._place = name, 0, False, 0, -1
        self._timeout_s = seconds(timeout, env.read(strict=False).timeout_s)
        deadline = time.monotonic() + self._timeout_s
        self._codec, self._into = codec, into

        def prepare() -> Any:
            meeting.codec_of(None if codec is None else text(codec, "codec"), "<f4")
            host, number = _address(address)
            with meeting.store_at((host, number), self._timeout_s, retry=True) as store:
                left_s = max(0.1, deadline - time.monotonic())
                self._about = meeting.decode_description(store.get("about", left_s))
                if self._about.name != text(name, "name"):
                    raise ValueError(f"{address} publishes {self._about.name!r}, not {name!r}")
                self._wanted, self._sets = prepared(self._about, cut, into, self._own.rank, self._own.size)
            return host, number

        place: tuple[str, int] = meeting.on_all(self._own, "subscribe", prepare)[self._own.rank]
        senders, size = len(self._about.held), self._own.size
        store = meeting.store_at(place, self._timeout_s)
        with store:
            ticket = [store.add("tickets", 1)] if self._own.rank == 0 else []
            if ticket:
                store.set(f"came/{ticket[0]}", str(size))
            number = self._own.all_gather_object(ticket)[0][0]
            left_s = max(0.1, deadline - time.monotonic())
            self._group: NativeGroup = meeting.meet(
                store, name, number, senders + self._own.rank, senders + size, place[0], left_s
            )
            self._group.timeout_s = self._timeout_s
            window = self._group.window(None)
        self._mapped = [window.shared(rank) for rank in range(senders)]
        self._plan()
        self._filled = [0] * len(self._sets)  # the version that each set has

    def _plan(self) -> None:
        """What fills the wanted pieces: copies out of mapped memory, and messages of the others."""
        holders: dict[str, dict[Box, list[tuple[int, int]]]] = {}
        for rank, held in enumerate(self._about.held):
            for piece, one in enumerate(held):
                holders.setdefault(one.name, {}).setdefault(one.box, []).append((rank, piece))
        near = frozenset(
            rank
            for rank, memory in enumerate(self._mapped)
            if memory is not None or not self._about.nbytes[rank]
        )
        found: list[PieceTransfer] = []
        for number, wanted in enumerate(self._wanted):
            found += transfers(holders[wanted.name], wanted.box, number, near)
        self._copies = [each for each in found if each.rank in near]
        self._messages: dict[int, list[PieceTransfer]] = {}
        for each in found:
            if each.rank not in near:
                self._messages.setdefault(each.rank, []).append(each)
        for rank, its in self._messages.items():
            asked = [[one.piece, *one.box] for one in its]
            self._group.send_object(["wants", asked, self._codec], rank, meeting.ASK)

    def get(
        self, newer_than: int = 0, *, timeout: float | timedelta | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Take the newest version; returns its number, and name -> array. All ranks of `group` call it.

        The arrays of all names, on all ranks, are of this version. It waits until there is one newer than
        `newer_than`. After an error what `into` gave has parts of it, and the last arrays are as they were.

        Args:
            newer_than: a version; 0: any.  timeout: seconds; default that of `subscribe`.
        Raises:
            Timeout: there was none in time, and `get` can be called again; or a rank of the publisher has not
                sent in time, and the subscription is `closed`.
            PeerLost: the publisher has closed it, or a rank was lost that has a piece. Subscribe again.
        """
        newer_than = whole(newer_than, "get: newer_than", 0)
        if self.closed:
            raise GroupClosed(f"subscription {self.name!r} is closed")
        limit_s = self._timeout_s if timeout is None else seconds(timeout, 0.0)
        deadline = time.monotonic() + limit_s
        try:
            while True:
                grant = self._granted(newer_than, limit_s)
                again = grant.version == self.version  # nothing has to move
                place = self._place if again else (self._place + 1) % len(self._sets)
                since, self._filled[place] = self._filled[place], 0
                self._take(grant, since, self._sets[place], deadline)
                if self._given_back(grant.version):
                    break
        except BaseException as error:
            if not isinstance(error, NoNewVersion):
                self.close()  # its own ranks and the publisher's see that, and no message is left over
            raise
        self._filled[place], self.version, self._place = grant.version, grant.version, place
        getattr(self._into, "taken", lambda: None)()
        return grant.version, self._sets[place].arrays

    @property
    def arrays(self) -> dict[str, Any]:
        """What the last `get` returned; empty before."""
        return self._sets[self._place].arrays if self.version else {}

    def _granted(self, newer_than: int, limit_s: float) -> meeting.Grant:
        """A version that the publisher keeps until it is given back. Rank 0 of this side asks for all."""
        group, senders = self._group, len(self._about.held)
        if self._own.rank:
            told = group.recv_object(senders, meeting.OWN, timeout=limit_s + self._timeout_s)
        else:
            self._asks += 1
            group.send_object(["newer", newer_than, self._asks], 0, meeting.ASK)
            try:
                told = self._answer(limit_s)
            except Timeout as error:
                group.send_object(["never mind"], 0, meeting.ASK)
                told = f"no version newer than {newer_than} of {self.name!r} within {limit_s:g} s: {error}"
            for rank in range(1, self._own.size):
                group.send_object(told, senders + rank, meeting.OWN)
        if isinstance(told, str):
            raise NoNewVersion(told)
        return meeting.decode_grant(told)

    def _answer(self, limit_s: float) -> bytes:
        """The grant of the last question; one that came after its timeout is left out."""
        deadline = time.monotonic() + limit_s
        while True:
            self._group.probe(0, meeting.ANSWER, timeout=max(0.001, deadline - time.monotonic()))
            told: bytes = self._group.recv_object(0, meeting.ANSWER)
            if meeting.decode_grant(told).ask == self._asks:
                return told

    def _given_back(self, version: int) -> bool:
        """Whether the publisher has kept the version until all ranks had it."""
        group, senders, size = self._group, len(self._about.held), self._own.size
        if self._own.rank:
            group.send_object(None, senders, meeting.OWN)
            return bool(group.recv_object(senders, meeting.OWN))
        for rank in range(1, size):
            group.recv_object(senders + rank, meeting.OWN)
        group.send_object(["done", version], 0, meeting.ASK)
        kept = bool(group.recv_object(0, meeting.ANSWER))
        for rank in range(1, size):
            group.send_object(kept, senders + rank, meeting.OWN)
        return kept

    def _take(self, grant: meeting.Grant, since: int, buffers: Buffers, deadline: float) -> None:
        """Fill a set that has version `since`."""
        slot = grant.version % 2
        receives: list[_Receives] = []
        for rank, its in self._messages.items():
            chosen = [at for at, one in enumerate(its) if grant.changed[rank][one.piece] > since]
            if chosen:
                self._group.send_object(["send", grant.version, chosen], rank, meeting.ASK)
                receives.append(_Receives(self, rank, [its[at] for at in chosen], buffers.pieces))
        for one in self._copies:
            if grant.changed[one.rank][one.piece] > since:
                held, nbytes = self._about.held[one.rank][one.piece], self._about.nbytes[one.rank]
                memory = self._mapped[one.rank]
                assert memory is not None
                piece = held.view(memory[slot * nbytes : (slot + 1) * nbytes])
                into = buffers.pieces[one.wanted][one.box.within(self._wanted[one.wanted].box)]
                np.copyto(into, piece[one.box.within(held.box)])
        while receives:
            receives = [one for one in receives if one.step(deadline)]

    def close(self) -> None:
        """End it here. The arrays stay. A second call does nothing."""
        self.closed = True
        self._group.close()
        self._mapped = []

    def __repr__(self) -> str:
        return f"<Subscription {self.name!r}: {'closed' if self.closed else f'version {self.version}'}>"


class _Receives:
    """What one rank sends: `AHEAD` parts are under way, each goes to its place when it has come."""

    def __init__(
        self, of: Subscription, rank: int, its: list[PieceTransfer], pieces: list[np.ndarray[Any, Any]]
    ) -> None:
        self._of, self._rank, self._pieces = of, rank, pieces
        self._rest: deque[tuple[PieceTransfer, Box]] = deque()
        for one in its:
            self._rest += [(one, box) for box in meeting.chunks(one.box, pieces[one.wanted].itemsize)]
        self._works: deque[tuple[Any, Callable[[], None]]] = deque()
        self._post()

    def _post(self) -> None:
        while self._rest and len(self._works) < meeting.AHEAD:
            one, box = self._rest.popleft()
            wanted = self._of._wanted[one.wanted]
            into = self._pieces[one.wanted][box.within(wanted.box)]
            codec = meeting.codec_of(self._of._codec, wanted.dtype)
            whole = into if into.flags.c_contiguous else np.empty(into.shape, into.dtype)
            room = meeting.raw(whole) if codec is None else np.empty(codec.nbytes(whole.size), np.uint8)
            work = self._of._group.irecv(room, self._rank, meeting.DATA, timeout=math.inf)

            def finish(into: Any = into, whole: Any = whole, room: Any = room, codec: Any = codec) -> None:
                if codec is not None:
                    codec.decode(room, out=whole.reshape(-1))
                if whole is not into:
                    np.copyto(into, whole)

            self._works.append((work, finish))

    def step(self, deadline: float) -> bool:
        """Take the next part; False: there are no more."""
        work, finish = self._works.popleft()
        work.wait(max(0.001, deadline - time.monotonic()))
        finish()
        self._post()
        return bool(self._works)


def _address(given: str) -> tuple[str, int]:
    host, _, port = text(given, "address").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"subscribe: {given!r} is no address, expected HOST:PORT")
    return host.strip("[]"), int(port)
