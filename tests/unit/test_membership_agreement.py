"""The agreement on the next membership, with ranks that die, stop and are cut off at random moments."""

import random
from collections.abc import Mapping

import pytest

import unisono as un
from unisono.engine.membership.agreement import Agreement, Finding, Outcome, Proposals, has_quorum
from unisono.engine.membership.proposal import MembershipProposal, Phase, decode, encode, members, ranks_of


def by_proposal(proposals: Mapping[int, MembershipProposal]) -> Proposals:
    """Each proposal with the set of the ranks that made it."""
    found: dict[MembershipProposal, int] = {}
    for rank, one in proposals.items():
        found[one] = found.get(one, 0) | 1 << rank
    return found


class Ranks:
    """Ranks on two hosts: proposals of a host are seen at once, those of the other one later, in order."""

    def __init__(self, size: int, random_: random.Random) -> None:
        self.size = size
        self.random = random_
        self.agreements = [Agreement(rank, size, 1) for rank in range(size)]
        self.published: list[MembershipProposal | None] = [None] * size
        self.seen: list[dict[int, MembershipProposal]] = [{} for _ in range(size)]
        self.decided: set[int] = set()
        self.evicted: set[int] = set()
        self.dead: set[int] = set()
        self.stopped: set[int] = set()
        self.cut = self.mortal = False
        self.ended: dict[int, Outcome] = {}

    def near(self, one: int, other: int) -> bool:
        return (one < self.size // 2) == (other < self.size // 2)

    def look(self, rank: int, other: int) -> None:
        one = self.published[other]
        if one is not None and (self.near(rank, other) or not self.cut):
            self.seen[rank][other] = one

    def find(self, rank: int) -> dict[int, Finding]:
        found = {}
        for other in ranks_of(self.agreements[rank].alive & ~(1 << rank)):
            if self.near(rank, other) and other in self.dead | self.stopped:
                if other not in self.decided:
                    self.evicted.add(other)
                    found[other] = Finding("out", True)
            elif not self.near(rank, other) and other in self.dead and not self.cut:
                self.look(rank, other)  # its end comes behind its last proposal
                found[other] = Finding("ended", True)
            elif not self.near(rank, other) and self.cut:
                found[other] = Finding("cut off", False)
        return found

    def step(self, rank: int) -> None:
        agreement = self.agreements[rank]
        findings = self.find(rank)
        for other in range(self.size):
            if other != rank and (self.near(rank, other) or self.random.random() < 0.5):
                self.look(rank, other)
        near = {other for other in self.decided if self.near(rank, other)}
        outcome = Outcome.EVICTED
        if rank in self.evicted:
            agreement.resign("evicted")
        else:
            outcome = agreement.advance(by_proposal(self.seen[rank]), findings, members(near))
        if outcome in (Outcome.DECIDING, Outcome.DECIDED):
            self.published[rank] = agreement.acknowledged()
            self.decided.add(rank)
            if self.mortal and self.random.random() < 0.2:
                self.dead.add(rank)  # between the decision and its publication
                return
            agreement.decide()
            outcome = Outcome.DECIDED
        self.published[rank] = agreement.proposal()
        if outcome is not Outcome.OPEN:
            self.ended[rank] = outcome

    def misfortune(self) -> None:
        kind, rank = self.random.choice(["die", "stop", "go on", "cut"]), self.random.randrange(self.size)
        if kind == "cut":
            self.cut = True
        elif kind == "go on":
            self.stopped.discard(rank)
        elif len(self.dead | self.stopped) < self.size - 1:
            (self.dead if kind == "die" else self.stopped).add(rank)

    def run(self, misfortunes: int) -> None:
        self.mortal = misfortunes > 0
        at = sorted(self.random.randrange(40) for _ in range(misfortunes))
        for turn in range(1000):
            while at and at[0] <= turn:
                at.pop(0)
                self.misfortune()
            if turn > 60:
                self.stopped.clear()
            running = [
                rank for rank in range(self.size) if rank not in self.dead | self.stopped | set(self.ended)
            ]
            if not running and not self.stopped and not at:
                return
            if running:
                self.step(self.random.choice(running))
        raise AssertionError(
            f"no end: {[one.phase for one in self.agreements]}, out {self.dead} {self.stopped}"
        )


@pytest.mark.parametrize("misfortunes", [0, 1, 2, 3])
def test_ranks_that_run_end_with_one_decision(misfortunes: int) -> None:
    for seed in range(1500):
        random_ = random.Random(1000 * misfortunes + seed)
        ranks = Ranks(random_.choice([2, 3, 4, 5, 8]), random_)
        ranks.run(misfortunes)
        sets = {rank: ranks.agreements[rank].alive for rank in ranks.decided}
        complete = {one for one in sets.values() if all(sets.get(rank) == one for rank in ranks_of(one))}
        assert len(complete) <= 1, f"seed {seed}: {sets}"
        for rank, one in sets.items():
            assert all(one & other for other in sets.values()), f"seed {seed}: two sides go on, {sets}"
            assert one >> rank & 1
        if misfortunes == 0:
            assert set(sets.values()) == {members(range(ranks.size))}


def test_a_quorum_is_a_majority_or_half_with_the_lowest() -> None:
    for alive, gone, yes in [
        ([0, 1], [], True),
        ([2, 3], [], False),
        ([2, 3], [0], True),
        ([1, 2, 3], [], True),
        ([3], [0, 1, 2], True),
        ([1], [0, 2], True),
        ([3], [0, 2], False),
    ]:
        assert has_quorum(members(alive), members(gone), 4) == yes, (alive, gone)


def test_different_lists_are_refused_on_both_sides() -> None:
    one, other = Agreement(0, 4, 1, (3,)), Agreement(1, 4, 1, (2,))
    assert one.advance({other.proposal(): 1 << 1}, {}) is Outcome.REFUSED
    assert other.advance({one.proposal(): 1 << 0}, {}) is Outcome.REFUSED
    assert one.why == other.why == "rank 0 excludes [3], rank 1 [2]"


def test_ranks_that_exclude_each_other_are_refused_on_both_sides() -> None:
    one, other = Agreement(0, 2, 1, (1,)), Agreement(1, 2, 1, (0,))
    assert one.advance({other.proposal(): 1 << 1}, {}) is Outcome.REFUSED
    assert other.advance({one.proposal(): 1 << 0}, {}) is Outcome.REFUSED
    assert one.why == other.why == "rank 0 excludes [1], rank 1 [0]"
    assert not one.again


def test_a_rank_that_excludes_another_waits_until_that_is_evicted() -> None:
    mine = Agreement(1, 2, 1, (0,))
    assert mine.advance({}, {}) is Outcome.OPEN
    assert mine.phase is Phase.ACKNOWLEDGED
    assert mine.advance({}, {0: Finding("excluded", True)}) is Outcome.OPEN
    assert mine.advance({}, {}) is Outcome.DECIDING


def test_a_decision_of_an_earlier_attempt_counts() -> None:
    """A rank whose call was interrupted calls again, while the others have gone on with it."""
    mine, other = Agreement(1, 2, 2), Agreement(0, 2, 1)
    other.decide()
    assert mine.advance({other.proposal(): 1 << 0}, {}) is Outcome.DECIDED


def test_calls_of_admit_and_shrink_make_another_attempt() -> None:
    shrinks, admits = Agreement(0, 2, 1), Agreement(1, 2, 1, following="admits 3a")
    assert shrinks.advance({admits.proposal(): 1 << 1}, {}) is Outcome.REFUSED
    assert shrinks.again
    assert admits.advance({Agreement(0, 2, 2).proposal(): 1 << 0}, {}) is Outcome.REFUSED
    assert (admits.again, admits.newest) == (True, 2)


def test_a_rank_that_cannot_make_the_next_group_ends_the_attempt_for_all() -> None:
    mine, other = Agreement(0, 2, 1), Agreement(1, 2, 1, following="admits 3a")
    mine.refuse("rank 0: no memory")
    assert other.advance({mine.proposal(): 1 << 0}, {}) is Outcome.REFUSED
    assert (other.why, other.again) == ("rank 0: no memory", True)


def test_a_rank_that_excludes_itself_takes_no_part() -> None:
    mine = Agreement(3, 4, 1, (3,))
    assert mine.phase is Phase.RESIGNED
    assert mine.advance({}, {}) is Outcome.EVICTED


def test_a_proposal_is_the_same_after_the_way_through_memory() -> None:
    for proposal, size in [
        (MembershipProposal(1, Phase.PROPOSED, 0b1011, 0b100, (2,), ((2, "excluded"),)), 4),
        (MembershipProposal(7, Phase.DECIDED, (1 << 1600) - 1, 0, following="x" * 40), 1600),
    ]:
        assert decode(encode(proposal, size)) == proposal
    assert decode(b"garbage") is None
    with pytest.raises(un.NotSupported, match="1601 ranks"):
        encode(MembershipProposal(1, Phase.PROPOSED, 1, 0), 1601)


def test_texts_of_other_letters_do_not_break_a_proposal() -> None:
    sent = decode(encode(MembershipProposal(1, Phase.REFUSED, 1, 0, text="Ж" * 900, following="𝄞" * 900), 8))
    assert sent is not None
    assert (sent.text, sent.following) == ("Ж" * 80, "𝄞" * 40)


def test_many_reasons_do_not_break_a_proposal() -> None:
    reasons = tuple((rank, "x" * 200) for rank in range(100))
    sent = decode(encode(MembershipProposal(1, Phase.PROPOSED, 1, 0, (), reasons), 1000))
    assert sent is not None
    assert sent.alive == 1
