"""One execution of an MSCCL schedule: the order in which its steps can happen, and which message goes where.

Every round runs at most one step of each thread block, so the order is that of a machine whose steps take
equally long. A receive waits for a message on its channel, a step with a dependency for that step. A schedule
in which two thread blocks use a chunk at the same time, and nothing orders them, is refused: its result would
depend on the timing.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.errors import PlanError
from unisono.schedules.msccl import Algorithm, Cell, Step

__all__ = ["Event", "events"]


class Event(NamedTuple):
    """One chunk of one step, as it happens.

    Attributes:
        source, target: the chunks that it reads and writes.
        taken, sent: the numbers of the messages that it takes and sends; -1: none.
        peer: the rank that it sends to.
    """

    rank: int
    step: Step
    source: Cell
    target: Cell
    taken: int
    sent: int
    peer: int


Clock = NDArray[np.int32]


class _ThreadBlock:
    def __init__(self, rank: int, number: int, send: int, receive: int, channel: int, blocks: int) -> None:
        self.rank, self.number, self.send, self.receive, self.channel = rank, number, send, receive, channel
        self.steps: tuple[Step, ...] = ()
        self.next = 0
        self.at = 0
        self.clock: Clock = np.zeros(blocks, np.int32)


class _Execution:
    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        count = sum(len(gpu.blocks) for gpu in algorithm.gpus)
        self.blocks: list[_ThreadBlock] = []
        self.by_name: dict[tuple[int, int], _ThreadBlock] = {}
        self.kept: dict[tuple[int, int, int], Clock] = {}
        for rank, gpu in enumerate(algorithm.gpus):
            for each in gpu.blocks:
                block = _ThreadBlock(rank, each.number, each.send, each.receive, each.channel, count)
                block.steps, block.at = each.steps, len(self.blocks)
                self.blocks.append(block)
                self.by_name[rank, each.number] = block
        self.awaited = {
            (block.rank, *step.depends) for block in self.blocks for step in block.steps if step.depends
        }
        self.channels: dict[tuple[int, int, int], deque[tuple[int, Clock]]] = {}
        self.messages = 0
        self.events: list[Event] = []
        self.written: dict[tuple[int, Cell], tuple[int, int, Step]] = {}
        self.readers: dict[tuple[int, Cell], dict[int, tuple[int, Step]]] = {}

    def run(self) -> list[Event]:
        waiting = [block for block in self.blocks if block.steps]
        while waiting:
            ready = [block for block in waiting if self._ready(block)]
            if not ready:
                raise self._stuck(waiting)
            for block in ready:
                self._do(block)
            waiting = [block for block in waiting if block.next < len(block.steps)]
        for (sender, receiver, channel), left in self.channels.items():
            if left:
                raise PlanError(
                    f"{self.algorithm.file}: rank {receiver} never takes {len(left)} of the messages that "
                    f"rank {sender} sends it on channel {channel}"
                )
        return self.events

    def _ready(self, block: _ThreadBlock) -> bool:
        step = block.steps[block.next]
        if step.depends and self.by_name[block.rank, step.depends[0]].next <= step.depends[1]:
            return False
        if not _takes(step):
            return True
        return len(self.channels.get((block.receive, block.rank, block.channel), ())) >= step.units

    def _stuck(self, waiting: list[_ThreadBlock]) -> PlanError:
        lines = []
        for block in waiting[:8]:
            step = block.steps[block.next]
            if step.depends and self.by_name[block.rank, step.depends[0]].next <= step.depends[1]:
                what = f"step {step.depends[1]} of thread block {step.depends[0]}"
            else:
                what = f"a message of rank {block.receive} on channel {block.channel}"
            lines.append(
                f"rank {block.rank}, thread block {block.number}, step {step.number} (line {step.line}) "
                f"waits for {what}"
            )
        return PlanError(f"{self.algorithm.file}: deadlock: " + "; ".join(lines))

    def _do(self, block: _ThreadBlock) -> None:
        step = block.steps[block.next]
        if step.depends:
            before = (block.rank, *step.depends)
            np.maximum(block.clock, self.kept[before], out=block.clock)
        block.clock[block.at] += 1
        for unit in range(step.units if step.kind != "nop" else 0):
            source = Cell(step.source.buffer, step.source.offset + unit)
            target = Cell(step.target.buffer, step.target.offset + unit)
            self._unit(block, step, source, target)
        if (block.rank, block.number, step.number) in self.awaited:
            self.kept[block.rank, block.number, step.number] = block.clock.copy()
        block.next += 1

    def _unit(self, block: _ThreadBlock, step: Step, source: Cell, target: Cell) -> None:
        taken = sent = -1
        if _takes(step):
            taken, clock = self.channels[block.receive, block.rank, block.channel].popleft()
            np.maximum(block.clock, clock, out=block.clock)
        reads, writes = accesses(step.kind, source, target)
        for cell in reads:
            self._check_read(block, step, self._same(block.rank, cell))
        for cell in writes:
            self._check_write(block, step, self._same(block.rank, cell))
        if sends(step):
            sent, self.messages = self.messages, self.messages + 1
            way = self.channels.setdefault((block.rank, block.send, block.channel), deque())
            way.append((sent, block.clock.copy()))
        self.events.append(Event(block.rank, step, source, target, taken, sent, block.send))

    def _same(self, rank: int, cell: Cell) -> Cell:
        return same_memory(self.algorithm, rank, cell)

    def _check_read(self, block: _ThreadBlock, step: Step, cell: Cell) -> None:
        key = block.rank, cell
        writer = self.written.get(key)
        if writer is not None and block.clock[writer[0]] < writer[1]:
            raise self._race(block, step, cell, writer[2])
        self.readers.setdefault(key, {})[block.at] = (int(block.clock[block.at]), step)

    def _check_write(self, block: _ThreadBlock, step: Step, cell: Cell) -> None:
        key = block.rank, cell
        others = [(at, time, other) for at, (time, other) in self.readers.pop(key, {}).items()]
        if key in self.written:
            others.append(self.written[key])
        for at, time, other in others:
            if block.clock[at] < time:
                raise self._race(block, step, cell, other)
        self.written[key] = (block.at, int(block.clock[block.at]), step)

    def _race(self, block: _ThreadBlock, step: Step, cell: Cell, other: Step) -> PlanError:
        return PlanError(
            f"{self.algorithm.file}:{step.line}: rank {block.rank}, thread block {block.number}, "
            f"step {step.number} uses {cell}, which line {other.line} uses too, and nothing orders the two: "
            "it lacks a dependency"
        )


def events(algorithm: Algorithm) -> list[Event]:
    """The steps of all ranks, chunk by chunk, in an order in which they can happen.

    Raises:
        PlanError: a deadlock, a message that nobody takes, or two steps that use a chunk in no order.
    """
    return _Execution(algorithm).run()


def accesses(kind: str, source: Cell, target: Cell) -> tuple[tuple[Cell, ...], tuple[Cell, ...]]:
    """What a step reads and writes."""
    reads = {"r": (), "rcs": (), "re": (source, target)}.get(kind, (source,))
    return reads, () if kind in ("s", "rrs") else (target,)


def sends(step: Step) -> bool:
    """Whether a step sends."""
    return step.kind in ("s", "rcs", "rrs", "rrcs")


def _takes(step: Step) -> bool:
    return step.kind in ("r", "rcs", "rrs", "rrc", "rrcs")


def same_memory(algorithm: Algorithm, rank: int, cell: Cell) -> Cell:
    """The cell under the one name that its memory has: in place, input and output overlap."""
    if not algorithm.in_place:
        return cell
    parts = max(1, algorithm.chunks // algorithm.size)
    if algorithm.collective in ("all_gather", "gather") and cell.buffer == "i":
        return Cell("o", rank * parts + cell.offset)
    if algorithm.collective in ("reduce_scatter", "scatter") and cell.buffer == "o":
        return Cell("i", rank * parts + cell.offset)
    if cell.buffer == "i" and algorithm.collective not in ("reduce_scatter", "scatter"):
        return Cell("o", cell.offset)
    return cell
