"""The caller's own algorithms: every step is checked, the plan is proved, and all of it is lowered.

The caller's function is not trusted: it may yield any object, without end.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from unisono.engine.base.validation import listed
from unisono.errors import PlanError
from unisono.plans.lowering import lower
from unisono.plans.plan import Chunk, Copy, Plan, Recv, Reduce, Send, Step, StepFunction

__all__ = ["CustomPlan", "prepare", "write"]

MOST_STEPS = 1 << 16
"""Of one rank: a plan with this many steps takes minutes to prove."""

MOST_CHUNKS = 1 << 16


class CustomPlan(NamedTuple):
    """A plan that was proved.

    Attributes:
        name: of the function.  code: of every rank, see `lowering`.
        number: identifies the whole plan when ranks compare their calls; never 0.
        canonical: see `proof.Proof`.
    """

    name: str
    code: list[list[int]]
    number: int
    canonical: bool


def prepare(
    collective: str, function: StepFunction, size: int, root: int, hosts: tuple[int, ...] = ()
) -> CustomPlan:
    """Collect the function's steps for every rank, prove the plan and lower it.

    Args:
        function: (rank, size, root) -> the steps of that rank. Its exceptions propagate to the caller.
    Raises:
        PlanError: the plan is wrong; the message shows the rank and the step.
        TypeError: the function yields an object that is no step.
    """
    from unisono.plans.proof import prove  # imported late: most ranks prove nothing

    plan = write(collective, function, size, root, hosts)
    proof = prove(plan)
    code = lower(plan)
    if len({tuple(each[:2]) for each in code}) > 1:
        raise PlanError(
            f"{collective}/{plan.algorithm} p={size}: ranks speak of different numbers of chunks; every rank "
            "must name all of them"
        )
    return CustomPlan(plan.algorithm, code, _number(collective, root, code), proof.canonical)


def write(collective: str, function: StepFunction, size: int, root: int, hosts: tuple[int, ...] = ()) -> Plan:
    """Collect the function's steps for every rank, without a proof.

    Raises:
        TypeError: the function yields an object that is no step.  ValueError: it yields too many.
    """
    name = str(getattr(function, "__name__", type(function).__name__))
    what = f"{collective}/{name} p={size}"
    steps = tuple(tuple(_steps(what, rank, function, size, root)) for rank in range(size))
    return Plan(collective, name, size, root, steps, hosts)


def _steps(what: str, rank: int, function: StepFunction, size: int, root: int) -> Iterator[Step]:
    given = function(rank, size, root)
    for number, step in enumerate(listed(given, f"{what}: what it gives rank {rank}", MOST_STEPS)):
        yield _checked(f"{what}: rank {rank}, step {number}", step)


def _checked(where: str, step: object) -> Step:
    """The step with plain integers.

    Raises:
        TypeError: it is no step.
    """
    if isinstance(step, Send):
        return Send(_chunk(where, step.chunk), _ranks(where, step.to))
    if isinstance(step, Recv):
        return Recv(_chunk(where, step.chunk), _ranks(where, (step.frm,))[0])
    if isinstance(step, Reduce):
        own = None if step.own is None else _chunk(where, step.own)
        return Reduce(_chunk(where, step.chunk), _ranks(where, step.frm), own)
    if isinstance(step, Copy):
        return Copy(_chunk(where, step.dst), _chunk(where, step.src))
    raise TypeError(
        f"{where}: got a {type(step).__name__}, expected Send, Recv, Reduce or Copy of unisono.plans"
    )


def _chunk(where: str, chunk: object) -> Chunk:
    if isinstance(chunk, Chunk):
        space, index = chunk
        if space in ("out", "in", "tmp") and type(index) is int and 0 <= index < MOST_CHUNKS:
            return chunk
    raise TypeError(f"{where}: {chunk!r} is no chunk: expected Out(i), In(i) or Tmp(i), i < {MOST_CHUNKS}")


def _ranks(where: str, ranks: Sequence[int]) -> tuple[int, ...]:
    if isinstance(ranks, (tuple, list)) and all(type(rank) is int for rank in ranks):
        return tuple(ranks)
    raise TypeError(f"{where}: {ranks!r} are no ranks, expected a tuple of numbers")


def _number(collective: str, root: int, code: list[list[int]]) -> int:
    digest = blake2b(f"{collective} {root}".encode(), digest_size=8)
    for numbers in code:
        digest.update(array("q", [len(numbers), *numbers]).tobytes())
    return int.from_bytes(digest.digest(), "little") or 1
