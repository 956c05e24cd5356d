"""Random programs of one-sided calls, and what they must give: a sequential model of every rank's array.

A program is a list of phases, which fences divide. In a phase each element of each array has one rule, so that
its value at the end does not depend on the order: one rank writes it, ranks update it with one
commutative operation, ranks take tickets, one of those that swap wins, or ranks count under the lock.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import unisono as un
from unisono import ReduceOp

RULES = ("put", "accumulate", "ticket", "swap", "lock", "none")
DTYPES = ("int64", "float64", "int8", "float32", "int32", "uint8", "complex128")
COMMUTATIVE = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.BXOR, ReduceOp.PRODUCT)


@dataclass
class Block:
    """Elements `first` to `end` of the array of `target`, and what happens to them in a phase."""

    target: int
    first: int
    end: int
    rule: str
    op: ReduceOp
    callers: list[int]
    values: dict[int, Any]


@dataclass
class Program:
    """dtypes: of the array of each rank.  initial: the arrays.  phases: blocks, which cover all elements."""

    dtypes: list[str]
    initial: list[Any]
    phases: list[list[Block]] = field(default_factory=list)


def program(seed: int, size: int, phases: int) -> Program:
    """The same on every rank."""
    dice = np.random.default_rng(seed)
    dtypes = [str(dice.choice(DTYPES)) for _ in range(size)]
    initial = [dice.integers(0, 3, int(dice.integers(1, 40))).astype(dtype) for dtype in dtypes]
    made = Program(dtypes, initial)
    for _ in range(phases):
        made.phases.append([block for target in range(size) for block in _blocks(dice, made, target, size)])
    return made


def _blocks(dice: np.random.Generator, made: Program, target: int, size: int) -> list[Block]:
    numel = made.initial[target].size
    cuts = sorted({0, numel, *dice.integers(0, numel + 1, 4).tolist()})
    found = []
    for first, end in itertools.pairwise(cuts):
        rule, kind = str(dice.choice(RULES)), np.dtype(made.dtypes[target]).kind
        ops = [
            op
            for op in COMMUTATIVE
            if kind in "iu" or op == ReduceOp.SUM or (kind == "f" and op != ReduceOp.BXOR)
        ]
        callers = sorted(dice.choice(size, int(dice.integers(1, size + 1)), replace=False).tolist())
        if rule in ("ticket", "swap", "lock"):
            end = first + 1
        if rule == "put":
            callers = callers[:1]
        values = {rank: dice.integers(0, 3, end - first).astype(made.dtypes[target]) for rank in callers}
        found.append(Block(target, first, end, rule, ops[int(dice.integers(len(ops)))], callers, values))
    return found


def act(window: un.Window, block: Block, rank: int) -> Any:
    """This rank's calls for a block; returns what it fetched."""
    if rank not in block.callers:
        return None
    value, target, first = block.values[rank], block.target, block.first
    if block.rule == "put":
        window.put(value, target, first)
    elif block.rule == "accumulate":
        window.accumulate(value, target, first, block.op)
    elif block.rule == "ticket":
        return window.fetch_and_op(np.ones_like(value), target, first)[0]
    elif block.rule == "swap":
        old = np.full_like(value, 0)
        return window.compare_and_swap(old, np.full_like(value, rank + 1), target, first)[0]
    elif block.rule == "lock":
        with window.lock(target):
            now = window.get(np.empty_like(value), target, first)
            window.put(now + np.ones_like(now), target, first)
    return None


def settle(block: Block, before: Any, fetched: dict[int, Any], after: Any) -> None:
    """Check one block: its elements `before` and `after` the phase, and what each caller fetched."""
    kind = before.dtype
    if block.rule in ("put", "none"):
        expected = block.values[block.callers[0]] if block.rule == "put" else before
    elif block.rule == "accumulate":
        expected = before.copy()
        functions = {
            ReduceOp.SUM: np.add, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum,
            ReduceOp.BXOR: np.bitwise_xor, ReduceOp.PRODUCT: np.multiply,
        }  # fmt: skip
        for rank in block.callers:
            functions[block.op](expected, block.values[rank], out=expected)
    elif block.rule == "swap":
        winners = [rank for rank in block.callers if fetched[rank] == 0] if before[0] == 0 else []
        assert len(winners) == (before[0] == 0), (block, fetched)
        expected = np.full_like(before, winners[0] + 1) if winners else before
        assert all(fetched[rank] == expected[0] for rank in block.callers if rank not in winners), fetched
    else:
        count = len(block.callers)
        steps = before[0] + np.arange(count + 1).astype(kind)
        expected = steps[count:]
        if block.rule == "ticket":
            taken = sorted((fetched[rank] for rank in block.callers), key=lambda x: (x.real, x.imag))
            assert sorted(steps[:count], key=lambda x: (x.real, x.imag)) == taken, (block, fetched)
    np.testing.assert_array_equal(after, expected, err_msg=str(block))


def run(group: un.Group, seed: int, phases: int, make: Any) -> None:
    """Run a random program on every rank, and compare with the model after each phase."""
    made = program(seed, group.size, phases)
    own = make(made.initial[group.rank].shape, made.dtypes[group.rank])
    own[...] = made.initial[group.rank]
    dice = np.random.default_rng([seed, group.rank])
    with group.window(own) as window:
        for blocks in made.phases:
            window.fence()
            before = own.copy()
            window.fence()
            order = dice.permutation(len(blocks))
            fetched = {int(number): act(window, blocks[number], group.rank) for number in order}
            window.fence()
            theirs = group.all_gather_object({n: v for n, v in fetched.items() if v is not None}, pickle=True)
            for number, block in enumerate(blocks):
                inside = slice(block.first, block.end)
                got = {rank: theirs[rank][number] for rank in block.callers if number in theirs[rank]}
                if block.target == group.rank:
                    settle(block, before[inside], got, own[inside])
                seen = np.empty(block.end - block.first, made.dtypes[block.target])
                window.get(seen, block.target, block.first)
                if block.rule == "put":
                    np.testing.assert_array_equal(seen, block.values[block.callers[0]])
