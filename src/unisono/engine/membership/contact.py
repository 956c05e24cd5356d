"""What a rank knows about the others by itself: who has ended, left, stopped, is late, or is cut off.

The evidence is the kernel's: a process that has ended (pidfd), the end of a connection, the state of a
process. No rank is out because it is slow, before the deadline of the call. A rank of this host that is out
is evicted in the memory that both share, so it can never decide; of another host, its own host does that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from unisono._native import Contact, Engine, Fate, FaultKind
from unisono.engine.membership.agreement import Agreement, Finding
from unisono.engine.membership.proposal import Phase, members, ranks_of

__all__ = ["GRACE_S", "SILENT_S", "Contacts", "overdue"]

GRACE_S = 0.05
"""How long a rank may be behind before its state is read; then a stopped one is out, a running one is not."""

GRACE_RANKS = 64
"""Up to so many ranks; with more of them, which share few cores, it grows with their number."""

LOOKS = 16
"""So many of the ranks that are behind are looked at by one call; the others come when these have moved."""

SILENT_S = 1.0
"""How long a rank of another host may leave a question unanswered. Its control thread answers at all times; a
lost packet is sent again after 0.2 s."""

HOST_LATE_S = 0.25
"""A rank that is late is evicted by its own host; this much later the other hosts count it out, too."""

ANSWER_S = 2.0
"""A rank that takes part has this time for its next proposal, also behind the deadline: a rank that is
counted out there changes the set, and then all others have to follow."""

_LEAVING = 2**64 - 1  # of a report: why a rank leaves

_LOST = {
    Contact.RESET: "cut off: its connection was reset",
    Contact.SILENT: "cut off: its host does not answer",
}


class Contacts:
    """Watches the other ranks during one agreement."""

    def __init__(self, engine: Engine, size: int, deadline: float, late: Iterable[int]) -> None:
        self._engine = engine
        self._on_this_host = members(each for each in range(size) if engine.on_this_host(each))
        self._grace_s = GRACE_S * max(1.0, size / GRACE_RANKS)
        self._began = time.monotonic()
        self._deadline = deadline
        self._late = members(late)
        self._since: dict[int, float] = {}
        self._take_part = 0
        self._asked = 0.0
        self.decided = 0

    def moved(self, ranks: int, take_part: bool) -> None:
        """Note that a set of ranks has published something. take_part: in this attempt."""
        self._since.update(dict.fromkeys(ranks_of(ranks), time.monotonic()))
        if take_part:
            self._take_part |= ranks

    def find(self, agreement: Agreement, behind: int) -> dict[int, Finding]:
        """The ranks that are out, as far as this rank sees. behind: those for which it waits.

        A rank for which it does not wait, and which has ended, is found in the next phase.
        """
        found: dict[int, Finding] = {}
        now = time.monotonic()
        suspects = members(self._engine.ended()) | behind & ~self._on_this_host
        for rank in ranks_of(suspects & behind):
            why, ended = self._ended(rank)
            if why:
                self._add(found, rank, Finding(why, ended))
        for rank in self._due(ranks_of(behind & ~members(found)), now):
            on_this_host = self._on_this_host >> rank & 1
            why = self._stopped(rank, now) if on_this_host else self._silent(rank, now)
            why = why or self._overdue(rank, now)
            if why:
                self._add(found, rank, Finding(why, False))
        if agreement.phase is Phase.ACKNOWLEDGED:  # all agree on whom they exclude
            for rank in agreement.excluded:
                if self._on_this_host >> rank & 1 and not agreement.gone >> rank & 1:
                    self._add(found, rank, Finding("excluded", True))
        return found

    def _due(self, behind: list[int], now: float) -> list[int]:
        """The ranks whose state is looked at now: the first ones, and behind the deadline all."""
        return behind if now > self._deadline or self._late else behind[:LOOKS]

    def _add(self, found: dict[int, Finding], rank: int, finding: Finding) -> None:
        if not self._on_this_host >> rank & 1:
            found[rank] = finding
        elif self._engine.settle(rank, Fate.EVICTED) == Fate.DECIDED:
            self.decided |= 1 << rank  # its decision counts, whatever became of it
        else:
            found[rank] = finding._replace(gone=True)

    def _ended(self, rank: int) -> tuple[str, bool]:
        state = self._engine.state(rank)
        record = self._engine.record_of(rank)
        if record.left:
            cause = record.report if record.has_report and record.report_seq == _LEAVING else ""
            return (f"left because of {cause}" if cause else "left"), True
        if state == Contact.ENDED:
            return "ended", True
        return _LOST.get(state, ""), False

    def _stopped(self, rank: int, now: float) -> str:
        if now < self._since.get(rank, self._began) + self._grace_s:
            return ""
        pid = self._engine.record_of(rank).pid
        return "stopped" if pid != os.getpid() and process_state(pid) in "Tt" else ""

    def _silent(self, rank: int, now: float) -> str:
        if not self._asked:
            self._asked = now
        if now < self._asked + GRACE_S:
            return ""
        self._engine.ask()
        heard = self._engine.heard(rank)
        quiet = now - self._asked if heard < 0 else min(heard, now - self._asked)
        return "cut off: its host does not answer" if quiet > SILENT_S else ""

    def _overdue(self, rank: int, now: float) -> str:
        limit = self._began + self._grace_s if self._late >> rank & 1 else self._deadline
        if self._take_part >> rank & 1:
            limit = max(limit, self._since[rank]) + ANSWER_S
        return "late" if now > limit + (0.0 if self._on_this_host >> rank & 1 else HOST_LATE_S) else ""


def overdue(engine: Engine) -> list[int]:
    """The ranks that missed the deadline of the operation that ended the group, if one did."""
    fault = engine.read_fault(refresh=False)
    if fault.kind != FaultKind.TIMEOUT or not fault.seq:
        return []
    return [each.rank for each in fault.ranks if each.started < fault.seq]


def process_state(pid: int) -> str:
    """The state of a process, as in proc(5); X where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "X"
