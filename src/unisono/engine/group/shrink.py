"""`Group.shrink`: the living ranks agree on who is left, and make their next group of the former one's parts.

docs/adr/0013-membership.md gives the reasons.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from unisono import _native
from unisono._native import Contact, Fate, FaultKind
from unisono.engine.base.validation import listed
from unisono.engine.bootstrap.forming import Identity, OpenConnections, next_engine, next_identity
from unisono.engine.diagnosis.fault_reader import last_operation
from unisono.engine.diagnosis.fault_text import signal_name
from unisono.engine.group.departure import Departure
from unisono.engine.group.membership import MembershipGroup
from unisono.engine.membership.agreement import Agreement, Outcome
from unisono.engine.membership.contact import GRACE_S, Contacts, overdue
from unisono.engine.membership.eviction import eviction
from unisono.engine.membership.proposal import MembershipProposal, Phase, decode, encode, ranks_of
from unisono.errors import Evicted, Timeout, message

__all__ = ["CallMismatch", "agree", "await_last_calls", "departures", "excluded_ranks", "form", "refuse"]

SLICE_S = 0.002
"""How long a rank sleeps between two looks at the others; a proposal of the awaited one ends the sleep."""

SLICE_EACH_S = 2e-6
"""So long for each pair of ranks, if that is more: each looks at all others, and they share few cores."""

OVERTIME_S = 5.0
"""After its deadline, in which ranks that are late are counted out, an agreement has this time to end."""

LAST_CALLS_S = 1.0
"""For other ranks to end the calls that have ended here; one that does not call at all costs this time."""

HAND_OVER_S = 2.5
"""For the other ranks to pass on their ends of the connections: each does so right after the decision. One
that does not counts as lost."""


class CallMismatch(ValueError):
    """The ranks' calls of an attempt do not fit.

    Attributes:
        again: this rank's list is not wrong: a call of shrink makes another attempt, `newest` or a later one.
    """

    def __init__(self, text: str, again: bool, newest: int) -> None:
        super().__init__(text)
        self.again = again
        self.newest = newest


def excluded_ranks(group: MembershipGroup, exclude: Sequence[int]) -> tuple[int, ...]:
    """The checked list of ranks to exclude.

    Raises:
        ValueError, TypeError: no list of ranks, one twice, or all.
    """
    if isinstance(exclude, (str, bytes)):
        raise TypeError(f"shrink: exclude is {exclude!r}, expected a list of ranks")
    given = listed(exclude, "shrink: exclude", group.size)
    ranks = [group._planner.member("shrink", rank, "an excluded rank") for rank in given]
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"shrink: exclude={ranks} names a rank twice")
    if len(ranks) == group.size:
        raise ValueError(f"shrink: exclude={ranks} leaves no rank in the group")
    return tuple(sorted(ranks))


class _Agreeing:
    """One call of shrink, up to the decision."""

    def __init__(
        self, group: MembershipGroup, excluded: tuple[int, ...], deadline: float, attempt: int, following: str
    ) -> None:
        self._group = group
        self._engine = group._planner.engine
        self._rank, self._size = group.rank, group.size
        self._deadline = deadline
        self._agreement = Agreement(self._rank, self._size, attempt, excluded, following)
        late = overdue(self._engine)
        self._contacts = Contacts(self._engine, self._size, deadline, late)
        self._reader = _native.ProposalReader(self._engine)
        self._proposals: dict[MembershipProposal, int] = {}  # with the set of ranks that made it
        self._decoded: dict[bytes, MembershipProposal | None] = {}
        self._slice_s = max(SLICE_S, SLICE_EACH_S * self._size**2)
        self._published: MembershipProposal | None = None
        self._began = time.monotonic()

    def decide(self) -> Agreement:
        """Agree with the other ranks.

        Raises:
            Evicted: they go on without this rank.  CallMismatch: the ranks' calls do not fit.
            Timeout: no agreement came about.
        """
        try:
            return self._agreed()
        except (Evicted, CallMismatch, Timeout):
            raise
        except BaseException:  # such as Ctrl-C: the others must not count on this rank
            if self._engine.settle(self._rank, Fate.OPEN) != Fate.DECIDED:
                self._agreement.resign("its call of shrink was interrupted")
                self._publish()
            raise

    def _agreed(self) -> Agreement:
        self._publish()
        moved = False
        while True:
            outcome = self._advance(look=not moved)
            if outcome in (Outcome.DECIDING, Outcome.DECIDED):
                # Its set comes first: once the fate says that this rank has decided, others take it over.
                self._publish(self._agreement.acknowledged())
                if self._engine.settle(self._rank, Fate.DECIDED) != Fate.DECIDED:
                    raise self._evicted()
                self._agreement.decide()
                self._publish()
                return self._agreement
            self._publish()
            if outcome is Outcome.REFUSED:
                raise CallMismatch(self._refusal(), self._agreement.again, self._agreement.newest)
            if outcome is Outcome.EVICTED:
                raise self._evicted()
            self._check()
            if waits := ranks_of(self._agreement.behind(self._proposals)):
                moved = self._reader.sleep(waits[0], self._slice_s)

    def _advance(self, *, look: bool) -> Outcome:
        """look: also at the processes of ranks that are behind. Those that all exclude are evicted first."""
        self._read()
        findings = {}
        evicts = self._agreement.excluded and self._agreement.phase is Phase.ACKNOWLEDGED
        if look or evicts:
            findings = self._contacts.find(self._agreement, self._agreement.behind(self._proposals))
            self._read()  # after the findings: a rank that has ended may have decided before
        if self._engine.settle(self._rank, Fate.OPEN) == Fate.EVICTED:
            return Outcome.EVICTED
        return self._agreement.advance(self._proposals, findings, self._contacts.decided)

    def _read(self) -> None:
        """Read the proposals that are new. Most ranks propose the same, so each is decoded once."""
        new: dict[bytes, int] = {}
        for rank, encoded in self._reader.read():
            new[encoded] = new.get(encoded, 0) | 1 << rank
        for encoded, ranks in new.items():
            if encoded not in self._decoded:
                self._decoded[encoded] = decode(encoded)
            one = self._decoded[encoded]
            if one is None or one.alive >> self._size:
                continue
            before = {each: rest for each, held in self._proposals.items() if (rest := held & ~ranks)}
            self._proposals = {**before, one: before.get(one, 0) | ranks}
            self._contacts.moved(ranks, one.attempt >= self._agreement.attempt)

    def _publish(self, mine: MembershipProposal | None = None) -> None:
        mine = mine or self._agreement.proposal()
        if mine != self._published:
            self._engine.propose(encode(mine, self._size))
            self._published = mine

    def _check(self) -> None:
        """Wake ranks that wait for this one in another call, and end an agreement that does not."""
        now = time.monotonic()
        if now > self._deadline + OVERTIME_S:
            behind = ranks_of(self._agreement.behind(self._proposals))
            self._agreement.resign(f"rank {self._rank} gave up: no agreement within its timeout")
            self._publish()
            where = f"group={self._group.name} rank={self._rank}/{self._size}"
            raise Timeout(
                message(f"shrink: no agreement with rank {', '.join(map(str, behind))}", where=where)
            )
        if now > self._began + GRACE_S and not self._engine.faulted and self._engine.behind_others:
            self._engine.report(2**64 - 1, "its call of shrink")
            self._engine.abort()

    def _refusal(self) -> str:
        return message(
            f"shrink: the ranks of group {self._group.name!r} disagree",
            observed=self._agreement.why,
            remedy="Every rank that stays calls shrink with the same list.",
        )

    def _evicted(self) -> Evicted:
        if self._agreement.phase is not Phase.RESIGNED:
            self._agreement.resign("evicted")
        why = self._agreement.why
        if why in ("", "evicted"):
            found = eviction(self._engine, self._rank, self._size)
            why = found.why if found else ""
        self._publish()
        return self._group._planner.evicted("shrink", why)


def await_last_calls(group: MembershipGroup, ranks: Sequence[int]) -> None:
    """Wait until these ranks have ended the collectives that have ended here.

    A rank may return from a barrier before another one does. To exclude that one, or to abort, would end its
    barrier with an error.
    """
    engine = group._planner.engine
    ended = engine.record_of(group.rank).finished
    deadline = time.monotonic() + LAST_CALLS_S
    behind = list(ranks)
    while behind and not engine.faulted and time.monotonic() < deadline:
        behind = [rank for rank in behind if _is_behind(engine, rank, ended)]
        if behind:
            engine.ask()
            time.sleep(SLICE_S)


def _is_behind(engine: _native.Engine, rank: int, ended: int) -> bool:
    record = engine.record_of(rank)
    return record.finished < ended and not record.left and engine.state(rank) == Contact.OPEN


def agree(
    group: MembershipGroup, excluded: tuple[int, ...], deadline: float, attempt: int, following: str = ""
) -> Agreement:
    """Agree on the next membership; see `_Agreeing.decide`."""
    return _Agreeing(group, excluded, deadline, attempt, following).decide()


def refuse(group: MembershipGroup, attempt: int, why: str) -> None:
    """Tell the other ranks that this one cannot make the next group of this attempt: then nobody does."""
    agreement = Agreement(group.rank, group.size, attempt)
    agreement.refuse(why)
    group._planner.engine.propose(encode(agreement.proposal(), group.size))


def form(
    group: MembershipGroup, identity: Identity, agreement: Agreement, deadline: float
) -> tuple[_native.Engine, Identity, list[int], OpenConnections]:
    """The next engine, its identity, its ranks as they were numbered, and connections to keep open."""
    engine = group._planner.engine
    kept = ranks_of(agreement.alive)
    if not engine.faulted:  # ranks that were left out learn it at their next call
        engine.report(2**64 - 1, "its call of shrink")
        engine.abort()
    if engine.unsettled:
        _end_writers(engine, agreement)
    following = next_identity(identity, kept)
    left_s = max(1.0, min(HAND_OVER_S, deadline - time.monotonic()))
    made, rest = next_engine(engine, following, kept, kept.index(group.rank), group.size, left_s)
    return made, following, kept, rest


def departures(group: MembershipGroup, agreement: Agreement, generation: int) -> tuple[Departure, ...]:
    """The ranks of a group that are not in the next one."""
    engine = group._planner.engine
    fault = engine.read_fault(refresh=False)
    found = []
    for rank in range(group.size):
        if agreement.alive >> rank & 1:
            continue
        why = agreement.reasons.get(rank, "")
        if why == "ended" and fault.kind == FaultKind.PEER_LOST and fault.rank == rank:
            why = _how(fault.signal, fault.exit_code)
        record = engine.record_of(rank)
        found.append(Departure(rank, group._hosts[rank], record.pid, why, last_operation(record), generation))
    return tuple(found)


def _how(ended_by: int, exit_code: int) -> str:
    if ended_by:
        return f"ended by {signal_name(ended_by)}"
    return f"ended with exit code {exit_code}" if exit_code >= 0 else "ended"


def _end_writers(engine: _native.Engine, agreement: Agreement) -> None:
    """End the evicted processes of this host that may hold a piece of a copy into this rank's memory.

    A process that was stopped inside such a copy would write when it continues, into an array that its owner
    uses again. Nothing else keeps it from that.
    """
    for rank in range(agreement.size):
        if agreement.alive >> rank & 1:
            continue
        fd = engine.pidfd(rank)
        if fd >= 0 and engine.record_of(rank).pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
