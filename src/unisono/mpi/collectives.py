"""Collectives of buffers. Each is one method, see plan.py, for communicators of one side.

What a rank gives or takes is a Block, or Blocks. parts: what makes them of a buffer (`equal`, `vector` ...).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.mpi import schedules
from unisono.mpi.buffers import IN_PLACE, in_place
from unisono.mpi.errors import check_root, exact, of_size
from unisono.mpi.handle import Handle
from unisono.mpi.message_spec import Block, by_types, byte_block, equal, simple, vector
from unisono.mpi.op import OPS, Op, check_alike, check_type, engine_op
from unisono.mpi.plan import Plan, forms
from unisono.mpi.progress import Schedule
from unisono.mpi.transport import Lane

SUM = OPS["SUM"]
_PLAIN = "bBhilqfd"
"""NumPy's characters of types that need no reading."""


class Collectives(Handle):
    """The collectives of `Comm`; those that move data are of one side and of two."""

    def _barrier(self, lane: Lane) -> Plan:
        """Wait until every rank has called it."""
        return Plan(schedules.barrier(lane), lambda group, later: group.barrier(async_op=later))

    def _bcast(self, lane: Lane, buf: Any, root: int = 0) -> Plan:
        """Copy the items of the root to every rank."""
        root = check_root(root, lane.size)
        block = simple(buf, writable=lane.rank != root)
        schedule = schedules.broadcast_block(lane, block, root)
        if block.nbytes == 0:
            return Plan(schedule)
        target = None if lane.rank == root else block
        data = block.room() if target else block.pack()
        return Plan(schedule, lambda group, later: group.broadcast(data, root, async_op=later), target, data)

    # ---- moving

    def _gather(self, lane: Lane, sendbuf: Any, recvbuf: Any, root: int = 0, *, parts: Any = equal) -> Plan:
        """Gather blocks {sizes} on the root."""
        at_root, peer = lane.role(root)
        blocks: Any = parts(recvbuf, lane.size, writable=True) if at_root else None
        mine = None if peer is None or (at_root and in_place(sendbuf)) else simple(sendbuf, writable=False)
        schedule = schedules.exchange(
            lane, [(peer, mine)] if peer is not None and mine else [], enumerate(blocks or ())
        )
        if lane.inter:
            return Plan(schedule)
        own = mine or blocks[peer]
        if parts is equal and (own.nbytes == 0 or (blocks is not None and blocks.each != own.nbytes)):
            return Plan(schedule)
        room, packed = None if blocks is None else blocks.room(), own.pack()
        return Plan(
            schedule, lambda group, later: group.gather(packed, room, peer, async_op=later), blocks, room
        )

    def _scatter(self, lane: Lane, sendbuf: Any, recvbuf: Any, root: int = 0, *, parts: Any = equal) -> Plan:
        """Give every rank a block of the root, {sizes}."""
        at_root, peer = lane.role(root)
        blocks: Any = parts(sendbuf, lane.size, writable=False) if at_root else None
        mine = None if peer is None or (at_root and in_place(recvbuf)) else simple(recvbuf, writable=True)
        schedule = schedules.exchange(
            lane, enumerate(blocks or ()), [(peer, mine)] if peer is not None and mine else []
        )
        if lane.inter:
            return Plan(schedule)
        own = mine or blocks[peer]
        if parts is equal and (own.nbytes == 0 or (blocks is not None and blocks.each != own.nbytes)):
            return Plan(schedule)
        packed = None if blocks is None else blocks.pack()
        room = np.empty(own.nbytes, np.uint8) if mine is None else mine.room()
        return Plan(
            schedule, lambda group, later: group.scatter(room, packed, peer, async_op=later), mine, room
        )

    def _allgather(self, lane: Lane, sendbuf: Any, recvbuf: Any, *, parts: Any = equal) -> Plan:
        """Gather blocks {sizes} on every rank."""
        blocks = parts(recvbuf, lane.size, writable=True)
        mine = None if in_place(sendbuf) and not lane.inter else simple(sendbuf, writable=False)
        own = mine or blocks[lane.rank]
        schedule = schedules.exchange(lane, enumerate([own] * lane.size), enumerate(blocks))
        if lane.inter or (parts is equal and (blocks.each == 0 or blocks.each != own.nbytes)):
            return Plan(schedule)
        room, packed, call = blocks.room(), own.pack(), "all_gather" if parts is equal else "all_gather_v"
        return Plan(
            schedule, lambda group, later: getattr(group, call)(room, packed, async_op=later), blocks, room
        )

    def _alltoall(self, lane: Lane, sendbuf: Any, recvbuf: Any, *, parts: Any = equal) -> Plan:
        """Send block i to rank i; blocks are {sizes}."""
        incoming = parts(recvbuf, lane.size, writable=True)
        copies = in_place(sendbuf) and not lane.inter
        outgoing = incoming.twin() if copies else parts(sendbuf, lane.size, writable=False)
        schedule = schedules.exchange(lane, enumerate(outgoing), enumerate(incoming))
        if lane.inter or (parts is equal and (incoming.each == 0 or incoming.each != outgoing.each)):
            return Plan(schedule)
        room, packed = incoming.room(), outgoing.pack()
        return Plan(
            schedule, lambda group, later: group.all_to_all(room, packed, async_op=later), incoming, room
        )

    # ---- reductions

    def _reduce(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Plan:
        """Reduce to the root, in the order of ranks."""
        root = check_root(root, lane.size)
        return _reduced(lane, sendbuf, recvbuf, op, schedules.reduce, "reduce", root)

    def _allreduce(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        """Reduce to every rank."""
        return _reduced(lane, sendbuf, recvbuf, op, schedules.all_reduce, "all_reduce")

    def _reduce_scatter_block(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        """Reduce, and give every rank a block of one size."""
        if in_place(sendbuf):
            target = first = simple(recvbuf, writable=True, blocks=lane.size)
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
        size, packed = source.type.layout.size, source.copied()

        def schedule() -> Schedule:
            told = counts
            if told is None:
                raw = np.zeros(8 * lane.size, np.uint8)
                blocks = [byte_block(raw, 8 * rank, 8) for rank in range(lane.size)]
                mine = byte_block(np.array([target.count]).view(np.uint8))
                gives = ((rank, mine) for rank in range(lane.size))
                yield from schedules.exchange(lane, gives, enumerate(blocks))
                told = raw.view(np.int64).tolist()
                _check_counts(told, lane, source, target)
            found = yield from schedules.reduce(lane, packed, op, source.type, 0)
            own = np.empty(told[lane.rank] * size, np.uint8)
            yield from schedules.scatter_bytes(lane, found, [count * size for count in told], own)
            target.fill(own)

        return Plan(schedule())


class Prefixes:
    """Reductions over the ranks before, of `Intracomm` alone."""

    def _scan(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        """Reduce over the ranks up to this one."""
        return _reduced(lane, sendbuf, recvbuf, op, schedules.scan, "scan")

    def _exscan(self, lane: Lane, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Plan:
        """Reduce over the ranks below this one; nothing changes on rank 0."""
        return _reduced(lane, sendbuf, recvbuf, op, schedules.exscan, None)


def _check_counts(counts: list[int], lane: Lane, source: Block, target: Block) -> None:
    if of_size(counts, lane.size)[lane.rank] > target.count:
        raise ValueError(f"mismatch in receive count {target.count} and recvcounts {counts[lane.rank]}")
    if sum(counts) != source.count and source is not target:
        raise ValueError(f"mismatch in send count {source.count} and sum(recvcounts) {sum(counts)}")


def _reduced(
    lane: Lane, sendbuf: Any, recvbuf: Any, op: Op, run: Callable[..., Schedule], call: str | None, *root: int
) -> Plan:
    """A reduction: the engine's `call` where that has the operation, or the schedule `run`."""
    target = simple(recvbuf, writable=True) if root in ((), (lane.rank,)) else None
    if in_place(sendbuf) and target is not None:
        source = target
    else:
        source = simple(sendbuf, writable=False)
        if target is not None:
            check_alike(source, target)
    check_type(op, source.type)
    room = None if target is None else target.room()

    def begin() -> Any:
        """The items of this rank, in the memory of the result where it may change before the end."""
        if room is None or call is None:
            return source.pack() if call else source.copied()
        if not (source is target and target.dense):
            room[:] = source.pack()
        return room

    def schedule() -> Schedule:
        found = yield from run(lane, begin(), op, source.type, *root)
        if found is not None and target is not None:
            target.fill(found)

    engine, dtype = engine_op(op, source.type) if call else (None, None)
    if engine is None or source.nbytes == 0:
        return Plan(schedule())
    where = {"dst": root[0]} if root else {}
    return Plan(
        schedule(),
        lambda group, later: getattr(group, str(call))(
            begin().view(dtype), op=engine, async_op=later, **where
        ),
        target,
        room,
    )


forms(Collectives, "_barrier", Barrier={})
forms(Collectives, "_bcast", Bcast={})
forms(Collectives, "_gather", Gather={}, Gatherv={"parts": vector})
forms(Collectives, "_scatter", Scatter={}, Scatterv={"parts": vector})
forms(Collectives, "_allgather", Allgather={}, Allgatherv={"parts": vector})
forms(Collectives, "_alltoall", Alltoall={}, Alltoallv={"parts": vector}, Alltoallw={"parts": by_types})
for _name in ("Reduce", "Allreduce", "Reduce_scatter_block", "Reduce_scatter"):
    forms(Collectives, f"_{_name.lower()}", **{_name: {}})
forms(Prefixes, "_scan", Scan={})
forms(Prefixes, "_exscan", Exscan={})


class FastCollectives(Collectives):
    """The same, but a blocking call of plain arrays goes to the engine at once."""

    def Barrier(self) -> None:
        """Wait until every rank has called it."""
        group = None if self._state is None else self._state.fast_group()
        if group is None:
            super().Barrier()
        else:
            group.barrier()

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Copy the items of the root to every rank."""
        state = self._state
        plain = type(buf) is np.ndarray and buf.flags.c_contiguous and buf.size and state is not None
        if plain and 0 <= root < state.size and (buf.flags.writeable or root == state.rank):
            group = state.fast_group() if buf.dtype.char in _PLAIN else None
            if group is not None:
                group.broadcast(buf.reshape(-1).view(np.uint8), root)
                return
        super().Bcast(buf, root)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> None:
        """Reduce to every rank."""
        state = self._state
        if (
            type(recvbuf) is np.ndarray
            and (type(sendbuf) is np.ndarray or sendbuf is IN_PLACE)
            and state is not None
            and type(op) is Op
            and op._state is not None
            and op._state.engine is not None
            and recvbuf.dtype.char in _PLAIN
            and recvbuf.flags.carray
            and recvbuf.size
        ):
            alike = sendbuf is IN_PLACE or (
                sendbuf.dtype == recvbuf.dtype
                and sendbuf.size == recvbuf.size
                and sendbuf.flags.c_contiguous
                and recvbuf.dtype.kind in op._state.kinds
            )
            group = state.fast_group() if alike and recvbuf.dtype.kind in op._state.kinds else None
            if group is not None:
                if sendbuf is IN_PLACE:
                    group.all_reduce(recvbuf, op._state.engine)
                elif np.may_share_memory(sendbuf, recvbuf):
                    recvbuf.reshape(-1)[:] = sendbuf.reshape(-1)
                    group.all_reduce(recvbuf, op._state.engine)
                else:
                    group.all_reduce(sendbuf, op._state.engine, out=recvbuf)
                return
        super().Allreduce(sendbuf, recvbuf, op)
