"""The cost of a plan: messages, bytes and seconds, counted on its steps.

The model is that of `simulation.py`. Where a rank writes once for many readers, as in shared memory, `depth`
is the better count of latencies, and `shared_seconds` the price.

It does not prove a plan, and it prices chunks as equal parts of the buffer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from unisono.engine.costs.machine import MachineCalibration
from unisono.engine.costs.simulation import LinkCost, crosses_hosts, end, parts_of, sends_of
from unisono.plans import CONTRACTS, Plan, Recv, Reduce, Send
from unisono.plans.plan import Step

if TYPE_CHECKING:
    from fractions import Fraction

MESSAGE_S = 1e-7
"""What the engine adds to the flag of a message in shared memory: finding it, checking it, releasing it."""


def seconds(
    plan: Plan, nbytes: float, *, a: float, b: float, g: float = 0.0, between: LinkCost | None = None
) -> float:
    """The time until the plan's last rank is done.

    Args:
        nbytes: of the whole buffer; of the larger one where input and output differ (all_gather: the result).
        a: seconds per message.  b: seconds per byte sent.  g: seconds per byte reduced.
        between: a and b between ranks of different hosts (`plan.hosts`); None: as inside.
    Raises:
        PlanError: the plan deadlocks.
    Example: a linear broadcast among p ranks takes (p-1)(a + b*nbytes).
    """
    chunk = nbytes / parts_of(plan)
    return end(plan, chunk, LinkCost(a, b), between, g * chunk)


def formula(plan: Plan) -> str:
    """The time in a (a message), b (a byte sent) and g (a byte reduced), each counted alone, L the buffer.

    Example (ring all_reduce, p=4): "6 a + 3/2 bL + 3/4 gL".
    """
    from fractions import Fraction

    parts = parts_of(plan)  # as many bytes make the times whole numbers
    counts = {"a": Fraction(rounds(plan))}
    if CONTRACTS[plan.collective].counts:  # a barrier has no bytes
        counts["bL"] = Fraction(round(seconds(plan, parts, a=0, b=1)), parts)
        counts["gL"] = Fraction(round(seconds(plan, parts, a=0, b=0, g=1)), parts)
    terms = [f"{'' if count == 1 else f'{count} '}{unit}" for unit, count in counts.items() if count]
    return " + ".join(terms) or "0"


def rounds(plan: Plan) -> int:
    """How often the latency `a` counts: successive messages, by the model."""
    return round(end(plan, 0, LinkCost(1, 0), None, 0))


def depth(plan: Plan) -> int:
    """The longest chain of messages of which each waits for the one before.

    This is the latency if a rank can write to all others at once. At most `rounds`.
    """
    return round(end(plan, 0, LinkCost(1, 0), None, 0, one_at_a_time=False))


def bytes_sent(plan: Plan) -> list[Fraction]:
    """The bytes that each rank sends, as a fraction of the buffer; to two receivers they count twice.

    Example: 2(p-1)/p for every rank of the ring all_reduce.
    """
    from fractions import Fraction

    chunks = [sum(len(step.to) for step in steps if isinstance(step, Send)) for steps in plan.steps]
    return [Fraction(count, parts_of(plan)) for count in chunks]


def messages(plan: Plan) -> list[int]:
    """How many messages each rank sends; to two receivers they count as two."""
    return [sum(len(step.to) for step, _ in sends_of(steps)) for steps in plan.steps]


def link_bytes(plan: Plan) -> dict[int, tuple[Fraction, Fraction]]:
    """The bytes on each host's link (out, in), as a fraction of the buffer, by `plan.hosts`.

    Example: 2(h-1)/h both ways on every one of h hosts, for the hierarchical all_reduce.
    """
    from fractions import Fraction

    out: Counter[int] = Counter()
    into: Counter[int] = Counter()
    for sender, receiver, count in _crossing(plan):
        out[plan.hosts[sender]] += count
        into[plan.hosts[receiver]] += count
    parts = parts_of(plan)
    return {
        host: (Fraction(out[host], parts), Fraction(into[host], parts)) for host in sorted(set(plan.hosts))
    }


def busiest(plan: Plan, nbytes: float, *, inside: LinkCost, between: LinkCost, g: float = 0.0) -> float:
    """Seconds for which the busiest port, link or rank works: the price of one more segment of `nbytes`.

    Segments follow each other through a plan, so that in the long run latencies overlap and only this counts.
    """
    busy: defaultdict[tuple[str, int], float] = defaultdict(float)
    chunk = nbytes / parts_of(plan)
    for rank, steps in enumerate(plan.steps):
        for step, count in sends_of(steps):
            for receiver in step.to:
                apart = crosses_hosts(plan, rank, receiver)
                edge = between if apart else inside
                for port in ("out", rank), ("in", receiver):
                    busy[port] += edge.b * chunk * count
                for link in (
                    (("link out", plan.hosts[rank]), ("link in", plan.hosts[receiver])) if apart else ()
                ):
                    busy[link] += edge.b * chunk * count
        adds = sum(len(step.frm) - 1 for step in steps if isinstance(step, Reduce))
        busy["adds", rank] += g * chunk * adds
    return max(busy.values(), default=0.0)


def sending(plan: Plan, rank: int, nbytes: float, *, inside: LinkCost, between: LinkCost) -> float:
    """Seconds for which `rank` is busy sending, by its own steps alone: the plan takes no less."""
    chunk = nbytes / parts_of(plan)
    edges = (
        (between if crosses_hosts(plan, rank, receiver) else inside, count)
        for step, count in sends_of(plan.steps[rank])
        for receiver in step.to
    )
    return sum(edge.a + edge.b * chunk * count for edge, count in edges)


def shared_seconds(plan: Plan, nbytes: float, machine: MachineCalibration) -> float:
    """How long a call takes between ranks that share memory, Python's part included.

    The price assumes that a sender copies each chunk once into staging memory, which stays in a cache. A
    receiver copies it out; a rank that reduces reads it there. (Zero copy large chunks costs less.) The other
    end of a copy is the caller's memory, and the slower end counts. All ranks do so at once,
    the busiest counts. More ranks than cores take turns: their calls and their work add up, and a message
    waits for others to come and go.

    Args:
        nbytes: of the whole buffer; of the larger one where input and output differ.
    """
    chunk = nbytes / parts_of(plan)
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


def _crossing(plan: Plan) -> Iterator[tuple[int, int, int]]:
    """(sender, receiver, chunks) of what goes from host to host."""
    for rank, steps in enumerate(plan.steps):
        for step, count in sends_of(steps):
            yield from (
                (rank, receiver, count) for receiver in step.to if crosses_hosts(plan, rank, receiver)
            )
