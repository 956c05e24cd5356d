"""What a plan costs: messages, bytes and seconds, counted on its steps.

The model is the usual one: full duplex, every rank sends one message at a time and takes one at a time; a
message of l bytes takes a + b*l, combining two buffers of l bytes takes g*l, copying takes nothing. Sends
that stand side by side and go to the same ranks are one message. Between hosts a and b are others, and the
bytes of all ranks of a host pass its one link, one message after the other each way. Where a rank writes
once for many readers, as in shared memory, `depth` is the better count of latencies, and `shared_seconds`
the price.

It does not prove a plan, and it prices chunks as equal parts of the buffer.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from unisono.costs.machine import Calibration
from unisono.errors import PlanError
from unisono.plans import CONTRACTS, Copy, Plan, Recv, Reduce, Send
from unisono.plans.plan import Step

if TYPE_CHECKING:
    from fractions import Fraction

__all__ = [
    "Edge",
    "Message",
    "Trace",
    "busiest",
    "bytes_sent",
    "depth",
    "formula",
    "link_bytes",
    "messages",
    "rounds",
    "seconds",
    "sending",
    "shared_seconds",
    "trace",
]

MESSAGE_S = 1e-7
"""What the engine adds to the flag of a message in shared memory: finding it, checking it, releasing it."""

_ARRIVES, _ASKS = 0, 1  # at one moment, ports are freed before anybody asks for them


class Edge(NamedTuple):
    """What a message costs: a seconds, and b seconds per byte."""

    a: float
    b: float


class Message(NamedTuple):
    """What one rank sends another at once.

    Attributes:
        step, sends: the sender's step that sends it, and how many sends from there on travel together.
        end: when it has arrived, in the unit of the edges.
    """

    sender: int
    receiver: int
    step: int
    sends: int
    end: float


class Trace(NamedTuple):
    """When the steps of a plan happen.

    Attributes:
        messages: in the order in which they leave.
        done: done[rank][step], when that step is done; a Send is done as soon as its message waits to leave.
    """

    messages: list[Message]
    done: list[list[float]]


def seconds(
    plan: Plan, nbytes: float, *, a: float, b: float, g: float = 0.0, between: Edge | None = None
) -> float:
    """How long the plan takes until its last rank is done.

    Args:
        nbytes: of the whole buffer; of the larger one where input and output differ (all_gather: the result).
        a: seconds per message.  b: seconds per byte sent.  g: seconds per byte reduced.
        between: a and b between ranks of different hosts (`plan.hosts`); None: as inside.
    Raises:
        PlanError: the plan deadlocks.
    Example: a linear broadcast among p ranks takes (p-1)(a + b*nbytes).
    """
    chunk = nbytes / _parts(plan)
    return _Simulation(plan, chunk, Edge(a, b), between, reduce_s=g * chunk).finish()


def trace(
    plan: Plan, nbytes: float = 0, *, a: float = 1, b: float = 0, g: float = 0, between: Edge | None = None
) -> Trace:
    """When each message of the plan arrives and each step is done; arguments as for `seconds`.

    With the default figures times are rounds: a message that arrives at 3 is one of the third round. In a
    round every rank sends one message at most, and takes one at most.

    Raises:
        PlanError: the plan deadlocks.
    """
    chunk = nbytes / _parts(plan)
    found = Trace([], [[] for _ in range(plan.size)])
    _Simulation(plan, chunk, Edge(a, b), between, reduce_s=g * chunk, seen=found).finish()
    return found


def formula(plan: Plan) -> str:
    """The time in a (a message), b (a byte sent) and g (a byte reduced), each counted alone, L the buffer.

    Example (ring all_reduce, p=4): "6 a + 3/2 bL + 3/4 gL".
    """
    from fractions import Fraction

    parts = _parts(plan)  # as many bytes make the times whole numbers
    counts = {"a": Fraction(rounds(plan))}
    if CONTRACTS[plan.collective].counts:  # a barrier has no bytes
        counts["bL"] = Fraction(round(seconds(plan, parts, a=0, b=1)), parts)
        counts["gL"] = Fraction(round(seconds(plan, parts, a=0, b=0, g=1)), parts)
    terms = [f"{'' if count == 1 else f'{count} '}{unit}" for unit, count in counts.items() if count]
    return " + ".join(terms) or "0"


def rounds(plan: Plan) -> int:
    """How often the latency `a` is paid: messages one behind the other, as the model has it."""
    return round(_Simulation(plan, 0, Edge(1, 0), None, reduce_s=0).finish())


def depth(plan: Plan) -> int:
    """The longest chain of messages of which each waits for the one before.

    This is what latency comes to when a rank can write to all others at once. At most `rounds`.
    """
    return round(_Simulation(plan, 0, Edge(1, 0), None, reduce_s=0, one_at_a_time=False).finish())


def bytes_sent(plan: Plan) -> list[Fraction]:
    """What each rank sends, as a fraction of the buffer; to two receivers is twice.

    Example: 2(p-1)/p for every rank of the ring all_reduce.
    """
    from fractions import Fraction

    chunks = [sum(len(step.to) for step in steps if isinstance(step, Send)) for steps in plan.steps]
    return [Fraction(count, _parts(plan)) for count in chunks]


def messages(plan: Plan) -> list[int]:
    """How many messages each rank sends; to two receivers are two."""
    return [sum(len(step.to) for step, _ in _sends(steps)) for steps in plan.steps]


def link_bytes(plan: Plan) -> dict[int, tuple[Fraction, Fraction]]:
    """What passes each host's link (out, in), as a fraction of the buffer; `plan.hosts` says who is where.

    Example: 2(h-1)/h both ways on every one of h hosts, for the hierarchical all_reduce.
    """
    from fractions import Fraction

    out: Counter[int] = Counter()
    into: Counter[int] = Counter()
    for sender, receiver, count in _crossing(plan):
        out[plan.hosts[sender]] += count
        into[plan.hosts[receiver]] += count
    parts = _parts(plan)
    return {
        host: (Fraction(out[host], parts), Fraction(into[host], parts)) for host in sorted(set(plan.hosts))
    }


def busiest(plan: Plan, nbytes: float, *, inside: Edge, between: Edge, g: float = 0.0) -> float:
    """Seconds for which the busiest port, link or rank is at work: what one more segment of `nbytes` takes.

    Segments follow each other through a plan, so that in the long run latencies overlap and only this counts.
    """
    busy: defaultdict[tuple[str, int], float] = defaultdict(float)
    chunk = nbytes / _parts(plan)
    for rank, steps in enumerate(plan.steps):
        for step, count in _sends(steps):
            for receiver in step.to:
                far = _far(plan, rank, receiver)
                edge = between if far else inside
                for port in ("out", rank), ("in", receiver):
                    busy[port] += edge.b * chunk * count
                for link in (
                    (("link out", plan.hosts[rank]), ("link in", plan.hosts[receiver])) if far else ()
                ):
                    busy[link] += edge.b * chunk * count
        adds = sum(len(step.frm) - 1 for step in steps if isinstance(step, Reduce))
        busy["adds", rank] += g * chunk * adds
    return max(busy.values(), default=0.0)


def sending(plan: Plan, rank: int, nbytes: float, *, inside: Edge, between: Edge) -> float:
    """Seconds for which `rank` is busy sending, by its own steps alone: the plan takes no less."""
    chunk = nbytes / _parts(plan)
    edges = (
        (between if _far(plan, rank, receiver) else inside, count)
        for step, count in _sends(plan.steps[rank])
        for receiver in step.to
    )
    return sum(edge.a + edge.b * chunk * count for edge, count in edges)


def shared_seconds(plan: Plan, nbytes: float, machine: Calibration) -> float:
    """How long a call takes between ranks that share memory, Python's part included.

    Every chunk that is sent is taken as copied once into staging, which stays in a cache, whoever reads it;
    who receives it copies it out, who reduces reads it there (large ones are lent, which costs less). The
    other end of a copy is the caller's memory, and whichever end is slower counts. All ranks do so at once,
    the busiest counts. More ranks than cores take turns: their calls and their work add up, and a message
    waits for others to come and go.

    Args:
        nbytes: of the whole buffer; of the larger one where input and output differ.
    """
    chunk = nbytes / _parts(plan)
    spaces = sum(plan.chunks(space) for space in ("out", "in"))
    own = 0.5 / machine.copy.at(machine.level(chunk * spaces))  # a copy reads and writes, we do one of them
    give, take = max(own, 1 / machine.give), max(own, 1 / machine.take)
    work = max(sum(_work(step, chunk, give, take) for step in steps) for steps in plan.steps)
    crowd = max(1.0, plan.size / machine.cores) if machine.cores else 1.0
    latency = MESSAGE_S + (machine.flag_s if crowd == 1.0 else machine.crowd_s * crowd / 2)
    return depth(plan) * latency + (machine.call_s + work) * crowd


def _work(step: Step, chunk: float, give: float, take: float) -> float:
    """Seconds for which a step keeps its rank busy in shared memory; give and take are seconds per byte."""
    if isinstance(step, Reduce):
        return chunk * take * (len(step.frm) - 1)
    return chunk * (take if isinstance(step, Recv) else give)


def _parts(plan: Plan) -> int:
    return max(1, plan.chunks("out"), plan.chunks("in"))


def _far(plan: Plan, sender: int, receiver: int) -> bool:
    return bool(plan.hosts) and plan.hosts[sender] != plan.hosts[receiver]


def _crossing(plan: Plan) -> Iterator[tuple[int, int, int]]:
    """(sender, receiver, chunks) of what goes from host to host."""
    for rank, steps in enumerate(plan.steps):
        for step, count in _sends(steps):
            yield from ((rank, receiver, count) for receiver in step.to if _far(plan, rank, receiver))


def _together(steps: tuple[Step, ...], number: int) -> int:
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


def _sends(steps: tuple[Step, ...]) -> Iterator[tuple[Send, int]]:
    """(first send, chunks) of every message."""
    number = 0
    while number < len(steps):
        step, count = steps[number], 1
        if isinstance(step, Send):
            count = _together(steps, number)
            yield step, count
        number += count


class _Rank:
    """A rank of the simulation.

    Attributes:
        next_step, now: how far it has come, and when.
        outbox: (receiver, when it was ready, step, chunks) of messages not sent yet; the first asks next.
        taking: whether a message is arriving.  waiting: senders that ask: (since, distance, rank).
    """

    def __init__(self) -> None:
        self.next_step = 0
        self.now: float = 0  # whole numbers and fractions stay exact
        self.outbox: deque[tuple[int, float, int, int]] = deque()
        self.taking = False
        self.waiting: list[tuple[float, int, int]] = []


class _Simulation:
    """Runs a plan event by event. Messages wait in their sender until both ends are free; who asked
    first goes first, then who is nearer on the left of the receiver.
    """

    def __init__(
        self,
        plan: Plan,
        chunk: float,
        inside: Edge,
        between: Edge | None,
        *,
        reduce_s: float,
        one_at_a_time: bool = True,
        seen: Trace | None = None,
    ) -> None:
        self._plan = plan
        self._chunk = chunk
        self._inside = inside
        self._between = between
        self._reduce_s = reduce_s
        self._one_at_a_time = one_at_a_time
        self._seen = seen
        self._ranks = [_Rank() for _ in range(plan.size)]
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
                count = _together(steps, rank.next_step)
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
        end = self._start(sender, receiver, count, time)
        if self._seen is not None:
            self._seen.messages.append(Message(sender, receiver, step, count, end))

    def _start(self, sender: int, receiver: int, count: int, time: float) -> float:
        """A message leaves; when it will have arrived."""
        far = self._between is not None and _far(self._plan, sender, receiver)
        edge = self._between if far and self._between is not None else self._inside
        passing = edge.b * self._chunk * count
        if far:
            hosts = self._plan.hosts
            links = ("out", hosts[sender]), ("in", hosts[receiver])
            time = max([time, *(self._links.get(link, time) for link in links)])
            self._links.update(dict.fromkeys(links, time + passing))
        end = time + edge.a + passing
        self._push(end, _ARRIVES, sender, receiver, count)
        return end

    def _arrive(self, sender: int, receiver: int, count: int, time: float) -> None:
        self._arrived.setdefault((sender, receiver), deque()).extend([time] * count)
        if self._one_at_a_time:
            self._free(sender, receiver, time)
        self._advance(receiver)

    def _free(self, sender: int, receiver: int, time: float) -> None:
        """A message has arrived: both its ends turn to the next one."""
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
