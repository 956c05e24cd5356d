"""The order of the steps of a plan that was read: as early as their data allows, or as the file has them.

The messages between two ranks keep one order on both, and no more of them are on their way than an edge of
the engine holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from unisono.engine.costs.plan_cost import rounds
from unisono.errors import PlanError
from unisono.plans.plan import EDGE_CAPACITY, Chunk, Copy, Plan, Recv, Reduce, Send, Step
from unisono.plans.proof import Deadlock, run
from unisono.schedules.msccl import Algorithm

__all__ = ["RankStep", "ordered"]


class RankStep:
    """A step of a plan to be, with the messages that it sends or takes.

    early: it may run before the steps above it that do not use its chunks.
    """

    def __init__(
        self, rank: int, step: Step, taken: tuple[int, ...] = (), sent: int = -1, *, early: bool = False
    ) -> None:
        self.rank, self.step, self.taken, self.sent, self.early = rank, step, taken, sent, early
        self.level = 0

    def reads(self) -> tuple[Chunk, ...]:
        """The chunks that it reads."""
        step = self.step
        if isinstance(step, Send):
            return (step.chunk,)
        if isinstance(step, Copy):
            return (step.src,)
        if isinstance(step, Reduce) and self.rank in step.frm:
            return (step.own or step.chunk,)
        return ()

    def writes(self) -> tuple[Chunk, ...]:
        """The chunk that it writes."""
        step = self.step
        return () if isinstance(step, Send) else (step.dst if isinstance(step, Copy) else step.chunk,)


def _dependencies(operations: Sequence[RankStep]) -> list[list[int]]:
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
    operations: Sequence[RankStep], needs: Sequence[Sequence[int]], after: dict[int, list[int]]
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


def _priority(operations: Sequence[RankStep], number: int) -> tuple[int, bool, tuple[Chunk, ...], int]:
    operation = operations[number]
    return operation.level, not isinstance(operation.step, Send), operation.writes(), number


def _one_order(
    operations: Sequence[RankStep], keys: Sequence[tuple[int, ...]], room: int
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
        for first, second in pairwise(messages):
            for side in (sender, taker):
                if side[first] != side[second]:
                    after.setdefault(side[first], []).append(side[second])
        for first, second in zip(messages, messages[room:], strict=False):
            after.setdefault(taker[first], []).append(sender[second])
    return after


def _keeps_order(operations: Sequence[RankStep]) -> bool:
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


def _by_level(file: str, operations: list[RankStep]) -> list[int]:
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


def ordered(algorithm: Algorithm, operations: list[RankStep], parts: int) -> Plan:
    """The plan with fewer rounds: in the order of the execution, if messages keep theirs, or by level."""
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


def _plan(algorithm: Algorithm, operations: list[RankStep], order: Iterable[int], parts: int) -> Plan:
    lists: list[list[RankStep]] = [[] for _ in range(algorithm.size)]
    for number in order:
        listed = lists[operations[number].rank]
        listed.insert(_place(listed, operations[number]), operations[number])
    steps = tuple(tuple(_merged(rank, iter(each))) for rank, each in enumerate(lists))
    return Plan(algorithm.collective, algorithm.name, algorithm.size, algorithm.root, steps, parts=parts)


def _place(listed: list[RankStep], operation: RankStep) -> int:
    """Where a step goes: behind all others, or behind those that use its chunks and the sends there."""
    place = len(listed)
    if not operation.early:
        return place
    used = {*operation.reads(), *operation.writes()}
    while place and not used & {*listed[place - 1].reads(), *listed[place - 1].writes()}:
        place -= 1
    while place < len(listed) and isinstance(listed[place].step, Send):
        place += 1
    return place


def _merged(rank: int, operations: Iterator[RankStep]) -> Iterator[Step]:
    """The steps of a rank; sends of one chunk side by side are one step, and additions to one chunk, too."""
    last: Step | None = None
    for operation in operations:
        step = operation.step
        joined = None if last is None else _joined(rank, last, step)
        if joined is not None:
            last = joined
            continue
        if last is not None:
            yield last
        last = step
    if last is not None:
        yield last


def _joined(rank: int, last: Step, step: Step) -> Step | None:
    """One step for two that follow each other, if there is one."""
    if isinstance(step, Send) and isinstance(last, Send):
        both = step.chunk == last.chunk and not set(step.to) & set(last.to)
        return Send(last.chunk, last.to + step.to) if both else None
    if not isinstance(step, Reduce) or step.own is not None or rank not in step.frm:
        return None
    if isinstance(last, Reduce) and last.chunk == step.chunk:
        mine, own = set(last.frm), last.own
    elif isinstance(last, Recv) and last.chunk == step.chunk:
        mine, own = {last.frm}, None
    else:
        return None
    peers = set(step.frm) - {rank}
    return None if peers & mine else Reduce(last.chunk, tuple(sorted(peers | mine)), own)
