"""From an execution of chunks in buffers to the steps of a plan.

A plan never writes its input, and its scratch chunks are as long as the chunks of the same number. So the
chunks of the file are renamed: each has the place (Out, In or Tmp) where its value now is. A message that
waits in scratch memory until it is added is taken when it is added, because a plan adds messages only.

`ordering` then gives the steps of each rank their order.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from unisono.errors import PlanError
from unisono.plans.contracts import CONTRACTS
from unisono.plans.plan import Chunk, Copy, Plan, Recv, Reduce, Send
from unisono.schedules.execution import Event, accesses, events, same_memory
from unisono.schedules.msccl import COLLECTIVES, Algorithm, Cell
from unisono.schedules.ordering import RankStep, ordered

__all__ = ["plan_of"]


class Pending(NamedTuple):
    """A message that has not been taken yet, in place of a chunk."""

    message: int
    sender: int


class _RankTranslation:
    """The chunks of a rank: where each is.

    Attributes:
        where: the place of every chunk that has a value.
        uses: of each chunk, the events that use it, last first; what is left of it is the future.
    """

    def __init__(
        self, algorithm: Algorithm, rank: int, parts: int, uses: dict[Cell, list[tuple[int, Event]]]
    ) -> None:
        self.algorithm, self.rank, self.uses = algorithm, rank, uses
        contract = CONTRACTS[algorithm.collective]
        self.in_place = contract.in_place
        self.reduces = contract.reduces and contract.counts
        self.written: set[Chunk] = set()
        self.any = contract.out_blocks == "any"
        self.outputs = _outputs(algorithm, rank, parts)
        self.homes = {cell: Chunk("out", number) for number, cell in enumerate(self.outputs)}
        self.where: dict[Cell, Chunk | Pending] = {}
        self.holders: dict[Chunk, set[Cell]] = defaultdict(set)
        self.scratch: dict[Cell, int] = {}
        if contract.gives(rank, algorithm.root):
            space = "out" if self.in_place else "in"
            for number in range(_inputs(algorithm, parts)):
                self.put(same_memory(algorithm, rank, Cell("i", number)), Chunk(space, number))
        self.written.clear()

    def put(self, cell: Cell, held: Chunk | Pending | None) -> None:
        """Note where the value of a cell is; None: nowhere."""
        before = self.where.pop(cell, None)
        if isinstance(before, Chunk):
            self.holders[before].discard(cell)
        if held is not None:
            self.where[cell] = held
        if isinstance(held, Chunk):
            self.holders[held].add(cell)
            self.written.add(held)

    def tmp(self, cell: Cell, index: int) -> Chunk:
        """The scratch chunk of a cell. index: of the data, which its number has to be where chunks differ."""
        number = index if self.any else self.scratch.setdefault(cell, len(self.scratch))
        return Chunk("tmp", number)

    def lives(self, cell: Cell, now: int) -> bool:
        """Whether the value of a cell will be read, or is a result."""
        event = self.next_use(cell, now)
        if event is None:
            return cell in self.homes
        reads, _ = accesses(event.step.kind, event.source, event.target)
        return cell in (same_memory(self.algorithm, self.rank, each) for each in reads)

    def next_use(self, cell: Cell, now: int) -> Event | None:
        """The first event after `now` that uses a cell."""
        uses = self.uses[cell]
        while uses and uses[-1][0] <= now:
            uses.pop()
        return uses[-1][1] if uses else None


class _Translation:
    def __init__(self, algorithm: Algorithm, parts: int) -> None:
        self.algorithm = algorithm
        self.order = events(algorithm)
        self.operations: list[RankStep] = []
        self.index: dict[int, int] = {}
        self.sender: dict[int, int] = {}
        self.now = 0
        uses: list[dict[Cell, list[tuple[int, Event]]]] = [defaultdict(list) for _ in algorithm.gpus]
        for time, event in enumerate(self.order):
            for side in accesses(event.step.kind, event.source, event.target):
                for cell in side:
                    uses[event.rank][same_memory(algorithm, event.rank, cell)].append((time, event))
        for each in uses:
            for listed in each.values():
                listed.reverse()
        self.ranks = [_RankTranslation(algorithm, rank, parts, uses[rank]) for rank in range(algorithm.size)]

    def run(self) -> list[RankStep]:
        for rank, gpu in zip(self.ranks, self.algorithm.gpus, strict=True):
            for given, out in gpu.copies:
                source = same_memory(self.algorithm, rank.rank, Cell("i", given))
                target = same_memory(self.algorithm, rank.rank, Cell("o", out))
                if source != target:
                    self._copy(rank, target, source, f"line {gpu.line}")
        for now, event in enumerate(self.order):
            self.now = now
            self._event(self.ranks[event.rank], event)
        self.now += 1
        for rank in self.ranks:
            self._finish(rank)
        return self.operations

    def _event(self, rank: _RankTranslation, event: Event) -> None:
        kind = event.step.kind
        source = same_memory(self.algorithm, rank.rank, event.source)
        target = same_memory(self.algorithm, rank.rank, event.target)
        at = f"line {event.step.line}"
        if event.sent >= 0:
            self.sender[event.sent] = rank.rank
        if kind == "s":
            self._send(rank, self._held(rank, source, at), event)
        elif kind in ("r", "rcs"):
            self._receive(rank, target, event)
            if kind == "rcs":
                self._send(rank, self._held(rank, target, at), event)
        elif kind == "rrs":
            own = self._held(rank, source, at)
            unstored = rank.tmp(Cell(f"sum of {source}", 0), own.index)
            self._save(rank, unstored, None)
            self._add(rank, unstored, own, event.taken)
            self._send(rank, self._last_written, event)
        elif kind in ("rrc", "rrcs"):
            own = self._held(rank, source, at)
            rank.put(target, self._add(rank, self._home(rank, target, own.index), own, event.taken))
            if kind == "rrcs":
                self._send(rank, self._last_written, event)
        elif kind == "cpy":
            self._copy(rank, target, source, at)
        else:
            self._add_local(rank, target, source, at)

    # ---- the steps -----------------------------------------------------------------------------------

    def _send(self, rank: _RankTranslation, chunk: Chunk, event: Event) -> None:
        self.index[event.sent] = chunk.index
        self.operations.append(RankStep(rank.rank, Send(chunk, (event.peer,)), sent=event.sent))

    def _receive(self, rank: _RankTranslation, target: Cell, event: Event) -> None:
        message = event.taken
        after = rank.next_use(target, self.now)
        if event.step.kind == "r" and after is not None and after.step.kind == "re":
            rank.put(target, Pending(message, self.sender[message]))
            return
        chunk = self._home(rank, target, self.index[message])
        self.operations.append(RankStep(rank.rank, Recv(chunk, self.sender[message]), (message,)))
        rank.put(target, chunk)

    def _add(self, rank: _RankTranslation, chunk: Chunk, own: Chunk, message: int) -> Chunk:
        frm = tuple(sorted((rank.rank, self.sender[message])))
        step = Reduce(chunk, frm, None if own == chunk else own)
        self.operations.append(RankStep(rank.rank, step, (message,)))
        self._last_written = chunk
        return chunk

    def _add_local(self, rank: _RankTranslation, target: Cell, source: Cell, at: str) -> None:
        waiting, own = rank.where.get(source), target
        if not isinstance(waiting, Pending):
            waiting, own = rank.where.get(target), source
        if not isinstance(waiting, Pending):
            raise PlanError(
                f"{self.algorithm.file}, {at}: rank {rank.rank} adds {source} to {target}, both of "
                "which are in memory; a plan adds messages only, so one of the two has to be what came last"
            )
        held = self._held(rank, own, at)
        if own == source:
            rank.put(target, None)
        rank.put(target, self._add(rank, self._home(rank, target, held.index), held, waiting.message))
        if own == target:
            rank.put(source, None)

    def _copy(self, rank: _RankTranslation, target: Cell, source: Cell, at: str) -> None:
        held = self._held(rank, source, at)
        chunk = rank.homes.get(target)
        if chunk is None or chunk == held:
            rank.put(target, held)  # another name for the same chunk
            return
        self._save(rank, chunk, target)
        self.operations.append(RankStep(rank.rank, Copy(chunk, held)))
        rank.put(target, chunk)

    def _held(self, rank: _RankTranslation, cell: Cell, at: str) -> Chunk:
        """Where the value of a cell is; a message is taken now."""
        found = rank.where.get(cell)
        if found is None:
            raise PlanError(
                f"{self.algorithm.file}, {at}: rank {rank.rank} reads {cell} before it is written"
            )
        if isinstance(found, Pending):
            rank.put(cell, None)
            chunk = self._home(rank, cell, self.index[found.message])
            self.operations.append(RankStep(rank.rank, Recv(chunk, found.sender), (found.message,)))
            rank.put(cell, chunk)
            return chunk
        return found

    def _home(self, rank: _RankTranslation, cell: Cell, index: int) -> Chunk:
        """Where a new value of a cell is written; what is there and still needed is saved."""
        chunk = rank.homes.get(cell) or rank.tmp(cell, index)
        self._save(rank, chunk, cell)
        return chunk

    def _save(self, rank: _RankTranslation, chunk: Chunk, writer: Cell | None) -> None:
        sharing = [
            cell for cell in sorted(rank.holders[chunk]) if cell != writer and rank.lives(cell, self.now)
        ]
        if not sharing:
            return
        spare = rank.tmp(sharing[0], chunk.index)
        if spare == chunk or any(rank.lives(cell, self.now) for cell in rank.holders[spare]):
            raise PlanError(
                f"{self.algorithm.file}: rank {rank.rank} keeps two values of chunk {chunk.index} in scratch "
                "memory at the same time; a plan has one scratch chunk for each chunk of the buffer"
            )
        self.operations.append(RankStep(rank.rank, Copy(spare, chunk)))
        for cell in list(rank.holders[chunk]):
            rank.put(cell, spare if cell in sharing else None)

    def _finish(self, rank: _RankTranslation) -> None:
        for cell in [cell for cell, held in rank.where.items() if isinstance(held, Pending)]:
            self._held(rank, cell, "the end")
        for cell, chunk in rank.homes.items():
            value = rank.where.get(cell)
            held = value if isinstance(value, Chunk) else None
            if held is not None and held == chunk and rank.reduces and chunk not in rank.written:
                step = Reduce(chunk, (rank.rank,))  # the result is the contribution of this rank alone
                self.operations.append(RankStep(rank.rank, step, early=True))
            if held is not None and held != chunk:
                self._save(rank, chunk, cell)
                self.operations.append(RankStep(rank.rank, Copy(chunk, held), early=True))
                rank.put(cell, chunk)


def _inputs(algorithm: Algorithm, parts: int) -> int:
    blocks = CONTRACTS[algorithm.collective].in_blocks
    return {"0": algorithm.chunks, "1": parts, "p": parts * algorithm.size}[blocks]


def _outputs(algorithm: Algorithm, rank: int, parts: int) -> list[Cell]:
    """The cells that hold the result of a rank."""
    contract = CONTRACTS[algorithm.collective]
    if (
        contract.keeps(rank, algorithm.root)
        or contract.expected(rank, 0, algorithm.size, algorithm.root) is None
    ):
        return []
    count = {"any": algorithm.chunks, "1": parts, "p": parts * algorithm.size}[contract.out_blocks]
    return [same_memory(algorithm, rank, Cell("o", number)) for number in range(count)]


def plan_of(algorithm: Algorithm) -> Plan:
    """The plan of a schedule; it is not proved yet.

    Raises:
        PlanError: it deadlocks, races, or does what a plan cannot.
    """
    if not algorithm.collective:
        raise PlanError(f"{algorithm.file}: its coll= is none of {', '.join(sorted(COLLECTIVES))}")
    contract = CONTRACTS[algorithm.collective]
    parts = 1
    if "p" in (contract.in_blocks, contract.out_blocks):
        parts, rest = divmod(algorithm.chunks, algorithm.size)
        if rest:
            raise PlanError(
                f"{algorithm.file}: has {algorithm.chunks} chunks for {algorithm.size} ranks; "
                f"{algorithm.collective} has equal blocks, expected a multiple"
            )
    return ordered(algorithm, _Translation(algorithm, parts).run(), parts)
