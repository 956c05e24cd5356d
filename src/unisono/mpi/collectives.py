"""Collectives of buffers. Each is one method, see plan.py, for communicators of one side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.mpi import schedules
from unisono.mpi.addresses import check_root
from unisono.mpi.buffers import in_place
from unisono.mpi.errors import exact
from unisono.mpi.lane import Lane
from unisono.mpi.message_spec import Block, by_types, equal, simple, vector
from unisono.mpi.op import OPS, Op, check_alike, check_type, engine_op
from unisono.mpi.plan import Plan, forms
from unisono.mpi.progress import Schedule

SUM = OPS["SUM"]


def copy_of(block: Block) -> Any:
    """The packed items of a block, not in its own memory."""
    packed = block.pack()
    return packed.copy() if block.dense else packed


class Collectives:
    """The collectives of `Comm`, as those of one side perform them."""

    _state: Any

    def _barrier(self, lane: Lane) -> Plan:
        """Wait until every rank has called it."""
        return Plan(schedules.barrier(lane), lambda group, later: group.barrier(async_op=later))

    def _bcast(self, lane: Lane, buf: Any, root: int = 0) -> Plan:
        """Copy the items of the root to every rank."""
        root = check_root(root, lane.size)
        block = simple(buf, writable=lane.rank != root)
        if block.nbytes == 0:
            return Plan(schedules.broadcast_block(lane, block, root))
        data = block.pack() if lane.rank == root else block.room()
        return Plan(
            schedules.broadcast_block(lane, block, root),
            lambda group, later: group.broadcast(data, root, async_op=later),
            None if lane.rank == root or block.dense else lambda: block.fill(data),
        )

    # ---- gather and scatter

    def _gather(self, lane: Lane, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
        """Gather blocks of one size on the root."""
        root = check_root(root, lane.size)
        blocks = equal(recvbuf, lane.size, writable=True) if lane.rank == root else None
        mine = None if blocks is not None and in_place(sendbuf) else simple(sendbuf, writable=False)
        schedule = schedules.gather(lane, mine, blocks, root)
        own = mine if mine is not None else blocks[root]  # type: ignore[index]
        if own.nbytes == 0 or (blocks is not None and blocks[root].nbytes != own.nbytes):
            return Plan(schedule)
        target = None if blocks is None else _side_by_side(blocks)
        room = None if target is None else target.room()
        packed = own.pack()
        return Plan(
            schedule,
            lambda group, later: group.gather(packed, room, root, async_op=later),
            None if target is None or target.dense else lambda: target.fill(room),
        )

    def _gatherv(self, lane: Lane, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
        """Gather blocks of any sizes on the root."""
        return self._gather_by(lane, sendbuf, recvbuf, root, vector)

    def _gather_by(self, lane: Lane, sendbuf: Any, recvbuf: Any, root: int, parts: Any) -> Plan:
        root = check_root(root, lane.size)
        blocks = parts(recvbuf, lane.size, writable=True) if lane.rank == root else None
        mine = None if lane.rank == root and in_place(sendbuf) else simple(sendbuf, writable=False)
        rooms = None if blocks is None else [block.room() for block in blocks]
        packed = (blocks[root] if mine is None else mine).pack()  # type: ignore[index]
        return Plan(
            schedules.gather(lane, mine, blocks, root),
            lambda group, later: group.gather(packed, rooms, root, async_op=later),
            _filled_from(blocks, rooms),
        )

    def _scatter(self, lane: Lane, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
        """Give every rank a block of the root, of one size."""
        root = check_root(root, lane.size)
        blocks = equal(sendbuf, lane.size, writable=False) if lane.rank == root else None
        mine = None if blocks is not None and in_place(recvbuf) else simple(recvbuf, writable=True)
        schedule = schedules.scatter(lane, blocks, mine, root)
        nbytes = blocks[root].nbytes if mine is None else mine.nbytes  # type: ignore[index]
        if nbytes == 0 or (blocks is not None and blocks[root].nbytes != nbytes):
            return Plan(schedule)
        packed = None if blocks is None else _side_by_side(blocks).pack()
        room = np.empty(nbytes, np.uint8) if mine is None else mine.room()
        return Plan(
            schedule,
            lambda group, later: group.scatter(room, packed, root, async_op=later),
            None if mine is None or mine.dense else lambda: mine.fill(room),
        )

    def _scatterv(self, lane: Lane, sendbuf: Any, recvbuf: Any, root: int = 0) -> Plan:
        """Give every rank a block of the root, of any sizes."""
        return self._scatter_by(lane, sendbuf, recvbuf, root, vector)

    def _scatter_by(self, lane: Lane, sendbuf: Any, recvbuf: Any, root: int, parts: Any) -> Plan:
        root = check_root(root, lane.size)
        blocks = parts(sendbuf, lane.size, writable=False) if lane.rank == root else None
        mine = None if in_place(recvbuf) and lane.rank == root else simple(recvbuf, writable=True)
        packed = None if blocks is None else [block.pack() for block in blocks]
        room = np.empty(blocks[root].nbytes, np.uint8) if mine is None else mine.room()  # type: ignore[index]
        return Plan(
            schedules.scatter(lane, blocks, mine, root),
            lambda group, later: group.scatter(room, packed, root, async_op=later),
            None if mine is None else _filled_from([mine], [room]),
        )

    # ---- all to all

    def _allgather(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Gather blocks of one size on every rank."""
        blocks = equal(recvbuf, lane.size, writable=True)
        mine = None if in_place(sendbuf) else simple(sendbuf, writable=False)
        schedule = schedules.all_gather(lane, mine, blocks)
        nbytes = blocks[0].nbytes
        if nbytes == 0 or (mine is not None and mine.nbytes != nbytes):
            return Plan(schedule)
        whole_block = _side_by_side(blocks)
        room = whole_block.room()
        own = room[lane.rank * nbytes :][:nbytes]
        if mine is None and not whole_block.dense:
            own[:] = blocks[lane.rank].pack()
        packed = own if mine is None else mine.pack()
        return Plan(
            schedule,
            lambda group, later: group.all_gather(room, packed, async_op=later),
            None if whole_block.dense else lambda: whole_block.fill(room),
        )

    def _allgatherv(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Gather blocks of any sizes on every rank."""
        blocks = vector(recvbuf, lane.size, writable=True)
        mine = None if in_place(sendbuf) else simple(sendbuf, writable=False)
        rooms, packed = [block.room() for block in blocks], (mine or blocks[lane.rank]).pack()
        return Plan(
            schedules.all_gather(lane, mine, blocks),
            lambda group, later: group.all_gather_v(rooms, packed, async_op=later),
            _filled_from(blocks, rooms),
        )

    def _alltoall(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Send block i to rank i; all blocks are of one size."""
        incoming = equal(recvbuf, lane.size, writable=True)
        outgoing = None if in_place(sendbuf) else equal(sendbuf, lane.size, writable=False)
        schedule = schedules.all_to_all(lane, outgoing, incoming)
        target = _side_by_side(incoming)
        if target.nbytes == 0 or (outgoing is not None and outgoing[0].nbytes != incoming[0].nbytes):
            return Plan(schedule)
        room = target.room()
        packed = copy_of(target) if outgoing is None else _side_by_side(outgoing).pack()
        return Plan(
            schedule,
            lambda group, later: group.all_to_all(room, packed, async_op=later),
            None if target.dense else lambda: target.fill(room),
        )

    def _alltoallv(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Send block i to rank i; blocks are of any sizes."""
        incoming = vector(recvbuf, lane.size, writable=True)
        outgoing = None if in_place(sendbuf) else vector(sendbuf, lane.size, writable=False)
        return _exchanged(lane, outgoing, incoming)

    def _alltoallw(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Send block i to rank i; blocks are of any sizes and types."""
        incoming = by_types(recvbuf, lane.size, writable=True)
        outgoing = None if in_place(sendbuf) else by_types(sendbuf, lane.size, writable=False)
        return _exchanged(lane, outgoing, incoming)

    # ---- reductions

    def _reduce(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Plan:
        """Reduce to the root, in the order of ranks."""
        root = check_root(root, lane.size)
        target = simple(recvbuf, writable=True) if lane.rank == root else None
        source = _contribution(sendbuf, target)
        check_type(op, source.type)
        begin = source.pack if target is None else _filled_by(target, source)

        def schedule() -> Schedule:
            found = yield from schedules.reduce(lane, begin(), op, source.type, root)
            if target is not None:
                target.fill(found)

        return _reduction(schedule(), "reduce", begin, op, target or source, fills=target, dst=root)

    def _allreduce(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        """Reduce to every rank."""
        target = simple(recvbuf, writable=True)
        source = _contribution(sendbuf, target)
        check_type(op, source.type)
        begin = _filled_by(target, source)

        def schedule() -> Schedule:
            found = yield from schedules.all_reduce(lane, begin(), op, source.type)
            target.fill(found)

        return _reduction(schedule(), "all_reduce", begin, op, target, fills=target)

    def _reduce_scatter_block(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        """Reduce, and give every rank a block of one size."""
        if in_place(sendbuf):
            target = simple(recvbuf, writable=True, blocks=lane.size)
            source = Block(target.raw, target.start, target.count * lane.size, target.type)
        else:
            target = simple(recvbuf, writable=True)
            first = simple(sendbuf, writable=False, blocks=lane.size)
            check_alike(first, target)
            source = Block(first.raw, first.start, first.count * lane.size, first.type)
        return self._reduce_blocks(lane, source, target, [target.count] * lane.size, op)

    def _reduce_scatter(
        self, lane: Lane, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Op = SUM
    ) -> Plan:
        """Reduce, and give every rank a block of any size."""
        target = simple(recvbuf, writable=True)
        source = target if in_place(sendbuf) else simple(sendbuf, writable=False)
        if source.type is not target.type:
            raise ValueError("mismatch in send and receive MPI datatypes")
        if recvcounts is None:
            share, more = divmod(target.count, lane.size)
            counts = [share + (r < more) for r in range(lane.size)] if in_place(sendbuf) else None
        else:
            counts = [exact(one, "recvcounts") for one in recvcounts]
            _check_counts(counts, lane, source, target)
        return self._reduce_blocks(lane, source, target, counts, op)

    def _reduce_blocks(
        self, lane: Lane, source: Block, target: Block, counts: list[int] | None, op: Op
    ) -> Plan:
        """counts: None: each rank knows its own, and tells the others."""
        check_type(op, source.type)
        size = source.type.layout.size
        packed = copy_of(source)

        def schedule() -> Schedule:
            told = counts
            if told is None:
                rows = np.zeros((lane.size, 8), np.uint8)
                raw = rows.reshape(-1)
                blocks = [Block(raw, 8 * rank, 8, BYTE) for rank in range(lane.size)]
                rows[lane.rank] = np.array([target.count]).view(np.uint8)
                yield from schedules.all_gather(lane, None, blocks)
                told = raw.view(np.int64).tolist()
                _check_counts(told, lane, source, target)
            found = yield from schedules.reduce(lane, packed, op, source.type, 0)
            mine = np.empty(told[lane.rank] * size, np.uint8)
            parts = None
            if lane.rank == 0:
                starts = np.cumsum([0, *told]) * size
                parts = [Block(found, int(starts[r]), told[r] * size, BYTE) for r in range(lane.size)]
            yield from schedules.scatter(lane, parts, Block(mine, 0, mine.size, BYTE), 0)
            target.fill(mine)

        return Plan(schedule())


class Prefixes:
    """Reductions over the ranks before, of `Intracomm` alone."""

    def _scan(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        """Reduce over the ranks up to this one."""
        return self._prefix(lane, sendbuf, recvbuf, op, True)

    def _exscan(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        """Reduce over the ranks below this one; nothing changes on rank 0."""
        return self._prefix(lane, sendbuf, recvbuf, op, False)

    def _prefix(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op, inclusive: bool) -> Plan:
        target = simple(recvbuf, writable=True)
        source = _contribution(sendbuf, target)
        check_type(op, source.type)

        def schedule() -> Schedule:
            found = yield from schedules.scan(lane, copy_of(source), op, source.type, inclusive)
            if found is not None:
                target.fill(found)

        if not inclusive:
            return Plan(schedule())
        return _reduction(schedule(), "scan", _filled_by(target, source), op, target, fills=target)


BYTE = Block(np.zeros(0, np.uint8), 0, 0, simple(b"", writable=False).type).type


def _check_counts(counts: list[int], lane: Lane, source: Block, target: Block) -> None:
    if len(counts) != lane.size:
        raise ValueError(f"expecting {lane.size} items, got {len(counts)}")
    if counts[lane.rank] > target.count:
        raise ValueError(f"mismatch in receive count {target.count} and recvcounts {counts[lane.rank]}")
    if sum(counts) != source.count and source is not target:
        raise ValueError(f"mismatch in send count {source.count} and sum(recvcounts) {sum(counts)}")


def _contribution(sendbuf: Any, target: Block | None) -> Block:
    """The items that a rank gives to a reduction."""
    if in_place(sendbuf) and target is not None:
        return target
    source = simple(sendbuf, writable=False)
    if target is not None:
        check_alike(source, target)
    return source


def _filled_by(target: Block, source: Block) -> Callable[[], Any]:
    """When a reduction begins: its items, in the memory of the target where they lie side by side."""
    room = target.room()

    def begin() -> Any:
        if not (source is target and target.dense):
            room[:] = source.pack()
        return room

    return begin


def _reduction(
    schedule: Schedule, call: str, begin: Any, op: Op, block: Block, fills: Block | None, **root: int
) -> Plan:
    """The plan of a reduction: by the engine where it has the operation. fills: the block of the result."""
    engine, dtype = engine_op(op, block.type)
    if engine is None or block.nbytes == 0:
        return Plan(schedule)
    items: list[Any] = []

    def run(group: Any, later: bool) -> Any:
        items.append(begin().view(dtype))
        return getattr(group, call)(items[0], op=engine, async_op=later, **root)

    return Plan(schedule, run, None if fills is None else lambda: fills.fill(items[0].view(np.uint8)))


def _exchanged(lane: Lane, outgoing: list[Block] | None, incoming: list[Block]) -> Plan:
    """Block i of `outgoing` goes to rank i; None: of `incoming`, in place."""
    rooms = [block.room() for block in incoming]
    packed = [copy_of(block) for block in incoming] if outgoing is None else [one.pack() for one in outgoing]
    return Plan(
        schedules.all_to_all(lane, outgoing, incoming),
        lambda group, later: group.all_to_all(rooms, packed, async_op=later),
        _filled_from(incoming, rooms),
    )


def _filled_from(blocks: list[Block] | None, rooms: Any) -> Callable[[], Any] | None:
    """After the engine: what is in memory of its own goes where it belongs. None: there is no such."""
    apart = [(block, room) for block, room in zip(blocks or (), rooms or (), strict=True) if not block.dense]

    def fill() -> None:
        for block, room in apart:
            block.fill(room)

    return fill if apart else None


def _side_by_side(blocks: list[Block]) -> Block:
    """Equal blocks as one."""
    return Block(blocks[0].raw, blocks[0].start, blocks[0].count * len(blocks), blocks[0].type)


SHARED = {
    "_barrier": "Barrier", "_bcast": "Bcast", "_gather": "Gather", "_gatherv": "Gatherv",
    "_scatter": "Scatter", "_scatterv": "Scatterv", "_allgather": "Allgather", "_allgatherv": "Allgatherv",
    "_alltoall": "Alltoall", "_alltoallv": "Alltoallv", "_alltoallw": "Alltoallw", "_reduce": "Reduce",
    "_allreduce": "Allreduce", "_reduce_scatter_block": "Reduce_scatter_block",
    "_reduce_scatter": "Reduce_scatter",
}  # fmt: skip
"""The collectives that intercommunicators have, too: each form asks the class of its communicator."""
forms(Collectives, SHARED)
forms(Prefixes, {"_scan": "Scan", "_exscan": "Exscan"})
