"""When the steps of a plan happen and its messages arrive: a run of the plan in csrc/simulator/ports.hpp.

The model is the usual one: full duplex, every rank sends one message at a time and takes one at a time; a
message of l bytes takes a + b*l, combining two buffers of l bytes takes g*l, copying takes nothing. Sends
that stand side by side and go to the same ranks are one message. Between hosts a and b are others, and the
bytes of all ranks of a host pass its one link, one message after the other each way.

It does not prove a plan, and it takes chunks as equal parts of the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from unisono._native import simulate_ports
from unisono.errors import PlanError
from unisono.plans import Plan, Send
from unisono.plans.codes import plan_codes
from unisono.plans.plan import Step


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
    _, messages, done = _run(plan, chunk, LinkCost(a, b), between, g * chunk, traced=True)
    return SimulationTrace([TimedMessage(*message) for message in messages], done)


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
    return _run(plan, chunk, inside, between, reduce_s, one_at_a_time=one_at_a_time)[0]


def _run(
    plan: Plan,
    chunk: float,
    inside: LinkCost,
    between: LinkCost | None,
    reduce_s: float,
    *,
    one_at_a_time: bool = True,
    traced: bool = False,
) -> tuple[float, list[tuple[int, int, int, int, float]], list[list[float]]]:
    """(when the last rank is done, messages, done) of csrc/simulator/ports.hpp."""
    seconds, stuck, number, messages, done = simulate_ports(
        programs=plan_codes(plan),
        hosts=plan.hosts if between is not None else (),
        inside=(inside.a, inside.b * chunk),
        between=() if between is None else (between.a, between.b * chunk),
        reduce_s=reduce_s,
        one_at_a_time=one_at_a_time,
        traced=traced,
    )
    if stuck >= 0:
        step = plan.steps[stuck][number]
        raise PlanError(f"{plan}: rank {stuck}, step {number}, {step}: waits for ever; prove the plan first")
    return seconds, messages, done


def parts_of(plan: Plan) -> int:
    """The chunks that a whole buffer is cut into."""
    return max(1, plan.chunks("out"), plan.chunks("in"))


def crosses_hosts(plan: Plan, sender: int, receiver: int) -> bool:
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
