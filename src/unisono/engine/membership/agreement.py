"""The rules by which the living ranks of a group decide on one membership. Their model: model/membership.pml.

Each rank proposes the set of ranks that it holds alive. A set only becomes smaller. A rank acknowledges its
set when every rank of it proposes the same set, and decides when every rank of it has acknowledged the same
set. A rank that sees a decision of a rank of its set takes it over. So no two ranks of one set decide
differently, also when ranks die in between.

A decision needs a quorum: more than half of the ranks that may still decide, or half of them with the lowest
one. Otherwise the rank resigns. Ranks that have ended, and those that their own host has evicted, can never
decide, and do not count.

Calls that do not fit refuse the attempt, on every rank. A rank refuses only before it has acknowledged: after
that the others may have decided.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from operator import itemgetter
from typing import NamedTuple

import msgspec

from unisono.engine.membership.proposal import MembershipProposal, Phase, cut, members, ranks_of

__all__ = ["Agreement", "Finding", "Outcome", "Proposals", "has_quorum"]

Proposals = Mapping[MembershipProposal, int]
"""Proposals, each with the set of ranks that made it. Of a thousand ranks most propose the same."""


class Outcome(enum.Enum):
    """What an agreement has come to."""

    OPEN = enum.auto()
    DECIDING = enum.auto()  # this rank may decide: `Agreement.decide`
    DECIDED = enum.auto()
    EVICTED = enum.auto()
    REFUSED = enum.auto()


class Finding(NamedTuple):
    """Why a rank is out, as this rank has found by itself. gone: it can never decide."""

    why: str
    gone: bool


class Agreement:
    """One rank's part.

    Attributes:
        alive, gone: sets of ranks, see `MembershipProposal`.
        reasons: why each rank is out.
        why: why this rank is evicted, or why the calls do not fit.
        again: of a refusal: the caller's list is not wrong, so a call of shrink makes another attempt.
        newest: the highest attempt that another rank has begun.
    """

    def __init__(
        self, rank: int, size: int, attempt: int, excluded: tuple[int, ...] = (), following: str = ""
    ) -> None:
        self.rank = rank
        self.size = size
        self.attempt = attempt
        self.excluded = excluded
        self.following = cut(following)
        self.alive = members(range(size)) & ~members(excluded)
        self.gone = 0
        self.reasons = dict.fromkeys(excluded, "excluded")
        self.phase = Phase.PROPOSED
        self.why = ""
        self.again = False
        self.newest = attempt
        if rank in excluded:
            self._resign(f"rank {rank} was excluded by its own call of shrink")

    def proposal(self) -> MembershipProposal:
        """What to publish now."""
        reasons = tuple(self.reasons.items())
        return MembershipProposal(
            self.attempt,
            self.phase,
            self.alive,
            self.gone,
            self.excluded,
            reasons,
            cut(self.why),
            self.following,
            self.again,
        )

    def acknowledged(self) -> MembershipProposal:
        """What to publish before a decision: the set that every rank of it has acknowledged."""
        return msgspec.structs.replace(self.proposal(), phase=Phase.ACKNOWLEDGED)

    def advance(
        self,
        proposals: Proposals,
        findings: Mapping[int, Finding],
        decided: int = 0,
    ) -> Outcome:
        """Take what has come, and go on as far as possible. Publish `proposal` after it if it has changed.

        Args:
            proposals: the newest of each other rank. They must have been read after the findings were made.
            decided: the ranks of this host that have decided, though their proposals may not say so yet.
        """
        if self.phase is Phase.RESIGNED:
            return Outcome.EVICTED
        others = self._by_first(proposals, self._others())
        current = [each for each in others if each[2].attempt >= self.attempt]
        if (outcome := self._follow(others, decided)) is not Outcome.OPEN:
            return outcome
        if self._refuse(current) or self._refuse_excluded(proposals):
            return Outcome.REFUSED
        before = self.alive, self.gone
        for one, ranks in proposals.items():
            if one.phase is Phase.RESIGNED:
                for rank in ranks_of(ranks):
                    self._remove(rank, one.text or "it took no part", gone=True)
        for rank, finding in findings.items():
            self._remove(rank, finding.why, finding.gone)
        for rank, ranks, one in current:
            if self.alive & ranks:
                self._take(rank, ranks, one)
        if (self.alive, self.gone) != before:
            self.phase = Phase.PROPOSED
        if self.phase is Phase.PROPOSED and self._all(current, Phase.PROPOSED):
            self.phase = Phase.ACKNOWLEDGED
            if self.excluded:  # those of this host are evicted next, and then do not count
                return Outcome.OPEN
        if self.phase is Phase.ACKNOWLEDGED and self._all(current, Phase.ACKNOWLEDGED):
            if has_quorum(self.alive, self.gone, self.size):
                return Outcome.DECIDING
            self._resign(self._no_quorum())
            return Outcome.EVICTED
        return Outcome.OPEN

    def decide(self) -> None:
        """Decide, after `advance` has returned DECIDING."""
        self.phase = Phase.DECIDED

    def refuse(self, why: str) -> None:
        """Take no part in this attempt, for another reason than the list. Only before the first `advance`."""
        self.phase, self.why, self.again = Phase.REFUSED, why, True

    def behind(self, proposals: Proposals) -> int:
        """The set of ranks for which this rank waits."""
        waits = self._others()
        for one, ranks in proposals.items():
            if self._agrees(one, self.phase):
                waits &= ~ranks
        return waits

    def resign(self, why: str) -> None:
        """Take no part any more."""
        self._resign(why)

    # ---- rules -----------------------------------------------------------------------------------------

    def _others(self) -> int:
        """The set of the other ranks that this rank holds alive."""
        return self.alive & ~(1 << self.rank)

    @staticmethod
    def _by_first(proposals: Proposals, of: int) -> list[tuple[int, int, MembershipProposal]]:
        """(lowest rank, ranks, proposal) of the proposals of some ranks, by the lowest rank of each."""
        found = [(ranks & of, one) for one, ranks in proposals.items() if ranks & of]
        return sorted(((_lowest(ranks), ranks, one) for ranks, one in found), key=itemgetter(0))

    def _follow(self, others: list[tuple[int, int, MembershipProposal]], decided: int) -> Outcome:
        """Take over the decision of a rank of this rank's set, also one of an earlier attempt."""
        for rank, ranks, one in others:
            known = one.phase is Phase.ACKNOWLEDGED and ranks & decided
            if not (one.phase is Phase.DECIDED or known):
                continue
            if not one.alive >> self.rank & 1:
                why = dict(one.reasons).get(self.rank, "the other ranks went on without it")
                self._resign(f"rank {rank} decided: {why}")
                return Outcome.EVICTED
            self.alive, self.gone = one.alive, one.gone
            self.reasons = {**self.reasons, **dict(one.reasons)}
            self.phase = Phase.DECIDED
            return Outcome.DECIDED
        return Outcome.OPEN

    def _refuse(self, current: list[tuple[int, int, MembershipProposal]]) -> bool:
        """Whether the calls of this attempt do not fit: then every rank refuses it."""
        for rank, _, one in current:
            self.newest = max(self.newest, one.attempt)
            if one.attempt > self.attempt:
                why, again = f"rank {rank} has given up this attempt", True
            elif one.phase is Phase.REFUSED:
                why, again = one.text or f"rank {rank} has refused", one.again
            elif one.phase is Phase.RESIGNED:
                continue
            elif set(one.excluded) != set(self.excluded):
                why, again = self._two_lists(rank, one), False
            elif one.following != self.following:
                calls = one.following or "called shrink", self.following or "called shrink"
                why, again = f"rank {rank} has {calls[0]}, rank {self.rank} has {calls[1]}", True
            else:
                continue
            self.phase, self.why, self.again = Phase.REFUSED, why, again
            return True
        return False

    def _refuse_excluded(self, proposals: Proposals) -> bool:
        """Whether a rank that this one excludes has another list, such as one that excludes this rank."""
        if self.phase is not Phase.PROPOSED or not self.excluded:
            return False
        for rank, _, one in self._by_first(proposals, members(self.excluded)):
            wrong = one.attempt == self.attempt and one.phase is not Phase.RESIGNED
            if not wrong or set(one.excluded) == set(self.excluded):
                continue
            self.phase, self.why, self.again = Phase.REFUSED, self._two_lists(rank, one), False
            return True
        return False

    def _two_lists(self, rank: int, one: MembershipProposal) -> str:
        first, second = sorted([(self.rank, self.excluded), (rank, one.excluded)])
        return f"rank {first[0]} excludes {sorted(first[1])}, rank {second[0]} {sorted(second[1])}"

    def _take(self, rank: int, ranks: int, one: MembershipProposal) -> None:
        """The set of other ranks, `rank` the first: ranks that one side holds out are out for both."""
        if not one.alive >> self.rank & 1:  # the two cannot be in one membership: a quorum chooses one
            why = dict(one.reasons).get(self.rank, "it does not hold this rank alive")
            for other in ranks_of(ranks):
                self._remove(other, why, gone=False)
        else:
            told = dict(one.reasons)
            for out in ranks_of(self.alive & ~one.alive):
                self._remove(out, told.get(out, f"rank {rank} held it out"), gone=False)
            self.gone |= one.gone

    def _remove(self, rank: int, why: str, gone: bool) -> None:
        if rank == self.rank:
            return
        self.reasons.setdefault(rank, why)
        self.alive &= ~(1 << rank)
        self.gone |= int(gone) << rank

    def _all(self, current: list[tuple[int, int, MembershipProposal]], phase: Phase) -> bool:
        agree = 0
        for _, ranks, one in current:
            agree |= ranks if self._agrees(one, phase) else 0
        return self._others() & ~agree == 0

    def _agrees(self, one: MembershipProposal, phase: Phase) -> bool:
        same = (one.alive, one.gone) == (self.alive, self.gone)
        return one.attempt == self.attempt and same and phase <= one.phase <= Phase.DECIDED

    def _resign(self, why: str) -> None:
        self.phase = Phase.RESIGNED
        self.why = why

    def _no_quorum(self) -> str:
        may_decide = ranks_of(members(range(self.size)) & ~self.gone)
        own = ranks_of(self.alive)
        out = [f"rank {rank} {why}" for rank, why in self.reasons.items() if not self.gone >> rank & 1]
        return (
            f"this side has the ranks {own} of {may_decide}: neither more than half of them, nor half with "
            f"rank {may_decide[0]} ({'; '.join(out[:4])})"
        )


def _lowest(ranks: int) -> int:
    return (ranks & -ranks).bit_length() - 1


def has_quorum(alive: int, gone: int, size: int) -> bool:
    """Whether these ranks may go on: more than half of those that may still decide, or half with the lowest.

    Example: of ranks 0 to 3, {0, 1} may, {2, 3} may not; once rank 0 has ended, {2, 3} may: two of three.
    """
    may_decide = members(range(size)) & ~gone
    twice, of = 2 * (alive & may_decide).bit_count(), may_decide.bit_count()
    lowest = may_decide & -may_decide
    return twice > of or (twice == of and alive & lowest != 0)
