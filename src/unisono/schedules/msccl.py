"""MSCCL's XML, which msccl-tools, SCCL, TACCL and TE-CCL write too: read as thread blocks and their steps.

An <algo> has a <gpu> for each rank, which has thread blocks <tb> that run at the same time. A thread block
runs its <step>s in order; it sends to one GPU and receives from one, over a channel. A step waits for step
`deps` of thread block `depid` of its GPU. Buffers are i (input), o (output) and s (scratch), in chunks.

    s    send                      rrs   receive, add, send
    r    receive                   rrc   receive, add, store
    rcs  receive, store, send      rrcs  receive, add, store, send
    cpy  copy within the GPU       re    add within the GPU       nop  wait only

`translation` makes a plan of them.  Source: the reader of the MSCCL runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from unisono.engine.encoding.xml_reader import Element, parse, read

__all__ = ["COLLECTIVES", "Algorithm", "Block", "Cell", "Gpu", "Step", "parse_algorithm", "read_algorithm"]

COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "scan": "scan",
    "exclusive_scan": "exclusive_scan",
    "barrier": "barrier",
}
"""MSCCL's names of collectives, and ours for those that it does not have."""

MOST_GPUS = 1 << 12
MOST_CHUNKS = 1 << 16
MOST_STEPS = 1 << 18
MOST_BLOCKS = 1 << 14
KINDS = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")


class Cell(NamedTuple):
    """A chunk of a buffer: "i", "o" or "s"."""

    buffer: str
    offset: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.offset}]"


class Step(NamedTuple):
    """A step. depends: (thread block, step) that it waits for; None: nothing."""

    line: int
    number: int
    kind: str
    source: Cell
    target: Cell
    units: int
    depends: tuple[int, int] | None


class Block(NamedTuple):
    """A thread block. send, receive: GPUs; -1: none."""

    line: int
    number: int
    send: int
    receive: int
    channel: int
    steps: tuple[Step, ...]


class Gpu(NamedTuple):
    """The thread blocks of a rank. copies: (input, output) offsets that are copied before all steps."""

    line: int
    blocks: tuple[Block, ...]
    copies: tuple[tuple[int, int], ...]


class Algorithm(NamedTuple):
    """A schedule. collective: ours; "": the file names none that we have.  chunks: of the whole buffer."""

    file: str
    name: str
    collective: str
    size: int
    chunks: int
    in_place: bool
    root: int
    gpus: tuple[Gpu, ...]


def read_algorithm(file: str | Path) -> Algorithm:
    """The schedule in a file.

    Raises:
        OSError: the file cannot be read.  ValueError: it is wrong; the message names the file and the line.
    """
    return _algorithm(read(file, "algo"))


def parse_algorithm(data: bytes, file: str = "schedule.xml") -> Algorithm:
    """The schedule in the bytes of a file.

    Raises:
        ValueError: it is wrong; the message names the file and the line.
    """
    return _algorithm(parse(data, "algo", file))


def _algorithm(algo: Element) -> Algorithm:
    found = list(algo.all("gpu"))
    size = algo.whole("ngpus", 1, MOST_GPUS, len(found))
    chunks = algo.whole("nchunksperloop", 1, MOST_CHUNKS)
    gpus: dict[int, Gpu] = {}
    steps = blocks = 0
    for gpu in found:
        number = gpu.whole("id", 0, size - 1)
        if number in gpus:
            raise gpu.error(f"is the second one with id {number}")
        gpus[number] = _gpu(gpu, number, size, chunks)
        blocks += len(gpus[number].blocks)
        if blocks > MOST_BLOCKS:
            raise gpu.error(f"there are more than {MOST_BLOCKS} thread blocks")
        steps += sum(step.units for block in gpus[number].blocks for step in block.steps)
        steps += len(gpus[number].copies)
        if steps > MOST_STEPS:
            raise gpu.error(f"there are more than {MOST_STEPS} steps")
    for number in range(size):
        if number not in gpus:
            raise algo.error(f"has no <gpu> with id {number}, but ngpus={size}")
    collective = COLLECTIVES.get(algo.text("coll", ""), "")
    root = algo.whole("root", 0, size - 1, 0)
    in_place = algo.whole("inplace", 0, 1, 0) == 1
    ordered = tuple(gpus[number] for number in range(size))
    return Algorithm(algo.file, algo.text("name", "msccl"), collective, size, chunks, in_place, root, ordered)


