"""Flatten a plan into the numbers that the engine runs; csrc/program.cpp reads them.

out chunks, in chunks, tmp chunks, equal blocks, messages in flight, algorithm, then per step
opcode, flags, space and index of the chunk, space and index of the own chunk, own place,
number of peers, peers
"""

from __future__ import annotations

from unisono.plans.catalog import algorithm_names
from unisono.plans.contracts import CONTRACTS
from unisono.plans.plan import Chunk, Copy, Plan, Recv, Reduce, Send, Step
from unisono.plans.proof import Finding, run

__all__ = ["lower"]

_OPCODES: dict[type, int] = {Send: 0, Recv: 1, Reduce: 2, Copy: 3}
_SPACES = {"out": 0, "in": 1, "tmp": 2}
_FINAL, _RAW = 1, 2
_CUSTOM = 255  # an algorithm that is not in the catalogue


def lower(plan: Plan) -> list[list[int]]:
    """The code of every rank.

    Raises:
        PlanError: the plan is wrong.
    """
    in_flight, findings = run(plan)
    names = algorithm_names()
    algorithm = names.index(plan.algorithm) if plan.algorithm in names else _CUSTOM
    equal_blocks = CONTRACTS[plan.collective].out_blocks != "any"
    counts = [plan.chunks(space) for space in _SPACES]
    header = [max(counts[0], 1), *counts[1:], int(equal_blocks), in_flight, algorithm]
    code = []
    for rank, (steps, seen) in enumerate(zip(plan.steps, findings, strict=True)):
        words = [_words(plan, rank, step, found) for step, found in zip(steps, seen, strict=True)]
        code.append(header + [word for one in words for word in one])
    return code


def _words(plan: Plan, rank: int, step: Step, found: Finding) -> list[int]:
    chunk, own, place, peers = _operands(rank, step)
    if isinstance(step, Send) and not peers:
        return []
    flags = 0
    raw = found.own is not None and found.own.raw
    if raw:
        flags |= _RAW
    complete = found.result is not None and found.result.ranks == (1 << plan.size) - 1
    if isinstance(step, Reduce) and complete and (len(step.frm) > 1 or raw):
        flags |= _FINAL
    return [
        _OPCODES[type(step)],
        flags,
        _SPACES[chunk.space],
        chunk.index,
        _SPACES[own.space],
        own.index,
        place,
        len(peers),
        *peers,
    ]


def _operands(rank: int, step: Step) -> tuple[Chunk, Chunk, int, tuple[int, ...]]:
    """(chunk, own chunk, own place, peers) of a step."""
    if isinstance(step, Send):
        return step.chunk, step.chunk, -1, step.to
    if isinstance(step, Recv):
        return step.chunk, step.chunk, -1, (step.frm,)
    if isinstance(step, Copy):
        return step.dst, step.src, -1, ()
    place = step.frm.index(rank) if rank in step.frm else -1
    return step.chunk, step.own or step.chunk, place, tuple(peer for peer in step.frm if peer != rank)
