"""Traces the results of one rank back to the contributions in them.

The proof finds this for all ranks by running all of them. A rank that needs only its own code uses this
module: it builds only those steps of other ranks that lead to its own results, or to answers to its own
messages. In most plans these are few. It trusts the plan: `proof.prove` refuses wrong ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import itemgetter

from unisono.errors import PlanError
from unisono.plans.plan import Chunk, Copy, Recv, Reduce, Send, Step

_Node = tuple[int, int]
"""(rank, number of the step that wrote a value); number -1: the rank's initial value."""


class _RankTrace:
    """A rank's steps, built as far as needed, and the origins of its values and messages."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._coming = iter(steps)
        self.steps: list[Step] = []
        self.sent: dict[int, list[tuple[int, Chunk]]] = defaultdict(list)  # receiver: (step, chunk)
        self.taken: dict[int, list[int]] = defaultdict(list)  # sender: steps, one for each message
        self._writes: dict[Chunk, list[int]] = defaultdict(list)

    def read(self) -> bool:
        """Build one more step; returns whether there was one."""
        step = next(self._coming, None)
        if step is None:
            return False
        number = len(self.steps)
        self.steps.append(step)
        if isinstance(step, Send):
            for peer in step.to:
                self.sent[peer].append((number, step.chunk))
            return True
        self._writes[step.dst if isinstance(step, Copy) else step.chunk].append(number)
        for peer in () if isinstance(step, Copy) else (step.frm,) if isinstance(step, Recv) else step.frm:
            self.taken[peer].append(number)
        return True

    def read_on(self) -> None:
        """Build one more step, which a proved plan has."""
        if not self.read():
            raise PlanError(
                "a rank waits for a message that no rank sends, or sends one that no rank receives"
            )

    def sends(self, number: int, peer: int) -> int:
        """How many messages to a peer are sent before a step."""
        return bisect_left(self.sent[peer], number, key=itemgetter(0))

    def takes(self, number: int, peer: int) -> int:
        """How many messages of a peer are received before a step."""
        return bisect_left(self.taken[peer], number)

    def written(self, chunk: Chunk, before: int) -> int:
        """The last step before `before` that wrote a chunk, or -1."""
        numbers = self._writes.get(chunk, [])
        place = bisect_left(numbers, before)
        return numbers[place - 1] if place else -1


class Provenance:
    """Traces the values of a plan back.

    Args:
        steps: rank -> its steps.
    """

    def __init__(self, steps: Callable[[int], Iterable[Step]]) -> None:
        self._function = steps
        self._ranks: dict[int, _RankTrace] = {}
        self._known: dict[_Node, int] = {}

    def steps(self, rank: int) -> list[Step]:
        """All steps of a rank."""
        mine = self._rank(rank)
        while mine.read():
            pass
        return mine.steps

    def ranks(self, rank: int, number: int) -> int:
        """The contributions in the result of a rank's step: bit r for rank r."""
        wanted: list[_Node] = [(rank, number)]
        while wanted:
            node = wanted[-1]
            if node[1] < 0:
                self._known[node] = 1 << node[0]
            sources = [] if node in self._known else self._sources(*node)
            missing = [source for source in sources if source not in self._known]
            wanted += missing
            if missing:
                continue
            for source in sources:
                self._known[node] = self._known.get(node, 0) | self._known[source]
            wanted.pop()
        return self._known[rank, number]

    def answered(self, rank: int, sent: int, taken: int, peer: int) -> bool:
        """Whether a peer receives a rank's message of step `sent` before it sends that of step `taken`."""
        mine, theirs = self._rank(rank), self._rank(peer)
        message, answer = mine.sends(sent, peer), mine.takes(taken, peer)
        takes, sends = theirs.taken[rank], theirs.sent[rank]
        while len(takes) <= message and len(sends) <= answer:
            theirs.read_on()
        return len(takes) > message and (len(sends) <= answer or takes[message] < sends[answer][0])

    def _rank(self, rank: int) -> _RankTrace:
        if rank not in self._ranks:
            self._ranks[rank] = _RankTrace(self._function(rank))
        return self._ranks[rank]

    def _sources(self, rank: int, number: int) -> list[_Node]:
        mine = self._ranks[rank]
        step = mine.steps[number]
        if isinstance(step, Copy):
            return [(rank, mine.written(step.src, number))]
        if isinstance(step, Recv):
            return [self._message(step.frm, rank, mine.takes(number, step.frm))]
        assert isinstance(step, Reduce)
        own = (rank, mine.written(step.own or step.chunk, number))
        return [
            own if peer == rank else self._message(peer, rank, mine.takes(number, peer)) for peer in step.frm
        ]

    def _message(self, sender: int, receiver: int, count: int) -> _Node:
        theirs = self._rank(sender)
        sent = theirs.sent[receiver]
        while len(sent) <= count:
            theirs.read_on()
        number, chunk = sent[count]
        return sender, theirs.written(chunk, number)
