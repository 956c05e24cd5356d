"""When the steps of a plan happen and its messages arrive: a run of the plan, event by event.

The model is the usual one: full duplex, every rank sends one message at a time and takes one at a time; a
message of l bytes takes a + b*l, combining two buffers of l bytes takes g*l, copying takes nothing. Sends
that stand side by side and go to the same ranks are one message. Between hosts a and b are others, and the
bytes of all ranks of a host pass its one link, one message after the other each way.

It does not prove a plan, and it takes chunks as equal parts of the buffer.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from unisono.errors import PlanError
from unisono.plans import Copy, Plan, Recv, Reduce, Send
from unisono.plans.plan import Step

__all__ = ["LinkCost", "SimulationTrace", "TimedMessage", "end", "far", "parts_of", "sends_of", "trace"]

_ARRIVES, _ASKS = 0, 1  # at equal times, a port is freed before it is requested


class LinkCost(NamedTuple):
    """The cost of a message: a seconds, and b seconds per byte."""

    a: float
    b: float


class TimedMessage(NamedTuple):
    """A message from one rank to another.

    Attributes:
        step, sends: the sender's step that sends it, and how many sends from there on travel together.
        end: when it has arrived, in the unit of the edges.
    """

    sender: int
    receiver: int
    step: int
    sends: int
    end: float


class SimulationTrace(NamedTuple):
    """When the steps of a plan happen.

    Attributes:
        messages: in the order in which they leave.
        done: done[rank][step], when that step is done; a Send is done as soon as its message waits to leave.
    """

    messages: list[TimedMessage]
    done: list[list[float]]


def trace(
    plan: Plan,
    nbytes: float = 0,
    *,
    a: float = 1,
    b: float = 0,
    g: float = 0,
    between: LinkCost | None = None,
) -> SimulationTrace:
    """When each message of the plan arrives and each step is done; arguments as for `price.seconds`.

    With the default figures times are rounds: a message that arrives at 3 is one of the third round. In a
    round every rank sends one message at most, and takes one at most.

    Raises:
        PlanError: the plan deadlocks.
    """
    chunk = nbytes / parts_of(plan)
    found = SimulationTrace([], [[] for _ in range(plan.size)])
    _Simulation(plan, chunk, LinkCost(a, b), between, reduce_s=g * chunk, seen=found).finish()
    return found


def end(
    plan: Plan,
    chunk: float,
    inside: LinkCost,
    between: LinkCost | None,
    reduce_s: float,
    one_at_a_time: bool = True,
) -> float:
    """When the last rank is done, with chunks of `chunk` bytes, each of which takes `reduce_s` to reduce.

    Args:
        one_at_a_time: False: a rank sends to all others at once.
    Raises:
        PlanError: the plan deadlocks.
    """
    return _Simulation(plan, chunk, inside, between, reduce_s=reduce_s, one_at_a_time=one_at_a_time).finish()


def parts_of(plan: Plan) -> int:
    """The chunks that a whole buffer is cut into."""
    return max(1, plan.chunks("out"), plan.chunks("in"))


def far(plan: Plan, sender: int, receiver: int) -> bool:
    """Whether two ranks are on different hosts."""
    return bool(plan.hosts) and plan.hosts[sender] != plan.hosts[receiver]


def sends_of(steps: tuple[Step, ...]) -> Iterator[tuple[Send, int]]:
    """(first send, chunks) of every message."""
    number = 0
    while number < len(steps):
        step, count = steps[number], 1
        if isinstance(step, Send):
            count = _batch_of_sends(steps, number)
            yield step, count
        number += count


def _batch_of_sends(steps: tuple[Step, ...], number: int) -> int:
    """How many sends from step `number` on travel together with it."""
    first = steps[number]
    assert isinstance(first, Send)
    end = number + 1
    while end < len(steps):
        step = steps[end]
        if not isinstance(step, Send) or step.to != first.to:
            break
        end += 1
    return end - number


class _SimulatedRank:
    """A rank of the simulation.

    Attributes:
        next_step, now: how far it has come, and when.
        outbox: (receiver, when it was ready, step, chunks) of messages not sent yet, in order.
        taking: whether a message is arriving.  waiting: senders that ask: (since, distance, rank).
    """

    def __init__(self) -> None:
        self.next_step = 0
        self.now: float = 0  # whole numbers and fractions stay exact
        self.outbox: deque[tuple[int, float, int, int]] = deque()
        self.taking = False
        self.waiting: list[tuple[float, int, int]] = []


class _Simulation:
    """Runs a plan event by event. Messages wait in their sender until both ends are free. The sender that has
    waited longest is first, then the nearest one on the left of the receiver.
    """

    def __init__(
        self,
        plan: Plan,
        chunk: float,
        inside: LinkCost,
        between: LinkCost | None,
        *,
        reduce_s: float,
        one_at_a_time: bool = True,
        seen: SimulationTrace | None = None,
    ) -> None:
        self._plan = plan
        self._chunk = chunk
        self._inside = inside
        self._between = between
        self._reduce_s = reduce_s
        self._one_at_a_time = one_at_a_time
        self._seen = seen
        self._ranks = [_SimulatedRank() for _ in range(plan.size)]
        self._arrived: dict[tuple[int, int], deque[float]] = {}
        self._links: dict[tuple[str, int], float] = {}  # when a host's link is free again
        self._events: list[tuple[float, int, int, int, int, int]] = []  # time, kind, distance, ends, chunks

    def finish(self) -> float:
        """Run to the end; when that is."""
        for rank in range(self._plan.size):
            self._advance(rank)
        while self._events:
            time, kind, _, sender, receiver, count = heapq.heappop(self._events)
            if kind == _ASKS:
                self._ask(sender, receiver, time)
            else:
                self._arrive(sender, receiver, count, time)
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
            count = 1
            if isinstance(step, Send):
                count = _batch_of_sends(steps, rank.next_step)
                for receiver in step.to:
                    self._send(number, receiver, count)
            elif not isinstance(step, Copy) and not self._take(number, step):
                return
            rank.next_step += count
            if self._seen is not None:
                self._seen.done[number] += [rank.now] * count

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

    def _send(self, sender: int, receiver: int, count: int) -> None:
        rank = self._ranks[sender]
        if not self._one_at_a_time:
            self._start(sender, receiver, count, rank.now)
            return
        rank.outbox.append((receiver, rank.now, rank.next_step, count))
        if len(rank.outbox) == 1:
            self._push(rank.now, _ASKS, sender, receiver)

    def _ask(self, sender: int, receiver: int, time: float) -> None:
        """The first message of a sender wants to leave."""
        target = self._ranks[receiver]
        if target.taking:
            heapq.heappush(target.waiting, (time, self._distance(sender, receiver), sender))
            return
        target.taking = True
        self._start_first(sender, time)

    def _start_first(self, sender: int, time: float) -> None:
        """The first message of a sender leaves."""
        receiver, _, step, count = self._ranks[sender].outbox[0]
        arrival = self._start(sender, receiver, count, time)
        if self._seen is not None:
            self._seen.messages.append(TimedMessage(sender, receiver, step, count, arrival))

    def _start(self, sender: int, receiver: int, count: int, time: float) -> float:
        """A message leaves; when it will have arrived."""
        apart = self._between is not None and far(self._plan, sender, receiver)
        edge = self._between if apart and self._between is not None else self._inside
        passing = edge.b * self._chunk * count
        if apart:
            hosts = self._plan.hosts
            links = ("out", hosts[sender]), ("in", hosts[receiver])
            time = max([time, *(self._links.get(link, time) for link in links)])
            self._links.update(dict.fromkeys(links, time + passing))
        arrival = time + edge.a + passing
        self._push(arrival, _ARRIVES, sender, receiver, count)
        return arrival

    def _arrive(self, sender: int, receiver: int, count: int, time: float) -> None:
        self._arrived.setdefault((sender, receiver), deque()).extend([time] * count)
        if self._one_at_a_time:
            self._free(sender, receiver, time)
        self._advance(receiver)

    def _free(self, sender: int, receiver: int, time: float) -> None:
        """A message has arrived: both its ends begin the next one."""
        outbox, target = self._ranks[sender].outbox, self._ranks[receiver]
        outbox.popleft()
        if outbox:
            following, ready, *_ = outbox[0]
            self._push(max(time, ready), _ASKS, sender, following)
        target.taking = bool(target.waiting)
        if target.waiting:
            first = heapq.heappop(target.waiting)[2]
            self._start_first(first, time)

    def _push(self, time: float, kind: int, sender: int, receiver: int, count: int = 0) -> None:
        distance = self._distance(sender, receiver)
        heapq.heappush(self._events, (time, kind, distance, sender, receiver, count))

    def _distance(self, sender: int, receiver: int) -> int:
        return (receiver - sender) % self._plan.size
