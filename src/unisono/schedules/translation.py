"""From an execution of chunks in buffers to the steps of a plan.

A plan never writes its input, and its scratch chunks are as long as the chunks of the same number. So the
chunks of the file are renamed: each has the place (Out, In or Tmp) where its value now is. A message that waits
in scratch memory until it is added is taken when it is added, because a plan adds messages only.

The steps of a rank then run in an order of their own: as early as their data allows, sends first, and the
messages between two ranks in one order on both.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from unisono.engine.costs.price import rounds
from unisono.errors import PlanError
from unisono.plans.contracts import CONTRACTS
from unisono.plans.plan import EDGE_CAPACITY, Chunk, Copy, Plan, Recv, Reduce, Send, Step
from unisono.plans.proof import Deadlock, run
from unisono.schedules.execution import Event, accesses, events, same_memory
from unisono.schedules.msccl import COLLECTIVES, Algorithm, Cell

__all__ = ["plan_of"]


class Operation:
    """A step of a plan to be, with the messages that it sends or takes."""

    def __init__(self, rank: int, step: Step, taken: tuple[int, ...] = (), sent: int = -1) -> None:
        self.rank, self.step, self.taken, self.sent = rank, step, taken, sent
        self.level = 0

    def reads(self) -> tuple[Chunk, ...]:
        step = self.step
        if isinstance(step, Send):
            return (step.chunk,)
        if isinstance(step, Copy):
            return (step.src,)
        if isinstance(step, Reduce) and self.rank in step.frm:
            return (step.own or step.chunk,)
        return ()

    def writes(self) -> tuple[Chunk, ...]:
        step = self.step
        return () if isinstance(step, Send) else (step.dst if isinstance(step, Copy) else step.chunk,)


class Pending(NamedTuple):
    """A message that has not been taken yet, in place of a chunk."""

    message: int
    sender: int


class _Rank:
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
        self.operations: list[Operation] = []
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
        self.ranks = [_Rank(algorithm, rank, parts, uses[rank]) for rank in range(algorithm.size)]

    def run(self) -> list[Operation]:
        for rank, gpu in zip(self.ranks, self.algorithm.gpus, strict=True):
            for given, out in gpu.copies:
                source = same_memory(self.algorithm, rank.rank, Cell("i", given))
                target = same_memory(self.algorithm, rank.rank, Cell("o", out))
                if source != target:
                    self._copy(rank, target, source, f"line {gpu.line}")
        for self.now, event in enumerate(self.order):
            self._event(self.ranks[event.rank], event)
        self.now += 1
        for rank in self.ranks:
            self._finish(rank)
        return self.operations

    def _event(self, rank: _Rank, event: Event) -> None:
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

    def _send(self, rank: _Rank, chunk: Chunk, event: Event) -> None:
        self.index[event.sent] = chunk.index
        self.operations.append(Operation(rank.rank, Send(chunk, (event.peer,)), sent=event.sent))

    def _receive(self, rank: _Rank, target: Cell, event: Event) -> None:
        message = event.taken
        after = rank.next_use(target, self.now)
        if event.step.kind == "r" and after is not None and after.step.kind == "re":
            rank.put(target, Pending(message, self.sender[message]))
            return
        chunk = self._home(rank, target, self.index[message])
        self.operations.append(Operation(rank.rank, Recv(chunk, self.sender[message]), (message,)))
        rank.put(target, chunk)

    def _add(self, rank: _Rank, chunk: Chunk, own: Chunk, message: int) -> Chunk:
        frm = tuple(sorted((rank.rank, self.sender[message])))
        step = Reduce(chunk, frm, None if own == chunk else own)
        self.operations.append(Operation(rank.rank, step, (message,)))
        self._last_written = chunk
        return chunk

    def _add_local(self, rank: _Rank, target: Cell, source: Cell, at: str) -> None:
        waiting, own = rank.where.get(source), target
        if not isinstance(waiting, Pending):
            waiting, own = rank.where.get(target), source
        if not isinstance(waiting, Pending):
            raise PlanError(
                f"{self.algorithm.file}, {at}: rank {rank.rank} adds {source} to {target}, both of which are in "
                "memory; a plan adds messages only, so one of the two has to be what was received last"
            )
        held = self._held(rank, own, at)
        if own == source:
            rank.put(target, None)
        rank.put(target, self._add(rank, self._home(rank, target, held.index), held, waiting.message))
        if own == target:
            rank.put(source, None)

    def _copy(self, rank: _Rank, target: Cell, source: Cell, at: str) -> None:
        held = self._held(rank, source, at)
        chunk = rank.homes.get(target)
        if chunk is None or chunk == held:
            rank.put(target, held)  # another name for the same chunk
            return
        self._save(rank, chunk, target)
        self.operations.append(Operation(rank.rank, Copy(chunk, held)))
        rank.put(target, chunk)

    def _held(self, rank: _Rank, cell: Cell, at: str) -> Chunk:
        """Where the value of a cell is; a message is taken now."""
        found = rank.where.get(cell)
        if found is None:
            raise PlanError(
                f"{self.algorithm.file}, {at}: rank {rank.rank} reads {cell} before anything was written there"
            )
        if isinstance(found, Pending):
            rank.put(cell, None)
            chunk = self._home(rank, cell, self.index[found.message])
            self.operations.append(Operation(rank.rank, Recv(chunk, found.sender), (found.message,)))
            rank.put(cell, chunk)
            return chunk
        return found

    def _home(self, rank: _Rank, cell: Cell, index: int) -> Chunk:
        """Where a new value of a cell is written; what is there and still needed is saved."""
        chunk = rank.homes.get(cell) or rank.tmp(cell, index)
        self._save(rank, chunk, cell)
        return chunk

    def _save(self, rank: _Rank, chunk: Chunk, writer: Cell | None) -> None:
        sharing = [
            cell for cell in sorted(rank.holders[chunk]) if cell != writer and rank.lives(cell, self.now)
        ]
        if not sharing:
            return
        spare = rank.tmp(sharing[0], chunk.index)
        if spare == chunk or any(rank.lives(cell, self.now) for cell in rank.holders[spare]):
            raise PlanError(
                f"{self.algorithm.file}: rank {rank.rank} keeps two values of chunk {chunk.index} in scratch memory "
                "at the same time; a plan has one scratch chunk for each chunk of the buffer"
            )
        self.operations.append(Operation(rank.rank, Copy(spare, chunk)))
        for cell in list(rank.holders[chunk]):
            rank.put(cell, spare if cell in sharing else None)

    def _finish(self, rank: _Rank) -> None:
        for cell, held in list(rank.where.items()):
            if isinstance(held, Pending):
                self._held(rank, cell, "the end")
        for cell, chunk in rank.homes.items():
            held = rank.where.get(cell)
            if held == chunk and rank.reduces and chunk not in rank.written:
                step = Reduce(chunk, (rank.rank,))  # the result is the contribution of this rank alone
                self.operations.append(Operation(rank.rank, step))
            if isinstance(held, Chunk) and held != chunk:
                self._save(rank, chunk, cell)
                self.operations.append(Operation(rank.rank, Copy(chunk, held)))
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


# ---- the order of the steps --------------------------------------------------------------------------


def _dependencies(operations: Sequence[Operation]) -> list[list[int]]:
    """The earlier operations of the same rank that each one has to wait for."""
    found: list[list[int]] = []
    written: dict[tuple[int, Chunk], int] = {}
    read: dict[tuple[int, Chunk], list[int]] = {}
    for number, operation in enumerate(operations):
        needs = []
        for chunk in operation.reads():
            key = operation.rank, chunk
            if key in written:
                needs.append(written[key])
            read.setdefault(key, []).append(number)
        for chunk in operation.writes():
            key = operation.rank, chunk
            needs += [each for each in read.pop(key, []) if each != number]
            if key in written:
                needs.append(written[key])
            written[key] = number
        found.append(needs)
    return found


def _sorted(
    operations: Sequence[Operation], needs: Sequence[Sequence[int]], after: dict[int, list[int]]
) -> list[int]:
    """A topological order, by level; [] if there is none. after: further edges, of the order of messages."""
    sender = {operation.sent: number for number, operation in enumerate(operations) if operation.sent >= 0}
    edges: list[list[tuple[int, int]]] = [[] for _ in operations]
    missing = [0] * len(operations)

    def edge(before: int, then: int, weight: int) -> None:
        edges[before].append((then, weight))
        missing[then] += 1

    for number, operation in enumerate(operations):
        for before in needs[number]:
            edge(before, number, 0)
        for message in operation.taken:
            edge(sender[message], number, 1)
        for then in after.get(number, ()):
            edge(number, then, 0)
        operation.level = 0
    ready = [_priority(operations, number) for number, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        number = heapq.heappop(ready)[-1]
        order.append(number)
        for then, weight in edges[number]:
            operations[then].level = max(operations[then].level, operations[number].level + weight)
            missing[then] -= 1
            if not missing[then]:
                heapq.heappush(ready, _priority(operations, then))
    return order if len(order) == len(operations) else []


def _priority(operations: Sequence[Operation], number: int) -> tuple[int, bool, tuple[Chunk, ...], int]:
    operation = operations[number]
    return operation.level, not isinstance(operation.step, Send), operation.writes(), number


def _one_order(
    operations: Sequence[Operation], keys: Sequence[Sequence[int]], room: int
) -> dict[int, list[int]]:
    """Edges that give the messages between two ranks one order on both, `room` of them at a time.

    keys: of each message; they give the order.
    """
    sender = {operation.sent: number for number, operation in enumerate(operations) if operation.sent >= 0}
    taker = {message: number for number, operation in enumerate(operations) for message in operation.taken}
    between: dict[tuple[int, int], list[int]] = {}
    for message, number in sender.items():
        between.setdefault((operations[number].rank, operations[taker[message]].rank), []).append(message)
    after: dict[int, list[int]] = {}
    for messages in between.values():
        messages.sort(key=lambda message: keys[message])
        for first, second in zip(messages, messages[1:], strict=False):
            for side in (sender, taker):
                if side[first] != side[second]:
                    after.setdefault(side[first], []).append(side[second])
        for first, second in zip(messages, messages[room:], strict=False):
            after.setdefault(taker[first], []).append(sender[second])
    return after


def _keeps_order(operations: Sequence[Operation]) -> bool:
    """Whether the messages between two ranks are taken in the order in which they are sent."""
    sent: dict[tuple[int, int], list[int]] = {}
    sender = {operation.sent: operation.rank for operation in operations if operation.sent >= 0}
    taken: dict[tuple[int, int], list[int]] = {}
    for operation in operations:
        if isinstance(operation.step, Send):
            sent.setdefault((operation.rank, operation.step.to[0]), []).append(operation.sent)
        for message in operation.taken:
            taken.setdefault((sender[message], operation.rank), []).append(message)
    return sent == taken


def _by_level(file: str, operations: list[Operation]) -> list[int]:
    """The operations as early as their data allows, with one order of the messages between two ranks."""
    needs = _dependencies(operations)
    _sorted(operations, needs, {})
    sender = {operation.sent: number for number, operation in enumerate(operations) if operation.sent >= 0}
    taker = {message: number for number, operation in enumerate(operations) for message in operation.taken}
    count = len(sender)
    level = [(operations[sender[m]].level, operations[taker[m]].level, taker[m]) for m in range(count)]
    for keys in (level, [(taker[m],) for m in range(count)], [(sender[m],) for m in range(count)]):
        for room in (EDGE_CAPACITY // 2, EDGE_CAPACITY):
            order = _sorted(operations, needs, _one_order(operations, keys, room))
            if order:
                return order
    raise PlanError(
        f"{file}: messages between two ranks overtake each other on different channels; in a plan they keep "
        "their order"
    )


def _best(algorithm: Algorithm, operations: list[Operation], parts: int) -> Plan:
    """The plan with the fewest rounds: in the order of the execution, if messages keep theirs in it, or by level."""
    found = []
    if _keeps_order(operations):
        plan = _plan(algorithm, operations, range(len(operations)), parts)
        try:
            run(plan)
        except Deadlock:  # more messages on an edge than it can hold
            pass
        else:
            found.append(plan)
    try:
        found.append(_plan(algorithm, operations, _by_level(algorithm.file, operations), parts))
    except PlanError:
        if not found:
            raise
    return min(found, key=lambda plan: rounds(plan) if len(found) > 1 else 0)


def _plan(algorithm: Algorithm, operations: list[Operation], order: Iterable[int], parts: int) -> Plan:
    lists: list[list[Operation]] = [[] for _ in range(algorithm.size)]
    for number in order:
        lists[operations[number].rank].append(operations[number])
    steps = tuple(tuple(_merged(rank, iter(each))) for rank, each in enumerate(lists))
    return Plan(algorithm.collective, algorithm.name, algorithm.size, algorithm.root, steps, parts=parts)


def _merged(rank: int, operations: Iterator[Operation]) -> Iterator[Step]:
    """The steps of a rank; sends of one chunk side by side are one step, and additions to one chunk, too."""
    last: Step | None = None
    for operation in operations:
        step = operation.step
        if isinstance(step, Send) and isinstance(last, Send) and step.chunk == last.chunk:
            if not set(step.to) & set(last.to):
                last = Send(last.chunk, last.to + step.to)
                continue
        elif (
            isinstance(step, Reduce)
            and isinstance(last, Reduce)
            and step.chunk == last.chunk
            and step.own is None
        ):
            peers = {*step.frm, *last.frm} - {rank}
            own = {rank} & set(last.frm)
            if rank in step.frm and len(peers) == len({*step.frm} - {rank}) + len({*last.frm} - {rank}):
                last = Reduce(last.chunk, tuple(sorted(peers | own)), last.own)
                continue
        elif (
            isinstance(step, Reduce)
            and isinstance(last, Recv)
            and step.chunk == last.chunk
            and step.own is None
        ):
            if len(step.frm) == 2 and rank in step.frm and last.frm not in step.frm:
                peer = sum(step.frm) - rank
                last = Reduce(last.chunk, tuple(sorted((last.frm, peer))))
                continue
        if last is not None:
            yield last
        last = step
    if last is not None:
        yield last


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
                f"{algorithm.file}: has {algorithm.chunks} chunks for {algorithm.size} ranks; {algorithm.collective} "
                "has equal blocks, expected a multiple"
            )
    return _best(algorithm, _Translation(algorithm, parts).run(), parts)
