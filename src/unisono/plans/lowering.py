"""Flatten a plan into the numbers that the engine runs; csrc/engine/program.cpp reads them.

out chunks, in chunks, tmp chunks of this rank, equal blocks, sends with zero copy (see `zero_copy_mode`),
messages in flight, algorithm, then per step opcode, flags, space and index of the chunk, space and index of
the own chunk, own place, number of peers, peers; plus the number of ranks where the edge carries codes
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unisono.engine.base.validation import instance, whole
from unisono.plans.agreement import agreement
from unisono.plans.catalog import algorithm_names, steps_of
from unisono.plans.coded_edges import Edges, coded_edges, none, rounds, separate_codes
from unisono.plans.contracts import CONTRACTS
from unisono.plans.plan import Chunk, Copy, Plan, Recv, Reduce, Send, Step
from unisono.plans.provenance import Provenance
from unisono.plans.zero_copy import zero_copy_sends

_OPCODES: dict[type, int] = {Send: 0, Recv: 1, Reduce: 2, Copy: 3}
_SPACES = {"out": 0, "in": 1, "tmp": 2}
_FINAL, _RAW, _LAST, _OPEN, _ROUNDS = 1, 2, 4, 8, 16
NO_ZERO_COPY, ZERO_COPY_SEGMENTS, ZERO_COPY_AHEAD = range(3)  # how a plan uses zero copy
_CROWD = 64  # above this size only some steps are analysed: all of them take too long
_CUSTOM = 255  # an algorithm that is not in the catalogue


def lower(plan: Plan, *, idempotent: bool = False) -> list[list[int]]:
    """Prove a plan; returns the code of every rank. idempotent: see `proof.prove`.

    Raises:
        PlanError: the plan is wrong.
    """
    from unisono.plans.proof import run  # imported late: ranks lower only their own code

    in_flight, findings = run(instance(plan, Plan, "plan"), idempotent=idempotent)
    edges = coded_edges(plan.coding, plan.hosts)
    zero_copy = (
        NO_ZERO_COPY if plan.coding else zero_copy_mode(plan.collective, plan.size, plan.steps, plan.hosts)
    )
    code, origins = [], Provenance(plan.steps.__getitem__)
    for rank, (steps, seen) in enumerate(zip(plan.steps, findings, strict=True)):
        raw = [found.own is not None and found.own.raw for found in seen]
        complete = [found.result is not None and _everybody(plan.size, found.result.ranks) for found in seen]
        header = _header(plan.collective, plan.algorithm, plan.size, steps, in_flight, zero_copy, plan.parts)
        if plan.coding:
            keeps = rounds(plan.collective, rank, plan.root, steps, edges)
            code.append(header + _encode_coded(rank, plan.size, steps, raw, complete, keeps, edges))
            continue
        last = last_sends(steps, reduces=CONTRACTS[plan.collective].reduces)
        open_ = _open(rank, plan.size, steps, origins)
        code.append(header + _encode(rank, steps, raw, complete, last, open_))
    return code


def lower_rank(
    rank: int,
    collective: str,
    algorithm: str,
    size: int,
    root: int = 0,
    hosts: tuple[int, ...] = (),
    coding: str = "",
) -> list[int]:
    """The code of one rank of a catalogued plan, without building and proving the whole plan.

    It equals `lower(make(...))[rank]`: the tests compare the two, and prove the catalogue.

    Raises:
        PlanError: there is no such algorithm for this collective, or hosts are not those of `size` ranks.
    """
    function = steps_of(collective, algorithm, size, hosts)
    edges = coded_edges(coding, hosts)
    function = separate_codes(function, edges) if coding else function
    rank = whole(rank, "rank", 0, size - 1)
    root = whole(root, "root", 0, size - 1)
    origins = Provenance(lambda peer: function(peer, size, root))
    steps = origins.steps(rank)
    contract = CONTRACTS[collective]
    given = ("out" if contract.in_place else "in") if contract.gives(rank, root) else ""
    complete = [
        isinstance(step, Reduce) and _everybody(size, origins.ranks(rank, number))
        for number, step in enumerate(steps)
    ]
    if coding:
        keeps = rounds(collective, rank, root, steps, edges)
        header = _header(collective, algorithm, size, steps, 0, NO_ZERO_COPY)
        return header + _encode_coded(
            rank, size, steps, _raw(rank, steps, given, keeps), complete, keeps, edges
        )
    zero_copy = zero_copy_mode(collective, size, (function(peer, size, root) for peer in range(size)), hosts)
    header = _header(collective, algorithm, size, steps, 0, zero_copy)
    last = last_sends(steps, reduces=contract.reduces)
    open_ = _open(rank, size, steps, origins)
    return header + _encode(rank, steps, _raw(rank, steps, given), complete, last, open_)


def lower_agreement(rank: int, size: int, waiting: Sequence[int]) -> list[int]:
    """The code of one rank of `agreement`."""
    steps = list(agreement(rank, size, waiting))
    none = [False] * len(steps)
    header = _header("barrier", "agreement", size, steps, 0, NO_ZERO_COPY)
    return header + _encode(rank, steps, none, none, none, none)


def _everybody(size: int, ranks: int) -> bool:
    return ranks == (1 << size) - 1


def _raw(rank: int, steps: Sequence[Step], given: str, keeps: Sequence[bool] = ()) -> list[bool]:
    """For every step, whether its own chunk still has the caller's values.

    keeps: for every step, whether it sends codes and stores the decoded values.
    """
    touched: set[Chunk] = set()
    copies: set[Chunk] = set()
    found = []
    for number, step in enumerate(steps):
        own = _own(rank, step)
        raw = own is not None and (own in copies or (own.space == given and own not in touched))
        found.append(raw)
        if not isinstance(step, Send):
            written = step.dst if isinstance(step, Copy) else step.chunk
            touched.add(written)
            copies = copies | {written} if raw and isinstance(step, Copy) else copies - {written}
        elif keeps and keeps[number]:
            touched.add(step.chunk)
            copies = copies - {step.chunk}
    return found


def _own(rank: int, step: Step) -> Chunk | None:
    if isinstance(step, Recv) or (isinstance(step, Reduce) and rank not in step.frm):
        return None
    return _operands(rank, step)[1]


def _header(
    collective: str,
    algorithm: str,
    size: int,
    steps: Iterable[Step],
    in_flight: int,
    zero_copy: int,
    parts: int = 1,
) -> list[int]:
    """The header before the steps. It is equal on all ranks, except for their scratch memory."""
    names, contract = algorithm_names(), CONTRACTS[collective]
    seen = dict.fromkeys(_SPACES, 0)
    for step in steps:
        for chunk in _operands(-1, step)[:2]:
            seen[chunk.space] = max(seen[chunk.space], chunk.index + 1)
    blocks = {"0": 0, "1": parts, "p": size * parts}
    out = blocks.get(contract.out_blocks, max(seen["out"], 1))
    given = blocks.get(contract.in_blocks, seen["in"])
    number = names.index(algorithm) if algorithm in names else _CUSTOM
    equal_blocks = int(contract.out_blocks != "any")
    return [out, given, seen["tmp"], equal_blocks, zero_copy, max(in_flight, out, given), number]


def zero_copy_mode(collective: str, size: int, plan: Iterable[Iterable[Step]], hosts: tuple[int, ...]) -> int:
    """Segments: a plan within one host sends only chunks that do not change, so any size can be sent with
    zero copy. Ahead: also, its messages may run ahead of their segments.
    """
    if CONTRACTS[collective].reduces or len(set(hosts)) > 1 or size > _CROWD:
        return NO_ZERO_COPY
    zero_copy = ZERO_COPY_AHEAD
    for steps in map(tuple, plan):
        sends = (
            last
            for step, last in zip(steps, last_sends(steps, reduces=False), strict=True)
            if isinstance(step, Send)
        )
        if not all(sends):
            return NO_ZERO_COPY
        zero_copy = zero_copy if _may_run_ahead(steps) else ZERO_COPY_SEGMENTS
    return zero_copy


def _may_run_ahead(steps: Sequence[Step]) -> bool:
    """Whether each message has one receiver, none goes into scratch memory, which holds only a segment, and
    no other step writes their chunks or reads chunks that have not arrived.
    """
    messages = {step.chunk for step in steps if isinstance(step, (Send, Recv))}
    seen: set[Chunk] = set()
    for step in steps:
        if isinstance(step, Recv) and (step.chunk in seen or step.chunk.space == "tmp"):
            return False
        if isinstance(step, Copy) and step.dst in messages:
            return False
        if isinstance(step, Send) and len(step.to) > 1:
            return False
        seen.add(step.src if isinstance(step, Copy) else step.chunk)
    return True


def last_sends(steps: Sequence[Step], *, reduces: bool) -> list[bool]:
    """For every step, whether it sends a chunk of the caller's that no later step writes.

    If the collective reduces, only chunks that a reduction has written: the others are better staged, because
    reductions read staging memory in place.
    """
    writes: dict[Chunk, int] = {}
    reduced: set[Chunk] = set()
    for number, step in enumerate(steps):
        if not isinstance(step, Send):
            writes[step.dst if isinstance(step, Copy) else step.chunk] = number
    found = []
    for number, step in enumerate(steps):
        if isinstance(step, Reduce):
            reduced.add(step.chunk)
        sends = (
            isinstance(step, Send) and step.chunk.space != "tmp" and (not reduces or step.chunk in reduced)
        )
        found.append(sends and writes.get(_operands(-1, step)[0], -1) < number)
    return found


def _open(rank: int, size: int, steps: Sequence[Step], origins: Provenance) -> list[bool]:
    return zero_copy_sends(rank, origins) if size <= _CROWD else [False] * len(steps)


def _encode(
    rank: int,
    steps: Iterable[Step],
    raw: list[bool],
    complete: list[bool],
    last: list[bool],
    open_: list[bool],
    keeps: Sequence[bool] = (),
    edges: Edges = none,
    size: int = 0,
) -> list[int]:
    numbers: list[int] = []
    found = zip(steps, raw, complete, last, open_, keeps or [False] * len(raw), strict=True)
    for step, is_raw, is_complete, is_last, is_open, is_kept in found:
        chunk, own, place, peers = _operands(rank, step)
        if isinstance(step, Send) and not peers:
            continue
        final = isinstance(step, Reduce) and is_complete and (len(step.frm) > 1 or is_raw)
        flags = _RAW * is_raw | _FINAL * final | _LAST * is_last | _OPEN * is_open | _ROUNDS * is_kept
        refs = (_SPACES[chunk.space], chunk.index, _SPACES[own.space], own.index)
        sends = isinstance(step, Send)
        coded = (edges(rank, peer) if sends else edges(peer, rank) for peer in peers)
        peers = tuple(peer + size * is_coded for peer, is_coded in zip(peers, coded, strict=True))
        numbers += [_OPCODES[type(step)], flags, *refs, place, len(peers), *peers]
    return numbers


def _encode_coded(
    rank: int,
    size: int,
    steps: Sequence[Step],
    raw: list[bool],
    complete: list[bool],
    keeps: list[bool],
    edges: Edges,
) -> list[int]:
    """`_encode` for a plan with codes: nothing is sent with zero copy, and codes are not read in place."""
    none_ = [False] * len(steps)
    return _encode(rank, steps, raw, complete, none_, none_, keeps, edges, size)


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
