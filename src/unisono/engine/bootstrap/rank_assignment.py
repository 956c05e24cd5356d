"""Agrees on the rank of every process, through keys of a store; `rendezvous` lists the keys."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import NoReturn

import msgspec

from unisono.engine.base.limits import limit_text
from unisono.engine.bootstrap.init_method import RankAndSize
from unisono.engine.bootstrap.world_names import WaitingWorld, in_vain, keys_of, listed, note
from unisono.engine.store import PrefixStore, Store, TCPStore
from unisono.errors import RendezvousError, StoreError, StoreTimeout, message

GOODBYE_S = 2.0
LOOK_S = 1.0
DECIDED = "unisono/meet/decided"
"""A key that is there when a world has met in this store, or has failed to: it may end at any moment."""


class ProcessInfo(msgspec.Struct, frozen=True, array_like=True):
    """The process of a rank, as it is published."""

    rank: int
    host: str
    pid: int
    token: str  # distinguishes two threads of one process

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


_decode_member = msgspec.msgpack.Decoder(ProcessInfo).decode
_decode_members = msgspec.msgpack.Decoder(tuple[ProcessInfo, ...]).decode


class RankAssignment:
    """One rank's part in the rendezvous."""

    def __init__(
        self,
        base: Store,
        name: str,
        place: RankAndSize,
        deadline: float,
        timeout_s: float,
        job: bool = False,
    ) -> None:
        """`job`: the place is that of this process in the job."""
        self._base = base
        self._job = job
        self._name = name
        self._rank, self._world_size = place
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._me = ProcessInfo(self._rank, socket.gethostname(), os.getpid(), os.urandom(8).hex())

        self.generation = 0
        self.claimed = False  # the store may have this rank's claim
        self.succeeds = False  # an earlier world has met, or failed, in this store

    def run(self) -> tuple[PrefixStore, tuple[ProcessInfo, ...]]:
        """Claim the rank and wait for the verdict; returns the world's part of the store, and its members."""
        keys = self._claim()
        try:
            return keys, self._register(keys)
        except BaseException as error:
            self._give_up(keys, error)
            raise

    def _register(self, keys: Store) -> tuple[ProcessInfo, ...]:
        self._check_world_size(keys)
        if keys.add("came", 1) == self._world_size:
            everybody = [self._member(keys, rank) for rank in range(self._world_size)]
            keys.set("members", msgspec.msgpack.encode(everybody))
            self._decide(keys, "ok")
        self._await_verdict(keys)
        members = _decode_members(keys.get("members"))
        if keys.add("know", 1) == self._world_size:
            keys.set("all know", b"")
        return members

    def _give_up(self, keys: Store, error: BaseException) -> None:
        """Withdraw the claim, so that no rank waits for this one; it may try again."""
        if isinstance(error, StoreError) and not isinstance(error, StoreTimeout):
            return  # the store has ended; another world's store may be at its address now
        with contextlib.suppress(StoreError):  # the first error is the one to report
            why = f"{type(error).__name__}: {error}".rstrip(": ")
            text = f"{self._me} gave up while the ranks joined: {why}"
            self._decide(keys, text, GOODBYE_S)
            keys.set(f"bye/{self._rank}", b"", timeout_s=GOODBYE_S)

    def await_readers(self, keys: Store) -> None:
        """Wait briefly until all ranks have read the verdict. For the rank that serves the store."""
        with contextlib.suppress(StoreTimeout):  # a rank has died since; other ranks report it
            keys.wait(["all know"], timeout_s=GOODBYE_S)

    def _claim(self) -> PrefixStore:
        """Claim this rank in the first generation in which it has not taken part."""
        mine = msgspec.msgpack.encode(self._me)
        self.succeeds = self._rank > 0 and self._base.check([DECIDED])  # before others see the claim
        self.claimed = True
        while True:
            keys = self.keys("meet")
            keys.timeout_s = self._timeout_s
            held = keys.compare_set(f"rank/{self._rank}", b"", mine, timeout_s=self._left())
            if held == mine:
                return keys
            self.succeeds = True
            other = _decode_member(held)
            ours = (other.host, other.pid) == (self._me.host, self._me.pid)
            left = keys.check([f"bye/{self._rank}"]) or (ours and keys.peek("verdict") == b"ok")
            if not left:
                self._fail(
                    keys,
                    f"rank {self._rank} was taken twice: by host {other.host}, pid {other.pid}, "
                    f"and by host {self._me.host}, pid {self._me.pid}",
                    "Give every process a rank of its own; if the first is of an earlier run, end it.",
                )
            self.generation += 1

    def _check_world_size(self, keys: Store) -> None:
        held = keys.compare_set("world_size", b"", f"{self._world_size} {self._me}").decode()
        size, who = held.split(" ", 1)
        if int(size) != self._world_size:
            self._fail(
                keys,
                f"the ranks disagree on the world size: {who} says {size}, {self._me} {self._world_size}",
                "Start all ranks with one WORLD_SIZE.",
            )

    def _fail(self, keys: Store, what: str, remedy: str) -> NoReturn:
        """Report an error to all ranks that still wait, and raise it."""
        self._fail_with(keys, message(what, remedy=remedy))

    def _fail_with(self, keys: Store, text: str) -> NoReturn:
        self._decide(keys, text)
        raise RendezvousError(text)

    def _decide(self, keys: Store, text: str, timeout_s: float | None = None) -> str:
        """Write the verdict; returns the one that counts, the first.

        DECIDED comes before it: who reads the verdict may come again while the store still closes.
        """
        self._base.set(DECIDED, b"", timeout_s=timeout_s)
        return keys.compare_set("verdict", b"", text, timeout_s=timeout_s).decode()

    def _await_verdict(self, keys: Store) -> None:
        missing: list[int] = []
        try:
            verdict = self._verdict(keys).decode()
        except StoreTimeout:  # write a verdict, so that later ranks report the same
            ranks = range(self._world_size)
            missing = [rank for rank in ranks if not keys.check([f"rank/{rank}"], timeout_s=GOODBYE_S)]
            text = self._who_is_missing(missing, self._others())
            verdict = self._decide(keys, text, GOODBYE_S)
        if verdict != "ok":
            raise RendezvousError(verdict, missing=tuple(missing))

    def _verdict(self, keys: Store) -> bytes:
        """The verdict. After LOOK_S it compares names, and the rank that serves the store counts clients."""
        left_s = self._left()
        with contextlib.suppress(StoreTimeout):
            return keys.get("verdict", min(left_s, LOOK_S))
        if left_s > LOOK_S:
            others = self._others()
            if self._job and (text := in_vain(self._base, *self._world(), others)):
                self._fail_with(keys, text)
        while isinstance(self._base, TCPStore) and self._base.serves:
            if self._base.limit is not None:
                takes = f"the store takes one for each of {self._world_size} ranks"
                why = limit_text(self._base.limit, takes)
                raise RendezvousError(f"not all ranks can connect to the store: {why}") from None
            left_s = self._left()
            if left_s <= LOOK_S:
                break
            with contextlib.suppress(StoreTimeout):
                return keys.get("verdict", LOOK_S)
        return keys.get("verdict", self._left())

    def keys(self, part: str) -> PrefixStore:
        """The keys of this world in the store; see `world_names.keys_of`."""
        return keys_of(self._base, part, self._name, self.generation)

    def _world(self) -> tuple[str, int, int]:
        return self._name, self.generation, self._rank

    def _others(self) -> dict[str, WaitingWorld]:
        """Say for which world this rank waits; returns those of other names."""
        return note(self._base, *self._world(), self._job)

    def _who_is_missing(self, missing: list[int], others: dict[str, WaitingWorld]) -> str:
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        came = self._world_size - len(missing)
        absent = f"missing rank{'s' if len(missing) > 1 else ''} {shown}" if missing else "one was just late"
        names = f"; {listed(others)}" if others else ""
        return message(
            f"{came} of {self._world_size} ranks joined within {self._timeout_s:g} s",
            where=f"group={self._name} {self._base.describe()}, as seen by {self._me}",
            observed=absent + names,
            remedy="Give all ranks the same group_name=."
            if others
            else "See whether they were started and reach the store, or raise the timeout.",
        )

    def _member(self, keys: Store, rank: int) -> ProcessInfo:
        return _decode_member(keys.get(f"rank/{rank}", self._left()))

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())
