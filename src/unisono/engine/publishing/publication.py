"""`publish`: the side that has the arrays. A thread for each rank of a subscriber serves it, and sleeps."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np

from unisono.engine.base.closing import Closing
from unisono.engine.base.validation import flag, text, whole
from unisono.engine.bootstrap.interfaces import local_address
from unisono.engine.environment import env
from unisono.engine.group.group import Group
from unisono.engine.group.native import NativeGroup
from unisono.engine.group.work import seconds
from unisono.engine.memory.arrays import empty
from unisono.engine.publishing import meeting
from unisono.engine.publishing.boxes import Box, gap
from unisono.engine.publishing.pieces import HeldPiece, entries, placed, read, source_of
from unisono.engine.store import StoreServer, TCPStore
from unisono.engine.store.address import address_text
from unisono.errors import GroupClosed, GroupError, StoreError, StoreTimeout, UnisonoError

PATIENCE_S = 10.0
"""How long an update waits for subscribers that still take the version whose memory it needs."""

THREADS_S = 5.0
"""For the threads that serve to end, whose groups are closed."""

WATCH_S = 3600.0
"""The wait for a new subscriber is begun again after so long."""


def publish(
    name: str,
    arrays: Any,
    *,
    group: Group | None = None,
    address: str = "",
    port: int = 0,
    delta: bool = False,
) -> Publication:
    """Let other jobs take these arrays, under a name and an address. All ranks of the group call it.

    It copies the arrays; `Publication.update` publishes their next version. A rank needs memory for two
    copies of what it holds.

    Args:
        arrays: name -> array of NumPy or tensor, whole on each rank that gives it; or a `Piece` of one, or a
            list of pieces. Ranks may give different names. Or a `Run` of `unisono.parallel`: its weights.
        group: the ranks that hold them; None: this process alone, or the ranks of a `Run`.
        address, port: where rank 0 listens; "" and 0: the address by which its host reaches MASTER_ADDR
            (127.0.0.1 without one), and a free port.
        delta: compare each piece with its last version, and send only those that changed.
    Raises:
        ValueError, TypeError: an argument is wrong, or the pieces are no cut of their array; on all ranks.
        StoreError: the address cannot be bound.
    Example: publication = un.publish("policy", {"w": w}, group=world); publication.update()
    """
    return Publication(name, arrays, group, text(address, "address"), whole(port, "port", 0, 65535), delta)


class Publication(Closing):
    """Arrays that subscribers of other jobs take. Made by `publish`.

    Attributes:
        name: of the publication.  address: "HOST:PORT", for `subscribe`; the same on all ranks.
        version: of the newest arrays; the first is 1.
    """

    def __init__(
        self, name: str, arrays: Any, group: Group | None, address: str, port: int, delta: bool
    ) -> None:
        self._give, ranks = source_of(arrays)
        self._group = meeting.side(group, ranks)
        self.rank, self.version, self.closed = self._group.rank, 0, False
        self.name = ""
        self._server: StoreServer | None = None
        self._turn = threading.Condition()  # what follows is read and written by the threads that serve
        self._leases: dict[int, int] = {}  # subscription -> the version that it takes
        self._asking: dict[int, tuple[NativeGroup, int, int, int]] = {}  # -> its rank, newer than what, which
        self._meetings: dict[int, NativeGroup] = {}
        self._threads: list[threading.Thread] = []
        given: list[tuple[HeldPiece, Any]] = []

        def prepare() -> Any:
            nonlocal given
            self.name, self._delta = text(name, "name"), flag(delta, "delta")
            given = entries(self._give())
            held, nbytes = placed([one for one, _ in given])
            self._slots = empty((2, nbytes), np.uint8)
            if self.rank == 0:
                host = address or local_address(self._master(), env.read(strict=False))
                self._server = meeting.serve(host, port)
            where = (self._server.host, self._server.port) if self._server else None
            return self.name, msgspec.to_builtins(held), nbytes, where

        try:
            told = meeting.on_all(self._group, "publish", prepare)
            self._about = self._described(told)
        except BaseException:
            self.close()
            raise
        self._held = self._about.held[self.rank]
        self._changed = [[0] * len(held) for held in self._about.held]
        self._place: tuple[str, int] = tuple(told[0][3])
        self.address = address_text(*self._place)
        try:
            meeting.on_all(self._group, "publish", self._connect)
            self._write([value for _, value in given])
        except BaseException:
            self.close()
            raise
        if self.rank == 0:
            self._store.set("about", msgspec.msgpack.encode(self._about))
        self._begin(self._accept)

    def _connect(self) -> None:
        self._store: TCPStore = meeting.store_at(self._place, env.read(strict=False).timeout_s)

    def _master(self) -> str:
        identity = getattr(self._group, "_identity", None)
        known = None if identity is None else identity.settings.master
        return known or env.read(strict=False).master_addr or "127.0.0.1"

    def _described(self, told: list[Any]) -> meeting.Description:
        held = msgspec.convert([one[1] for one in told], list[list[HeldPiece]])
        if any(one[0] != self.name for one in told):
            raise ValueError(f"publish: ranks give different names: {sorted({one[0] for one in told})}")
        kinds: dict[str, tuple[int, HeldPiece]] = {}
        boxes: dict[str, list[Box]] = {}
        for rank, pieces in enumerate(held):
            for one in pieces:
                first, like = kinds.setdefault(one.name, (rank, one))
                if (one.dtype, one.shape) != (like.dtype, like.shape):
                    raise ValueError(
                        f"publish: {one.name!r} is {one.dtype} {one.shape} on rank {rank}, and {like.dtype} "
                        f"{like.shape} on rank {first}"
                    )
                boxes.setdefault(one.name, []).append(one.box)
        for each, found in boxes.items():
            if why := gap(kinds[each][1].shape, found):
                raise ValueError(f"publish: {each!r} is not whole: {why}")
        if not boxes:
            raise ValueError("publish: there are no arrays")
        return meeting.Description(self.name, held, [one[2] for one in told])

    # ---- versions

    def update(self, arrays: Any = None, *, timeout: float | timedelta | None = None) -> int:
        """Publish the next version: what the arrays hold now. All ranks call it; returns its number.

        The arrays may change when it returns. It waits for subscribers that still take the version before the
        last, whose memory it needs, but no longer than `timeout`. Then they begin again, with the newest one.

        Args:
            arrays: as in `publish`, others with the same names and cuts; None: those of `publish`.
            timeout: seconds; default 10.
        Raises:
            ValueError: other names, shapes or types than before; on all ranks, and nothing has changed.
            GroupError: a rank of the publisher was lost. The publication is closed.
        """
        if self.closed:
            raise GroupClosed(f"publication {self.name!r} is closed")
        limit_s = seconds(timeout, PATIENCE_S)

        def prepare() -> list[Any]:
            given = entries(self._give() if arrays is None else source_of(arrays)[0]())
            for (now, _), before in zip(given, self._held, strict=False):
                if msgspec.structs.replace(now, start=before.start) != before:
                    raise ValueError(f"update: {now.name!r} is another piece than before: {now}")
            if len(given) != len(self._held):
                raise ValueError(f"update: {len(given)} pieces, and {len(self._held)} before")
            values.extend(value for _, value in given)
            self._drain(self.version - 1, limit_s)
            return []

        values: list[Any] = []
        try:
            meeting.on_all(self._group, "update", prepare)
            self._write(values)
        except (GroupError, StoreError):
            self.close()
            raise
        return self.version

    def _drain(self, version: int, limit_s: float) -> None:
        """Wait until nobody takes a version any more; after `limit_s` it is taken back from those that do."""
        with self._turn:
            self._turn.wait_for(lambda: version not in self._leases.values(), limit_s)
            for number, its in list(self._leases.items()):
                if its == version:
                    del self._leases[number]

    def _write(self, values: list[Any]) -> None:
        """The values as the next version; afterwards all ranks have it."""
        version = self.version + 1

        def fill() -> list[int]:
            changed = self._changed[self.rank][:]
            for number, (one, value) in enumerate(zip(self._held, values, strict=True)):
                if not one.nbytes:
                    continue
                into = one.view(self._slots[version % 2])
                read(value, into)
                before = one.view(self._slots[1 - version % 2])
                if version == 1 or not self._delta or not np.array_equal(_words(into), _words(before)):
                    changed[number] = version
            return changed

        told = meeting.on_all(self._group, "update", fill)
        with self._turn:
            self.version, self._changed = version, told
            waiting = list(self._asking)
        for number in waiting:
            self._grant(number)

    # ---- subscribers

    def _begin(self, act: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(
            target=act, args=arguments, name=f"unisono-publish-{self.name}", daemon=True
        )
        with self._turn:
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
            thread.start()

    def _accept(self) -> None:
        number = 0
        while not self.closed:
            try:
                size = int(self._store.get(f"came/{number + 1}", WATCH_S))
            except StoreTimeout:
                continue
            except StoreError:  # rank 0 has closed it, or ended
                return
            except ValueError:  # no subscriber's: the next one is awaited
                size = 0
            number += 1
            if size > 0:
                self._begin(self._form, number, size)

    def _form(self, number: int, size: int) -> None:
        ranks, host = self._group.size, self._place[0]
        timeout_s = env.read(strict=False).timeout_s
        try:
            group = meeting.meet(self._store, self.name, number, self.rank, ranks + size, host, timeout_s)
        except Exception:  # noqa: BLE001  (the subscriber gets it: each rank reports its failure in the store)
            return
        with self._turn:
            self._meetings[number] = group
        try:
            group.window(self._slots.reshape(-1) if self._slots.size else None)
        except UnisonoError:
            self._end(number)
            return
        for rank in range(ranks, ranks + size):
            self._begin(self._serve, number, group, rank)

    def _serve(self, number: int, group: NativeGroup, rank: int) -> None:
        """Answer one rank of a subscriber until it has gone."""
        wants: list[tuple[int, Box]] = []
        coded: str | None = None
        try:
            while True:
                what, *rest = group.recv_object(rank, meeting.ASK, timeout=math.inf)
                if what == "wants":
                    found, coded = rest
                    wants = [(piece, Box(tuple(offset), tuple(shape))) for piece, offset, shape in found]
                elif what == "newer":
                    with self._turn:
                        self._asking[number] = group, rank, *rest
                    self._grant(number)
                elif what == "send":
                    version, chosen = rest
                    self._send(group, rank, [wants[each] for each in chosen], coded, version)
                else:
                    with self._turn:
                        self._asking.pop(number, None)
                        kept = self._leases.pop(number, None)
                        self._turn.notify_all()
                    if what == "done":
                        group.send_object(kept == rest[0], rank, meeting.ANSWER)
        except UnisonoError:  # it has gone, or this publication is closed
            self._end(number)
        except BaseException:
            self._end(number)  # what it asked for makes no sense: it gets PeerLost
            raise

    def _grant(self, number: int) -> None:
        """Give the newest version to a subscriber that asks, if it is newer than what it has."""
        with self._turn:
            group, rank, than, ask = self._asking.get(number, (None, 0, 0, 0))
            if group is None or self.version <= than:
                return
            del self._asking[number]
            self._leases[number] = self.version
            grant = meeting.Grant(self.version, ask, self._changed)
        with contextlib.suppress(UnisonoError):  # the thread that serves it sees that, too
            group.send_object(msgspec.msgpack.encode(grant), rank, meeting.ANSWER)

    def _send(
        self, group: NativeGroup, rank: int, wants: list[tuple[int, Box]], coded: str | None, version: int
    ) -> None:
        """Send parts of pieces of a version to a rank that does not map this one's memory."""
        under_way: deque[Any] = deque()
        for number, box in wants:
            one = self._held[number]
            piece, codec = one.view(self._slots[version % 2]), meeting.codec_of(coded, one.dtype)
            for each in meeting.chunks(box, piece.itemsize):
                values = np.ascontiguousarray(piece[each.within(one.box)])
                sent = meeting.raw(values if codec is None else codec.encode(values.reshape(-1)))
                if len(under_way) == meeting.AHEAD:
                    under_way.popleft().wait()
                under_way.append(group.isend(sent, rank, meeting.DATA, timeout=math.inf))
        for work in under_way:
            work.wait()

    def _end(self, number: int) -> None:
        with self._turn:
            group = self._meetings.pop(number, None)
            self._asking.pop(number, None)
            self._leases.pop(number, None)
            self._turn.notify_all()
        if group is not None:
            group.close()

    def close(self) -> None:
        """End it here: subscribers that wait or take get `PeerLost`. A second call does nothing."""
        self.closed = True
        for number in list(self._meetings):
            self._end(number)
        if hasattr(self, "_store"):
            self._store.close()
        if self._server is not None:
            self._server.close()
        until = time.monotonic() + THREADS_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        self._slots = np.empty((2, 0), np.uint8)  # the memory is free when nobody maps it

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"version {self.version} at {self.address}"
        return f"<Publication {self.name!r}: {state}>"


def _words(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array, eight at a time where they are so many: equal means equal bits, NaN too."""
    found = meeting.raw(array)
    return found.view(np.uint64) if found.size % 8 == 0 else found
