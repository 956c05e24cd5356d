"""An elastic job on this machine: which ranks are in the group, which are lost, and when one is replaced.

The ranks agree on their group by themselves and tell the launcher (`MembershipNotice`). The launcher learns
which failures the group survived. It starts replacements, which join the group, and ends ranks that are out.
Nothing here starts or signals a process: `Supervisor` asks `due`, `replacements`, `to_be_killed` and `over`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from unisono.commands.launch.failures import RankProcess
from unisono.commands.launch.job import Job
from unisono.engine.diagnosis.report import LostRank, MembershipNotice

FIRST_DELAY_S = 0.25
"""Before the first replacement of a rank; doubled for each one that does not stay."""

LONGEST_DELAY_S = 30.0

STAYED_S = 10.0
"""A replacement that was in the group for so long was a good one: the count begins anew."""

AGAIN_S = 0.2
"""Between two looks whether a group is there to join."""

STATES_OF_STOPPED = "Tt"


class ElasticRanks:
    """What the launcher knows of an elastic job.

    Attributes:
        formed: a rank of this machine has been in a group: from now on a failure does not end the job.
        ending: a rank has ended normally: the job is complete, nobody is replaced.

    Args:
        ranks: all processes that were started here, by pid.
        say: shows a line.
    """

    def __init__(self, job: Job, ranks: Mapping[int, RankProcess], say: Callable[[str], None]) -> None:
        self._job = job
        self._ranks = ranks
        self._say = say
        self._host = os.uname().nodename
        self._size = 0  # of the newest group
        self._here: list[RankProcess] = []  # its ranks that were started here
        self._generation = -1
        self._told: set[tuple[int, int]] = set()
        self._shown: tuple[str, ...] = ()
        self._addresses: tuple[str, ...] = ()
        self._vain: dict[int, int] = {}  # by local rank: successive replacements that did not stay
        self._waiting: dict[int, float] = {}  # by local rank: when to replace it
        self.formed = False
        self.ending = False

    @property
    def least(self) -> int:
        """Fewer ranks cannot go on."""
        return 1 if self._job.elastic is None else self._job.elastic[0]

    # ---- what happens ----------------------------------------------------------------------------------

    def take(self, notice: MembershipNotice) -> None:
        """A rank tells who is in its group."""
        rank = self._ranks.get(notice.pid)
        if rank is None or (rank.end is not None and notice.generation < self._generation):
            return
        self.formed = True
        if rank.member_since is None:
            rank.member_since = time.monotonic()
        rank.addresses, rank.listens = notice.addresses, notice.listens
        if notice.generation > self._generation:
            self._generation, self._size = notice.generation, notice.size
            self._here = [self._ranks[pid] for pid in notice.here if pid in self._ranks]
            self._forget_evicted(notice)
        for lost in notice.left:
            self._on_lost(lost, notice)
        self._show_addresses()

    def _forget_evicted(self, notice: MembershipNotice) -> None:
        """Ranks that ended because the others went on without them: no notice of theirs says who is out."""
        for pid, rank in self._ranks.items():
            if rank.end is not None and rank.out_since is None and pid not in notice.here:
                rank.out_since = time.monotonic()
                rank.survived = notice.size >= self.least

    def _on_lost(self, lost: LostRank, notice: MembershipNotice) -> None:
        here = self._ranks.get(lost.pid) if lost.host == self._host else None
        if here is not None and here.out_since is None:
            here.out_since = time.monotonic()
            here.survived = notice.size >= self.least
        if (notice.generation, lost.rank) in self._told:
            return
        self._told.add((notice.generation, lost.rank))
        who = f"rank {lost.rank if here is None else here.rank}"
        left = f"{notice.size} rank" + ("s go on" if notice.size > 1 else " goes on")
        if notice.size < self.least:
            left = f"{notice.size} left, and the minimum is {self.least}"
        self._say(f"{who} (host {lost.host}, pid {lost.pid}) is out: {lost.why}; {left}")

    def _show_addresses(self) -> None:
        """Say where newcomers may come, when that has changed."""
        found = tuple(sorted({address for rank in self._members() for address in rank.addresses[:1]}))
        if found and not set(found) & set(self._shown):
            self._shown = found
            self._say(f"newcomers may come: unisono run --join {','.join(found)} ...")

    def on_end(self, rank: RankProcess, failed: bool) -> None:
        """A process has ended."""
        if not failed and rank.out_since is None and (rank.member_since is not None or not self.formed):
            self.ending = True
            self._waiting.clear()
        elif failed and self.formed:
            if rank.member_since is None and self._members():
                rank.survived = True
                how = rank.ending().how()
                self._say(f"rank {rank.rank} (pid {rank.pid}) ended before the group took it in: {how}")
            if not self.ending and self._job.respawn > 0:
                self._plan_replacement(rank)

    def _plan_replacement(self, rank: RankProcess) -> None:
        slot = rank.local_rank
        if rank.member_since is not None and time.monotonic() - rank.member_since >= STAYED_S:
            self._vain[slot] = 0
        tried = self._vain.get(slot, 0)
        if tried >= self._job.respawn:
            times = f"{tried} replacement{'s' if tried > 1 else ''}"
            self._say(f"rank {rank.rank} is not replaced again: {times} did not stay for {STAYED_S:g} s")
            return
        delay_s = min(FIRST_DELAY_S * 2**tried, LONGEST_DELAY_S)
        self._waiting[slot] = time.monotonic() + delay_s

    # ---- what is to be done ----------------------------------------------------------------------------

    def _members(self) -> list[RankProcess]:
        return [
            rank
            for rank in self._ranks.values()
            if rank.end is None and rank.member_since is not None and rank.out_since is None
        ]

    def _outsiders(self) -> list[RankProcess]:
        """The processes that were in a group, and are out of it."""
        return [rank for rank in self._ranks.values() if rank.end is None and rank.out_since is not None]

    def due(self) -> float | None:
        """When to look again (monotonic seconds); None: nothing is to be done."""
        moments = [*self._waiting.values()]
        moments += [rank.out_since + self._job.grace_s for rank in self._outsiders() if rank.out_since]
        later = time.monotonic() + AGAIN_S
        return min(
            (max(moment, later) if moment < time.monotonic() else moment for moment in moments), default=None
        )

    def replacements(self, now: float) -> list[tuple[int, str]]:
        """(local rank, addresses to join at) of the ranks to be replaced now."""
        members = self._members()
        if members:
            listening = [rank.addresses[0] for rank in members if rank.listens]
            known = [address for rank in members for address in rank.addresses]
            self._addresses = tuple(dict.fromkeys((*listening, *known)))
        due = [slot for slot, when in self._waiting.items() if when <= now]
        if not self._addresses or not (members or self.elsewhere):
            return []
        for slot in due:
            del self._waiting[slot]
            self._vain[slot] = self._vain.get(slot, 0) + 1
        return [(slot, ",".join(self._addresses)) for slot in due]

    def to_be_killed(self, now: float) -> list[RankProcess]:
        """The ranks that are out and cannot learn it, because they are stopped."""
        return [
            rank
            for rank in self._outsiders()
            if rank.out_since is not None and now >= rank.out_since + self._job.grace_s and _stopped(rank.pid)
        ]

    @property
    def elsewhere(self) -> bool:
        """Whether the group has ranks on other machines, as far as the launcher knows."""
        return self._size > len(self._here)

    @property
    def over(self) -> bool:
        """Whether the processes that are left have nothing to do: the job is complete, or cannot go on."""
        if not self.formed:
            return False
        if self.ending:
            return not self._members()
        left = sum(rank.end is None and rank.out_since is None for rank in self._here)
        return not self.elsewhere and left < self.least

    def give_up(self) -> None:
        """Replace nobody any more."""
        self._waiting.clear()

    @property
    def replacing(self) -> bool:
        """Whether a rank will be replaced."""
        return bool(self._waiting)


def _stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode() in STATES_OF_STOPPED
    except (OSError, IndexError):
        return False
