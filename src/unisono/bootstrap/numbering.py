"""Agreeing who is who, through the keys of a store. See the package for their names."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import NoReturn

import msgspec

from unisono.bootstrap.target import Place
from unisono.errors import RendezvousError, StoreError, StoreTimeout, message
from unisono.store import PrefixStore, Store

__all__ = ["GOODBYE_S", "Meeting", "Member"]

GOODBYE_S = 2.0


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A rank as the others see it."""

    rank: int
    host: str
    pid: int
    token: str  # tells two threads of one process apart

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


class Meeting:
    """One rank's part in coming together."""

    def __init__(self, base: Store, place: Place, deadline: float, timeout_s: float) -> None:
        self._base = base
        self._rank, self._world_size = place
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._me = Member(self._rank, socket.gethostname(), os.getpid(), os.urandom(8).hex())

        self.generation = 0
        self.claimed = False

    def meet(self) -> tuple[PrefixStore, tuple[Member, ...]]:
        """Claim the rank, wait for the verdict; the world's room in the store, and who is who by rank."""
        room = self._claim()
        try:
            return room, self._come(room)
        except BaseException as error:
            self._give_up(room, error)
            raise

    def _come(self, room: Store) -> tuple[Member, ...]:
        self._check_world_size(room)
        if room.add("came", 1) == self._world_size:
            everybody = [self._member(room, rank) for rank in range(self._world_size)]
            room.set("members", msgspec.msgpack.encode(everybody))
            room.compare_set("verdict", b"", b"ok")
        self._await_verdict(room)
        members = msgspec.msgpack.decode(room.get("members"), type=tuple[Member, ...])
        if room.add("know", 1) == self._world_size:
            room.set("all know", b"")
        return members

    def _give_up(self, room: Store, error: BaseException) -> None:
        """Nobody is to wait for this rank, nor to count it as having come; it may try again."""
        if isinstance(error, StoreError) and not isinstance(error, StoreTimeout):
            return  # the store has gone; what is at its address by now may be another world's
        with contextlib.suppress(StoreError):  # the first error is the one to tell
            why = f"{type(error).__name__}: {error}".rstrip(": ")
            text = f"{self._me} gave up while the ranks came together: {why}"
            room.compare_set("verdict", b"", text, timeout_s=GOODBYE_S)
            room.set(f"bye/{self._rank}", b"", timeout_s=GOODBYE_S)

    def see_everybody_off(self, room: Store) -> None:
        """Wait, briefly, until all ranks have read the verdict: for the rank whose end is the store's end."""
        with contextlib.suppress(StoreTimeout):  # a rank died since: not this rank's business
            room.wait(["all know"], timeout_s=GOODBYE_S)

    def _claim(self) -> PrefixStore:
        """Take this rank in the first generation it has not been part of."""
        mine = msgspec.msgpack.encode(self._me)
        while True:
            room = PrefixStore(f"unisono/meet/{self.generation}", self._base)
            room.timeout_s = self._timeout_s
            held = room.compare_set(f"rank/{self._rank}", b"", mine, timeout_s=self._left())
            if held == mine:
                self.claimed = True
                return room
            other = msgspec.msgpack.decode(held, type=Member)
            ours = (other.host, other.pid) == (self._me.host, self._me.pid)
            left = room.check([f"bye/{self._rank}"]) or (ours and room.peek("verdict") == b"ok")
            if not left:
                self._fail(
                    room,
                    f"rank {self._rank} was taken twice: by host {other.host}, pid {other.pid}, "
                    f"and by host {self._me.host}, pid {self._me.pid}",
                    "Give every process a rank of its own; if the first is of an earlier run, end it.",
                )
            self.generation += 1

    def _check_world_size(self, room: Store) -> None:
        held = room.compare_set("world_size", b"", f"{self._world_size} {self._me}").decode()
        size, who = held.split(" ", 1)
        if int(size) != self._world_size:
            self._fail(
                room,
                f"the ranks disagree on the world size: {who} says {size}, {self._me} {self._world_size}",
                "Start all ranks with one WORLD_SIZE.",
            )

    def _fail(self, room: Store, what: str, remedy: str) -> NoReturn:
        """Tell everybody who still waits, and raise."""
        text = message(what, remedy=remedy)
        room.compare_set("verdict", b"", text)
        raise RendezvousError(text)

    def _await_verdict(self, room: Store) -> None:
        missing: list[int] = []
        try:
            verdict = room.get("verdict", self._left()).decode()
        except StoreTimeout:  # who comes now, comes too late: all must tell the same
            ranks = range(self._world_size)
            missing = [rank for rank in ranks if not room.check([f"rank/{rank}"], timeout_s=GOODBYE_S)]
            text = self._who_is_missing(missing)
            verdict = room.compare_set("verdict", b"", text, timeout_s=GOODBYE_S).decode()
        if verdict != "ok":
            raise RendezvousError(verdict, missing=tuple(missing))

    def _who_is_missing(self, missing: list[int]) -> str:
        listed = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        came = self._world_size - len(missing)
        return message(
            f"{came} of {self._world_size} ranks came within {self._timeout_s:g} s",
            where=f"{self._base.describe()}, as seen by {self._me}",
            observed=f"missing rank{'s' if len(missing) > 1 else ''} {listed}"
            if missing
            else "one was just late",
            remedy="See whether they were started and reach the store, or raise the timeout.",
        )

    def _member(self, room: Store, rank: int) -> Member:
        return msgspec.msgpack.decode(room.get(f"rank/{rank}", self._left()), type=Member)

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())
