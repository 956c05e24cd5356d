"""Plans run on numbers, in random order and over bounded edges, against NumPy.

The interpreter here knows nothing of the prover and nothing of the engine.
"""

import random
from collections import deque
from functools import reduce as fold
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops import each
from unisono.plans import ALGORITHMS, CONTRACTS, Copy, Plan, Recv, Reduce, Send, lower, make, prove
from unisono.plans.proof import EDGE_CAPACITY, Deadlock

NAMES = [(collective, name) for collective in ALGORITHMS for name in ALGORITHMS[collective]]
Memory = list[dict[str, Any]]
RAW, FINAL = 2, 1
OPS = {"SUM": np.add, "MAX": np.maximum, "BXOR": np.bitwise_xor}


class Machine:
    """Runs a plan's steps on arrays, one step of one rank at a time.

    With `flags` (of the lowered plan, per rank and step) it multiplies every rank's raw contribution by
    that rank's factor and divides final results by the divisor, as the engine does for PREMUL_SUM and AVG.
    """

    def __init__(self, plan: Plan, memory: Memory, combine: Any = np.add) -> None:
        self.plan, self.memory, self.combine = plan, memory, combine
        self.capacity, self.in_flight = EDGE_CAPACITY, 1 << 30
        self.flags: list[list[int]] | None = None
        self.factors, self.divisor = [1] * plan.size, 1
        self.at = [0] * plan.size
        self.edges: dict[tuple[int, int], deque[Any]] = {}
        self.outstanding: list[list[list[int]]] = [[] for _ in range(plan.size)]

    def run(self, dice: random.Random, until: int | None = None) -> None:
        """Run all ranks to the end, or each until its step `until`."""
        ends = [len(steps) if until is None else until for steps in self.plan.steps]
        while unfinished := [rank for rank in range(self.plan.size) if self.at[rank] < ends[rank]]:
            dice.shuffle(unfinished)
            moved = [self.step(rank) for rank in unfinished]
            assert any(moved), f"{self.plan} is stuck at {self.at}"
        if until is None:
            assert not any(self.edges.values()), "messages are left over"

    def step(self, rank: int) -> bool:
        step = self.plan.steps[rank][self.at[rank]]
        if not self.ready(rank, step):
            return False
        if isinstance(step, Send):
            message = self.scaled(rank, self.find(rank, step.chunk).copy())
            waiting = list(step.to)
            self.outstanding[rank] += [waiting] if waiting else []
            for peer in step.to:
                self.edges.setdefault((rank, peer), deque()).append((message, waiting))
        elif isinstance(step, Recv):
            self.write(rank, step.chunk, self.take(step.frm, rank))
        elif isinstance(step, Copy):
            self.write(rank, step.dst, self.find(rank, step.src))
        else:
            self.write(rank, step.chunk, self.reduced(rank, step))
        self.at[rank] += 1
        return True

    def ready(self, rank: int, step: Any) -> bool:
        if isinstance(step, Send):
            while self.outstanding[rank] and not self.outstanding[rank][0]:
                self.outstanding[rank].pop(0)
            room = all(len(self.edges.get((rank, peer), ())) < self.capacity for peer in step.to)
            return not step.to or (room and len(self.outstanding[rank]) < self.in_flight)
        sources = [step.frm] if isinstance(step, Recv) else getattr(step, "frm", ())
        return all(self.edges.get((peer, rank)) for peer in sources if peer != rank)

    def reduced(self, rank: int, step: Reduce) -> Any:
        own = self.scaled(rank, self.find(rank, step.own or step.chunk).copy()) if rank in step.frm else None
        inputs = [own if peer == rank else self.take(peer, rank) for peer in step.frm]
        result = fold(self.combine, inputs)
        if self.flags and self.flags[rank][self.at[rank]] & FINAL:
            assert not (result % self.divisor).any()
            result = result // self.divisor
        return result

    def scaled(self, rank: int, array: Any) -> Any:
        raw = self.flags and self.flags[rank][self.at[rank]] & RAW
        return array * self.factors[rank] if raw else array

    def take(self, sender: int, receiver: int) -> Any:
        message, waiting = self.edges[sender, receiver].popleft()
        waiting.remove(receiver)
        return message

    def find(self, rank: int, chunk: Any) -> Any:
        memory = self.memory[rank]
        if chunk.space != "tmp":
            return memory[chunk.space][chunk.index]
        model = memory["in"] or memory["out"]
        like = model[chunk.index if chunk.index < len(model) else 0]
        return memory.setdefault("tmp", {}).setdefault(chunk.index, np.full_like(like, -77))

    def write(self, rank: int, chunk: Any, array: Any) -> None:
        target = self.find(rank, chunk)
        assert target.shape == array.shape, f"rank {rank}: {chunk} has another size than what it is given"
        target[...] = array


