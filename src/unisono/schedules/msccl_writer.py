"""A plan as MSCCL's XML.

A rank has a thread block for each rank that it sends to, one for each that it receives from, and one for its
copies. Each step waits for the one before it in the plan, so the order of the plan is kept. The attribute
root= and the names of collectives that MSCCL does not have are our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from unisono.plans.contracts import CONTRACTS
from unisono.plans.plan import Chunk, Copy, Plan, Recv, Reduce, Send, Step
from unisono.schedules.msccl import COLLECTIVES

__all__ = ["msccl"]


class _Line(NamedTuple):
    """A step: the thread block (way, peer) it belongs to, its type, and its chunks."""

    block: tuple[str, int]
    kind: str
    source: Chunk
    target: Chunk


def msccl(plan: Plan) -> str:
    """The text of an XML file.

    Raises:
        ValueError: the plan has edges that carry codes, which the format does not know.
    """
    if plan.coding:
        raise ValueError(f"{plan}: MSCCL's XML knows no codes")
    contract = CONTRACTS[plan.collective]
    blocks = plan.size * plan.parts
    chunks = max(1, plan.chunks("out")) if contract.out_blocks == "any" else blocks
    counts = {"0": chunks, "any": chunks, "1": plan.parts, "p": blocks}
    given, out = counts[contract.in_blocks], counts[contract.out_blocks]
    name = next(name for name, ours in COLLECTIVES.items() if ours == plan.collective)
    attributes = {
        "name": plan.algorithm,
        "proto": "Simple",
        "nchannels": 1,
        "nchunksperloop": chunks,
        "ngpus": plan.size,
        "coll": name,
        "inplace": int(contract.in_place),
        "outofplace": int(not contract.in_place),
        "minBytes": 0,
        "maxBytes": (1 << 63) - 1,
    }
    if contract.rooted:
        attributes["root"] = plan.root
    lines = [_tag("algo", attributes)]
    for rank, steps in enumerate(plan.steps):
        sizes = {"id": rank, "i_chunks": given, "o_chunks": out, "s_chunks": plan.chunks("tmp")}
        lines += ["  " + _tag("gpu", sizes), *_gpu(rank, steps, contract.in_place), "  </gpu>"]
    return "\n".join([*lines, "</algo>", ""])


def _gpu(rank: int, steps: tuple[Step, ...], in_place: bool) -> Iterator[str]:
    lines = [line for step in steps for line in _lines(rank, step)]
    blocks: dict[tuple[str, int], list[int]] = {}
    for number, line in enumerate(lines):
        blocks.setdefault(line.block, []).append(number)
    at = {
        number: (block, place)
        for block, numbers in enumerate(blocks.values())
        for place, number in enumerate(numbers)
    }
    for block, ((way, peer), numbers) in enumerate(blocks.items()):
        send, receive = peer if way == "send" else -1, peer if way == "recv" else -1
        yield "    " + _tag("tb", {"id": block, "send": send, "recv": receive, "chan": 0})
        for place, number in enumerate(numbers):
            before = at.get(number - 1, (block, -1))
            depends = before if before[0] != block else (-1, -1)
            after = at.get(number + 1, (block, -1))
            yield "      " + _tag(
                "step",
                {
                    "s": place,
                    "type": lines[number].kind,
                    **_cell("src", lines[number].source, in_place),
                    **_cell("dst", lines[number].target, in_place),
                    "cnt": 1,
                    "depid": depends[0],
                    "deps": depends[1],
                    "hasdep": int(after[0] != block),
                },
                "/>",
            )
        yield "    </tb>"


def _lines(rank: int, step: Step) -> Iterator[_Line]:
    if isinstance(step, Send):
        for peer in step.to:
            yield _Line(("send", peer), "s", step.chunk, step.chunk)
    elif isinstance(step, Recv):
        yield _Line(("recv", step.frm), "r", step.chunk, step.chunk)
    elif isinstance(step, Copy):
        yield _Line(("", -1), "cpy", step.src, step.dst)
    elif isinstance(step, Reduce):
        own = step.own or step.chunk
        peers = [peer for peer in step.frm if peer != rank]
        if not peers and own != step.chunk:
            yield _Line(("", -1), "cpy", own, step.chunk)
        for number, peer in enumerate(peers):
            kind = "r" if number == 0 and rank not in step.frm else "rrc"
            source = own if number == 0 else step.chunk
            yield _Line(("recv", peer), kind, source, step.chunk)


def _cell(side: str, chunk: Chunk, in_place: bool) -> dict[str, object]:
    buffer = {"in": "i", "out": "i" if in_place else "o", "tmp": "s"}[chunk.space]
    return {f"{side}buf": buffer, f"{side}off": chunk.index}


def _tag(name: str, attributes: Mapping[str, object], end: str = ">") -> str:
    return f"<{name} " + " ".join(f"{key}={quoteattr(str(value))}" for key, value in attributes.items()) + end