def _gpu(gpu: Element, rank: int, size: int, chunks: int) -> Gpu:
    given, out, scratch = (gpu.whole(f"{buffer}_chunks", 0, MOST_CHUNKS, 0) for buffer in "ios")
    most = max(chunks, given, out)  # in place one of the two is often 0
    limits = {"i": most, "o": most, "s": scratch}
    blocks: dict[int, Block] = {}
    ways: dict[tuple[str, int, int], int] = {}
    for tb in gpu.all("tb"):
        block = _block(tb, rank, size, limits)
        if block.number in blocks:
            raise tb.error(f"is the second one with id {block.number}")
        for way, peer in (("send", block.send), ("receive", block.receive)):
            other = ways.setdefault((way, peer, block.channel), block.number)
            if peer >= 0 and other != block.number:
                raise tb.error(f"thread block {other} has the same {way} GPU and channel")
        blocks[block.number] = block
    for block in blocks.values():
        for step in block.steps:
            if step.depends is not None:
                _check_dependency(gpu.file, blocks, step, step.depends)
    copies = tuple(
        (copy.whole("i_off", 0, MOST_CHUNKS - 1), copy.whole("o_off", 0, MOST_CHUNKS - 1))
        for copy in gpu.all("copy")
    )
    return Gpu(gpu.line, tuple(blocks[number] for number in sorted(blocks)), copies)


def _check_dependency(file: str, blocks: dict[int, Block], step: Step, depends: tuple[int, int]) -> None:
    block, number = depends
    if block not in blocks or number >= len(blocks[block].steps):
        raise ValueError(f"{file}:{step.line}: <step>: there is no step {number} in thread block {block}")


def _block(tb: Element, rank: int, size: int, limits: dict[str, int]) -> Block:
    send, receive = tb.whole("send", -1, size - 1), tb.whole("recv", -1, size - 1)
    if rank in (send, receive):
        raise tb.error(f"GPU {rank} sends to or receives from itself")
    steps = []
    for number, each in enumerate(tb.all("step")):
        if each.whole("s", 0, MOST_STEPS, number) != number:
            raise each.error(f"s is {each.text('s')}, expected {number}: steps are in order")
        step = _step(each, number, limits)
        if "s" in step.kind and send < 0:
            raise each.error(f"type {step.kind} sends, but the thread block has no send=")
        if "r" in step.kind and step.kind != "re" and receive < 0:
            raise each.error(f"type {step.kind} receives, but the thread block has no recv=")
        steps.append(step)
    return Block(
        tb.line, tb.whole("id", 0, MOST_STEPS), send, receive, tb.whole("chan", 0, 1 << 10, 0), tuple(steps)
    )


def _step(step: Element, number: int, limits: dict[str, int]) -> Step:
    kind = step.text("type")
    if kind not in KINDS:
        raise step.error(f"type is {kind[:40]!r}, expected one of {', '.join(KINDS)}")
    block = step.whole("depid", -1, MOST_STEPS, -1)
    before = step.whole("deps", -1, MOST_STEPS, -1)
    depends = (block, before) if block >= 0 and before >= 0 else None
    if kind == "nop":
        return Step(step.line, number, kind, Cell("i", 0), Cell("i", 0), 1, depends)
    units = step.whole("cnt", 1, MOST_CHUNKS, 1)
    cells = []
    for side, used in (("src", kind != "r"), ("dst", kind not in ("s", "rrs"))):
        buffer = step.text(f"{side}buf", "i")
        if buffer not in limits:
            raise step.error(f"{side}buf is {buffer[:40]!r}, expected i, o or s")
        offset = step.whole(f"{side}off", 0 if used else -1, MOST_CHUNKS - 1, None if used else 0)
        if used and offset + units > limits[buffer]:
            raise step.error(
                f"{buffer}[{offset + units - 1}] is beyond the {limits[buffer]} chunks of {buffer}"
            )
        cells.append(Cell(buffer, offset))
    return Step(step.line, number, kind, cells[0], cells[1], units, depends)
