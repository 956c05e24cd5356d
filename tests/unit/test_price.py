"""Prices: the closed formulas of the literature against the plans, and the docstrings against both."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import ceil, log2
from typing import Any

import pytest

import unisono as un
from loops import each
from unisono.engine.costs import plan_cost
from unisono.errors import PlanError
from unisono.plans import ALGORITHMS, CONTRACTS, Out, Plan, Recv, Send, make

A, B, G, L = Fraction(7), Fraction(1, 3), Fraction(1, 5), Fraction(60)
SIZES = range(1, 18)


def levels(p: int) -> int:
    return ceil(log2(p))


def whole(count: int) -> Fraction:
    """`count` messages of the whole buffer, one after the other."""
    return count * (A + B * L)


def swaps(count: int, p: int) -> Fraction:
    """`count` messages, and what every rank but the own one holds."""
    return count * A + Fraction(p - 1, p) * B * L


# (collective, algorithm): p -> seconds.
FORMULAS: dict[tuple[str, str], Callable[[int], Fraction]] = {
    ("broadcast", "linear"): lambda p: whole(p - 1),
    ("broadcast", "direct"): lambda p: whole(p - 1),
    ("broadcast", "binomial"): lambda p: whole(levels(p)),
    ("all_reduce", "ring"): lambda p: 2 * (p - 1) * A + Fraction(p - 1, p) * (2 * B + G) * L,
    ("reduce_scatter", "ring"): lambda p: (p - 1) * A + Fraction(p - 1, p) * (B + G) * L,
    ("all_gather", "ring"): lambda p: (p - 1) * A + Fraction(p - 1, p) * B * L,
    ("all_gather", "direct"): lambda p: (p - 1) * A + Fraction(p - 1, p) * B * L,
    ("all_to_all", "direct"): lambda p: (p - 1) * A + Fraction(p - 1, p) * B * L,
    ("gather", "direct"): lambda p: (p - 1) * A + Fraction(p - 1, p) * B * L,
    ("scatter", "direct"): lambda p: (p - 1) * A + Fraction(p - 1, p) * B * L,
    ("reduce_scatter", "direct"): lambda p: (p - 1) * A + Fraction(p - 1, p) * (B + G) * L,
    ("reduce", "direct"): lambda p: whole(p - 1) + (p - 1) * G * L,
    ("all_reduce", "one_shot"): lambda p: whole(p - 1) + (p - 1) * G * L,
    ("all_reduce", "two_shot"): lambda p: 2 * (p - 1) * A + Fraction(p - 1, p) * (2 * B + G) * L,
    ("scan", "linear"): lambda p: (p - 1) * (A + B * L + G * L),
    ("barrier", "dissemination"): lambda p: levels(p) * A,
    ("all_gather", "bruck"): lambda p: swaps(levels(p), p),
    ("all_to_all", "pairwise"): lambda p: swaps(p - 1, p),
}

# The same for p = 2, 4, 8, 16; ranks beyond a power of two are folded in, which costs more.
POWERS_OF_TWO: dict[tuple[str, str], Callable[[int], Fraction]] = {
    ("gather", "binomial"): lambda p: swaps(levels(p), p),
    ("scatter", "binomial"): lambda p: swaps(levels(p), p),
    ("all_gather", "doubling"): lambda p: swaps(levels(p), p),
    ("all_gather", "gather_broadcast"): lambda p: swaps(levels(p), p) + whole(levels(p)),
    ("all_reduce", "binomial"): lambda p: whole(2 * levels(p)) + levels(p) * G * L,
    ("all_reduce", "doubling"): lambda p: whole(levels(p)) + levels(p) * G * L,
    ("all_reduce", "halving_doubling"): lambda p: 2 * swaps(levels(p), p) + Fraction(p - 1, p) * G * L,
    ("reduce_scatter", "halving"): lambda p: swaps(levels(p), p) + Fraction(p - 1, p) * G * L,
}


@each("p", [2, 4, 8, 16])
@each(("collective", "algorithm"), POWERS_OF_TWO)
def test_formulas_for_powers_of_two(collective: str, algorithm: str, p: int) -> None:
    for root in {0, p // 2} if CONTRACTS[collective].rooted else {0}:
        plan = make(collective, algorithm, p, root)
        assert plan_cost.seconds(plan, L, a=A, b=B, g=G) == POWERS_OF_TWO[collective, algorithm](p)


@each(("rows", "columns"), [(2, 2), (2, 3), (3, 3), (2, 4), (4, 4)])
def test_torus(rows: int, columns: int) -> None:
    p = rows * columns
    hosts = tuple(rank // columns for rank in range(p))
    latencies = 2 * (rows - 1 + columns - 1)
    formula = latencies * A + Fraction(p - 1, p) * (2 * B + G) * L
    assert plan_cost.seconds(make("all_reduce", "torus", p, 0, hosts), L, a=A, b=B, g=G) == formula


def test_edges_between_hosts_and_the_link_that_their_ranks_share() -> None:
    """Two ranks of a host send to two of another: latencies side by side, bytes one after the other."""
    chunk = Out(0)
    steps = (Send(chunk, (2,)),), (Send(chunk, (3,)),), (Recv(chunk, 0),), (Recv(chunk, 1),)
    plan = Plan("x", "x", 4, 0, steps, (0, 0, 1, 1))
    assert plan_cost.seconds(plan, 6, a=1, b=1) == 7
    assert plan_cost.seconds(plan, 6, a=1, b=1, between=plan_cost.LinkCost(10, 2)) == 10 + 2 * 12
    assert (
        plan_cost.busiest(plan, 6, inside=plan_cost.LinkCost(1, 1), between=plan_cost.LinkCost(10, 2)) == 24
    )
    assert plan_cost.link_bytes(plan) == {0: (2, 0), 1: (0, 2)}


def test_sends_side_by_side_to_one_rank_are_one_message() -> None:
    steps = (Send(Out(0), (1,)), Send(Out(1), (1,))), (Recv(Out(0), 0), Recv(Out(1), 0))
    plan = Plan("x", "x", 2, 0, steps)
    assert (plan_cost.seconds(plan, 6, a=1, b=1), plan_cost.messages(plan), plan_cost.rounds(plan)) == (
        7,
        [1, 0],
        1,
    )


@each("p", SIZES)
@each(("collective", "algorithm"), FORMULAS)
def test_formulas(collective: str, algorithm: str, p: int) -> None:
    nbytes = 0 if collective == "barrier" else L
    for root in {0, p // 2} if CONTRACTS[collective].rooted else {0}:
        plan = make(collective, algorithm, p, root)
        assert plan_cost.seconds(plan, nbytes, a=A, b=B, g=G) == FORMULAS[collective, algorithm](p)


@each("p", SIZES)
@each(("collective", "down"), [("reduce", 0), ("all_reduce", 1)])
def test_binomial_reductions(collective: str, down: int, p: int) -> None:
    """ceil(log2 p) levels up, each a + bL + gL; other p than powers of two receive while they reduce."""
    plan = make(collective, "binomial", p)
    formula = whole((1 + down) * levels(p)) + levels(p) * G * L
    found = plan_cost.seconds(plan, L, a=A, b=B, g=G)
    assert found == formula if p & (p - 1) == 0 else found <= formula
    assert plan_cost.seconds(plan, L, a=A, b=B) == whole((1 + down) * levels(p))


@each("p", SIZES)
def test_bytes_sent(p: int) -> None:
    share = Fraction(p - 1, p)
    assert plan_cost.bytes_sent(make("all_reduce", "ring", p)) == [2 * share] * p
    assert plan_cost.bytes_sent(make("all_reduce", "two_shot", p)) == [2 * share] * p
    assert plan_cost.bytes_sent(make("all_reduce", "one_shot", p)) == [p - 1] * p
    assert plan_cost.bytes_sent(make("all_gather", "direct", p)) == [share] * p
    assert sum(plan_cost.bytes_sent(make("broadcast", "binomial", p))) == p - 1
    assert plan_cost.bytes_sent(make("scatter", "direct", p, p - 1)) == [0] * (p - 1) + [share]


@each("p", SIZES)
def test_depth_is_the_chain_of_messages_alone(p: int) -> None:
    """Direct algorithms have one or two, however many ranks there are; never more than rounds."""
    several = min(p - 1, 1)
    assert plan_cost.depth(make("all_reduce", "one_shot", p)) == several
    assert plan_cost.depth(make("all_reduce", "two_shot", p)) == 2 * several
    assert plan_cost.depth(make("broadcast", "linear", p)) == several
    assert plan_cost.depth(make("all_reduce", "ring", p)) == 2 * (p - 1)
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            plan = make(collective, algorithm, p)
            assert plan_cost.depth(plan) <= plan_cost.rounds(plan)


def test_who_asks_first_goes_first() -> None:
    """Rank 2 is reached by 1 from second 0 to 1, then by 0, whose message for rank 1 left before."""
    chunk = Out(0)
    steps = (
        (Send(chunk, (1,)), Send(chunk, (2,))),
        (Send(chunk, (2,)), Recv(chunk, 0)),
        (Recv(chunk, 0), Recv(chunk, 1)),
    )
    plan = Plan("x", "x", 3, 0, steps)
    assert plan_cost.seconds(plan, 1, a=1, b=0) == 2


def test_a_plan_that_deadlocks_has_no_price() -> None:
    plan = Plan("broadcast", "x", 2, 0, ((), (Recv(Out(0), 0),)))
    with pytest.raises(PlanError, match=r"rank 1, step 0, Recv\(Out\(0\), frm=0\): waits for ever"):
        plan_cost.seconds(plan, 1, a=1, b=1)


# ---- the lines "Cost:" in docstrings -------------------------------------------------------------------
#
# A line is a list of clauses with ";" between them. A clause may begin with an algorithm's name, or name it
# in brackets; in it stand "<expression> rounds" (or steps), "<expression> * nbytes ... sent", "nbytes each"
# and "<expression> reads". An expression is written in p.

EXPRESSION = r"((?:\d+ ?)?(?:ceil\(log2 p\)|\(p-1\)(?:/p)?)|p-1|\d+)"


def evaluate(expression: str, p: int) -> Fraction:
    """Example: evaluate("2(p-1)/p", 4) == Fraction(3, 2)."""
    text = expression.replace("ceil(log2 p)", "(levels)")
    text = re.sub(r"(\d) ?\(", r"\1*(", text)
    values = {"p": Fraction(p), "levels": levels(p)}
    return Fraction(eval(text, {"__builtins__": {}}, values))


def cost_line(doc: str | None) -> str:
    found = re.search(
        r"Cost: (.*?)(?:\n\s*\n|\.\s|\.$|\n\s*[A-Z])", inspect.cleandoc(doc or "") + "\n\n", re.DOTALL
    )
    return " ".join(found[1].split()) if found else ""


def clauses(collective: str, line: str) -> Iterator[tuple[str, str]]:
    """(algorithm, its part of the line) for clauses that name one."""
    for clause in line.split(";"):
        for algorithm in ALGORITHMS[collective]:
            if re.search(rf"^\s*{algorithm} |\({algorithm}\)", clause):
                yield algorithm, clause


def check(clause: str, plan: Plan, latencies: Callable[[Plan], int]) -> int:
    """Compare what a clause says with the plan; how many things it says."""
    p, said = plan.size, 0
    for quantity in re.findall(EXPRESSION + r" (?:rounds?|steps?)\b", clause):
        said += 1
        assert latencies(plan) == evaluate(quantity, p), f"{plan}: {clause}"
    for quantity in re.findall(EXPRESSION + r" \* nbytes[a-z ]* sent", clause):
        said += 1
        assert max(plan_cost.bytes_sent(plan)) == evaluate(quantity, p), f"{plan}: {clause}"
    for quantity in re.findall(EXPRESSION + r" reads", clause):
        said += 1
        taken = sum(
            rank in step.to
            for steps in plan.steps
            for step in steps
            if isinstance(step, Send)
            for rank in [0]
        )
        assert taken == evaluate(quantity, p), f"{plan}: {clause}"
    if "nbytes each" in clause:
        said += 1
        assert max(plan.chunks("out"), 1) == 1, f"{plan}: {clause}"
    return said


def described() -> list[Any]:
    found = []
    for collective, algorithms in ALGORITHMS.items():
        for algorithm, function in algorithms.items():
            if line := cost_line(function.__doc__):
                found.append(pytest.param(collective, algorithm, line, id=f"{collective}-{algorithm}"))
    return found


@each(("collective", "algorithm", "line"), described())
def test_docstrings_of_algorithms(collective: str, algorithm: str, line: str) -> None:
    """Rounds are those of the model: one message out and one in at a time."""
    for p in SIZES:
        assert check(line, make(collective, algorithm, p), plan_cost.rounds) >= 1, line


@each("collective", ALGORITHMS)
def test_docstrings_of_the_group(collective: str) -> None:
    """Rounds are those of one host, where a rank writes to all others at once."""
    line = cost_line(getattr(un.Group, collective).__doc__)
    named = list(clauses(collective, line))
    assert bool(named) == bool(line), f"this line names no algorithm of {collective}: {line}"
    for algorithm, clause in named:
        for p in range(2, 18):
            assert check(clause, make(collective, algorithm, p), plan_cost.depth) >= 1, clause


def test_some_docstrings_were_read() -> None:
    assert len(described()) >= 8
    assert len(list(clauses("all_reduce", cost_line(un.Group.all_reduce.__doc__)))) == 3
    assert cost_line("Do.\n\nCost: 2(p-1) steps, and\n    more. Not this.") == "2(p-1) steps, and more"
    with pytest.raises(AssertionError):
        check("3(p-1) steps", make("all_reduce", "ring", 4), plan_cost.rounds)
