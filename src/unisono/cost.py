"""What a plan costs: messages, bytes and seconds, counted on its steps.

The model is the usual one: full duplex, every rank sends one message at a time and takes one at a time; a
message of l bytes takes a + b*l, combining two buffers of l bytes takes g*l, copying takes nothing. Where
a rank writes once for many readers, as in shared memory, `depth` is the better count of latencies.

It does not prove a plan, and it prices chunks as equal parts of the buffer.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction

from unisono.errors import PlanError
from unisono.plans import Copy, Plan, Recv, Reduce, Send

__all__ = ["bytes_sent", "depth", "rounds", "seconds"]

_ARRIVES, _ASKS = 0, 1  # at one moment, ports are freed before anybody asks for them


def seconds(plan: Plan, nbytes: float, *, a: float, b: float, g: float = 0.0) -> float:
    """How long the plan takes until its last rank is done.

    Args:
        nbytes: of the whole buffer; of the larger one where input and output differ (all_gather: the result).
        a: seconds per message.  b: seconds per byte sent.  g: seconds per byte reduced.
    Raises:
        PlanError: the plan deadlocks.
    Example: a linear broadcast among p ranks takes (p-1)(a + b*nbytes).
    """
    chunk = nbytes / _parts(plan)
    return _Simulation(plan, message_s=a + b * chunk, reduce_s=g * chunk).finish()


def rounds(plan: Plan) -> int:
    """How often the latency `a` is paid: messages one behind the other, as the model has it."""
    return round(_Simulation(plan, message_s=1, reduce_s=0).finish())


def depth(plan: Plan) -> int:
    """The longest chain of messages of which each waits for the one before.

    This is what latency comes to when a rank can write to all others at once. At most `rounds`.
    """
    return round(_Simulation(plan, message_s=1, reduce_s=0, one_at_a_time=False).finish())


def bytes_sent(plan: Plan) -> list[Fraction]:
    """What each rank sends, as a fraction of the buffer; to two receivers is twice.

    Example: 2(p-1)/p for every rank of the ring all_reduce.
    """
    messages = [sum(len(step.to) for step in steps if isinstance(step, Send)) for steps in plan.steps]
    return [Fraction(count, _parts(plan)) for count in messages]


def _parts(plan: Plan) -> int:
    return max(1, plan.chunks("out"), plan.chunks("in"))


@dataclass
class _Rank:
    """A rank of the simulation.

    Attributes:
        next_step, now: how far it has come, and when.
        outbox: (receiver, when it was ready) of messages not yet on their way; the first asks for its turn.
        taking: whether a message is arriving.  waiting: senders that ask: (since, distance, rank).
    """

    next_step: int = 0
    now: float = 0
    outbox: deque[tuple[int, float]] = field(default_factory=deque)
    taking: bool = False
    waiting: list[tuple[float, int, int]] = field(default_factory=list)


class _Simulation:
    """Runs a plan event by event. Messages wait in their sender until both ends are free; who asked
    first goes first, then who is nearer on the left of the receiver.
    """

    def __init__(self, plan: Plan, *, message_s: float, reduce_s: float, one_at_a_time: bool = True) -> None:
        self._plan = plan
        self._message_s = message_s
        self._reduce_s = reduce_s
        self._one_at_a_time = one_at_a_time
        self._ranks = [_Rank() for _ in range(plan.size)]
        self._arrived: dict[tuple[int, int], deque[float]] = {}
        self._events: list[tuple[float, int, int, int, int]] = []  # time, kind, distance, sender, receiver

    def finish(self) -> float:
        """Run to the end; when that is."""
        for rank in range(self._plan.size):
            self._advance(rank)
        while self._events:
            time, kind, _, sender, receiver = heapq.heappop(self._events)
            if kind == _ASKS:
                self._ask(sender, receiver, time)
            else:
                self._arrive(sender, receiver, time)
        self._check_end()
        return max(rank.now for rank in self._ranks)

    def _check_end(self) -> None:
        for number, (rank, steps) in enumerate(zip(self._ranks, self._plan.steps, strict=True)):
            if rank.next_step < len(steps):
                step = steps[rank.next_step]
                raise PlanError(
                    f"{self._plan}: rank {number}, step {rank.next_step}, {step}: waits for ever; "
                    "prove the plan first"
                )

    # ---- a rank's program ----------------------------------------------------------------------------

    def _advance(self, number: int) -> None:
        """Run the steps of a rank that can run now."""
        rank, steps = self._ranks[number], self._plan.steps[number]
        while rank.next_step < len(steps):
            step = steps[rank.next_step]
            if isinstance(step, Send):
                for receiver in step.to:
                    self._send(number, receiver)
            elif not isinstance(step, Copy) and not self._take(number, step):
                return
            rank.next_step += 1

    def _take(self, number: int, step: Recv | Reduce) -> bool:
        """Take what a step waits for, if all of it is here."""
        sources = (step.frm,) if isinstance(step, Recv) else tuple(r for r in step.frm if r != number)
        edges = [self._arrived.setdefault((source, number), deque()) for source in sources]
        if not all(edges):
            return False
        rank = self._ranks[number]
        rank.now = max([rank.now, *(edge.popleft() for edge in edges)])
        if isinstance(step, Reduce):
            rank.now += self._reduce_s * (len(step.frm) - 1)
        return True

    # ---- messages ------------------------------------------------------------------------------------

    def _send(self, sender: int, receiver: int) -> None:
        rank = self._ranks[sender]
        if not self._one_at_a_time:
            self._start(sender, receiver, rank.now)
            return
        rank.outbox.append((receiver, rank.now))
        if len(rank.outbox) == 1:
            self._push(rank.now, _ASKS, sender, receiver)

    def _ask(self, sender: int, receiver: int, time: float) -> None:
        """The first message of a sender wants to leave."""
        target = self._ranks[receiver]
        if target.taking:
            heapq.heappush(target.waiting, (time, self._distance(sender, receiver), sender))
            return
        target.taking = True
        self._start(sender, receiver, time)

    def _start(self, sender: int, receiver: int, time: float) -> None:
        self._push(time + self._message_s, _ARRIVES, sender, receiver)

    def _arrive(self, sender: int, receiver: int, time: float) -> None:
        self._arrived.setdefault((sender, receiver), deque()).append(time)
        if self._one_at_a_time:
            self._free(sender, receiver, time)
        self._advance(receiver)

    def _free(self, sender: int, receiver: int, time: float) -> None:
        """A message has arrived: both its ends turn to the next one."""
        outbox, target = self._ranks[sender].outbox, self._ranks[receiver]
        outbox.popleft()
        if outbox:
            following, ready = outbox[0]
            self._push(max(time, ready), _ASKS, sender, following)
        target.taking = bool(target.waiting)
        if target.waiting:
            self._start(heapq.heappop(target.waiting)[2], receiver, time)

    def _push(self, time: float, kind: int, sender: int, receiver: int) -> None:
        heapq.heappush(self._events, (time, kind, self._distance(sender, receiver), sender, receiver))

    def _distance(self, sender: int, receiver: int) -> int:
        return (receiver - sender) % self._plan.size