def lengths(plan: Plan, dice: random.Random) -> Any:
    """Ragged sizes, some empty: of chunk i, or of what rank i gives to or gets from rank j."""
    count = max(plan.size, plan.chunks("out"), plan.chunks("in"))
    return [[dice.choice((0, 1, 2, 3, 7)) for _ in range(count)] for _ in range(count)]


def fresh(plan: Plan, size: Any, dice: random.Random, *, multiple: int = 1, aliased: bool = False) -> Memory:
    """Every rank's memory before the call; what is only written holds -99."""

    def numbers(length: int) -> Any:
        return np.array([dice.randrange(1000) * multiple for _ in range(length)], np.int64)

    contract, memory = CONTRACTS[plan.collective], []
    for rank in range(plan.size):
        if contract.in_place:
            memory.append({"out": [numbers(size[0][i]) for i in range(plan.chunks("out"))], "in": []})
            continue
        block = size if plan.collective == "all_to_all" else [size[0]] * len(size)  # block[from][to]
        given, gets = contract.in_blocks, contract.out_blocks
        blocks_in = [block[rank][i if given == "p" else rank] for i in range(plan.chunks("in"))]
        blocks_out = [
            block[i][rank] if plan.collective == "all_to_all" else block[0][i] for i in range(plan.size)
        ]
        blocks_out = blocks_out if gets == "p" else [block[0][rank]]
        inputs = [numbers(n) for n in blocks_in] if contract.gives(rank, plan.root) else []
        has_output = plan.collective != "gather" or rank == plan.root
        outputs = [np.full(n, -99, np.int64) for n in blocks_out] if has_output else []
        if aliased and inputs and outputs and len(inputs) != len(outputs):
            several, single = (inputs, outputs) if len(inputs) > 1 else (outputs, inputs)
            several[rank][...] = inputs[rank if several is inputs else 0]
            single[0] = several[rank]
        memory.append({"out": outputs, "in": inputs})
    return memory


def expected(plan: Plan, memory: Memory, combine: Any) -> list[Any]:
    """What every rank's output must hold, by NumPy; None: the rank has none."""
    p, root, name = plan.size, plan.root, plan.collective
    gave = [[one.copy() for one in rank["out" if CONTRACTS[name].in_place else "in"]] for rank in memory]

    def total(ranks: Any, chunk: int) -> Any:
        return fold(combine, [gave[rank][chunk] for rank in ranks])

    def whole(ranks: Any) -> Any:
        return [total(ranks, chunk) for chunk in range(plan.chunks("out"))]

    answers = {
        "broadcast": lambda r: gave[root],
        "reduce": lambda r: whole(range(p)) if r == root else gave[r],
        "all_reduce": lambda r: whole(range(p)),
        "gather": lambda r: [gave[q][0] for q in range(p)] if r == root else None,
        "all_gather": lambda r: [gave[q][0] for q in range(p)],
        "scatter": lambda r: [gave[root][r]],
        "reduce_scatter": lambda r: [total(range(p), r)],
        "all_to_all": lambda r: [gave[q][r] for q in range(p)],
        "scan": lambda r: whole(range(r + 1)),
        "exclusive_scan": lambda r: whole(range(r)) if r else gave[0],
    }
    return [answers[name](rank) for rank in range(p)]


def check(memory: Memory, wanted: list[Any]) -> None:
    for rank, (found, want) in enumerate(zip(memory, wanted, strict=True)):
        if want is None:
            continue
        for chunk, (a, b) in enumerate(zip(found["out"], want, strict=True)):
            np.testing.assert_array_equal(a, b, err_msg=f"rank {rank}, Out({chunk})")


def flags_of(plan: Plan) -> list[list[int]]:
    """The flags of every step, read back from the lowered plan; a Send to nobody is left out there."""
    found = []
    for code, steps in zip(lower(plan), plan.steps, strict=True):
        at, flags = 7, []
        for step in steps:
            if isinstance(step, Send) and not step.to:
                flags.append(0)
                continue
            flags.append(code[at + 1])
            at += 8 + code[at + 7]
        assert at == len(code)
        found.append(flags)
    return found


@given(
    st.sampled_from([name for name in NAMES if name[0] != "barrier"]), st.integers(1, 9), st.integers(0, 8),
    st.sampled_from(sorted(OPS)), st.integers(2, EDGE_CAPACITY), st.booleans(), st.integers(0, 1 << 32),
    st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_plans_against_numpy(
    name: tuple[str, str], p: int, root: int, op: str, capacity: int, aliased: bool, seed: int, hosts: int
) -> None:
    dice = random.Random(seed)
    where = tuple(dice.randrange(hosts) for _ in range(p))
    plan = make(*name, p, root % p if CONTRACTS[name[0]].rooted else 0, where)
    passed_on = (
        name[0] in ("gather", "scatter") and name[1] != "direct"
    )  # by ranks that know of no other size
    memory = fresh(plan, even(plan) if passed_on else lengths(plan, dice), dice, aliased=aliased)
    wanted = expected(plan, memory, OPS[op])
    inputs = [[one.copy() for one in rank["in"]] for rank in memory]
    machine = Machine(plan, memory, OPS[op])
    machine.capacity, machine.in_flight = capacity, lower(plan)[0][5]
    try:
        prove(plan, edge_capacity=capacity)
    except Deadlock:
        machine.capacity = EDGE_CAPACITY
    machine.run(dice)
    check(memory, wanted)
    for rank, before in zip(memory, inputs, strict=True):
        for number, (a, b) in enumerate(zip(rank["in"], before, strict=True)):
            if not any(np.shares_memory(a, out) for out in rank["out"]):
                np.testing.assert_array_equal(a, b, err_msg=f"In({number}) was written")


MULTIPLIED = [
    (*name, p)
    for name in NAMES
    if CONTRACTS[name[0]].counts and CONTRACTS[name[0]].reduces
    for p in (1, 2, 3, 5, 8)
]
AVERAGED = [name for name in NAMES if name[0] in ("all_reduce", "reduce", "reduce_scatter")]


def even(plan: Plan) -> Any:
    """Every chunk of two elements."""
    count = max(2 * plan.size, plan.chunks("out"))
    return [[2] * count] * count


@each(("collective", "algorithm", "p"), MULTIPLIED)
def test_every_contribution_is_multiplied_once(collective: str, algorithm: str, p: int) -> None:
    """PREMUL_SUM: the flag "raw" marks exactly the places where a rank's own contribution enters."""
    dice = random.Random(p)
    plan = make(collective, algorithm, p)
    memory = fresh(plan, even(plan), dice)
    machine = Machine(plan, memory)
    machine.flags, machine.factors = flags_of(plan), [2 + 3 * rank for rank in range(p)]
    scaled = [
        {space: [one * factor for one in rank[space]] for space in ("out", "in")}
        for rank, factor in zip(memory, machine.factors, strict=True)
    ]
    wanted = expected(plan, scaled, np.add)
    for rank in range(p):  # a buffer that the call leaves alone
        if (collective == "reduce" and rank != plan.root) or (collective == "exclusive_scan" and rank == 0):
            wanted[rank] = [one.copy() for one in memory[rank]["out"]]
    machine.run(dice)
    check(memory, wanted)


@each(("collective", "algorithm"), AVERAGED)
@each("p", [1, 2, 3, 5, 8])
def test_every_result_is_divided_once(collective: str, algorithm: str, p: int) -> None:
    """AVG: the flag "final" marks exactly the places where a result is complete."""
    dice = random.Random(p)
    plan = make(collective, algorithm, p)
    memory = fresh(plan, even(plan), dice, multiple=p)
    wanted = expected(plan, memory, np.add)
    for rank in range(p):
        if collective != "reduce" or rank == plan.root:
            wanted[rank] = [one // p for one in wanted[rank]]
    machine = Machine(plan, memory)
    machine.flags, machine.divisor = flags_of(plan), p
    machine.run(dice)
    check(memory, wanted)


@pytest.mark.parametrize("p", [2, 3, 6, 9])
def test_nobody_leaves_a_barrier_before_everybody_came(p: int) -> None:
    plan = make("barrier", "dissemination", p)
    for late in range(p):
        machine = Machine(plan, [{"out": [np.zeros(0, np.int64)], "in": []} for _ in range(p)])
        early = [rank for rank in range(p) if rank != late]
        while any(machine.at[rank] < len(plan.steps[rank]) and machine.step(rank) for rank in early):
            pass
        assert all(machine.at[rank] < len(plan.steps[rank]) for rank in early)


# ---- the golden trace of the ring ----------------------------------------------------------------------


def test_the_interpreter_itself_sees_what_is_wrong() -> None:
    broken = Plan(
        "all_reduce", "broken", 2, 0, ((Send(make("scan", "linear", 2).steps[0][1].chunk, (1,)),), ())
    )
    machine = Machine(broken, [{"out": [np.ones(1, np.int64)], "in": []} for _ in range(2)])
    with pytest.raises(AssertionError, match="left over"):
        machine.run(random.Random(0))
