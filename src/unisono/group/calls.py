"""The one path of every collective: checked arguments -> plan -> engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from unisono import _native
from unisono.buffers import DTYPES, ITEMSIZES, is_tensor, view
from unisono.errors import GroupClosed, GroupError
from unisono.group.faults import COLLECTIVES, Scene, explain
from unisono.group.layout import Layout
from unisono.group.work import CollectiveWork, Work, seconds
from unisono.plans import choose, lower, make
from unisono.reduction import Op, PremulSum, ReduceOp

__all__ = ["Caller", "Prepared"]


class Prepared(NamedTuple):
    """An operation of the engine, ready to be bound to buffers."""

    operation: _native.Operation
    run: Callable[..., int]
    start: Callable[..., int]
    run_lists: Callable[..., int]
    start_lists: Callable[..., int]
    name: str
    root: int


class Caller:
    """Runs the collectives of one rank of one group.

    Attributes:
        name, rank, size: of the group.  timeout_s: of an operation that names none.
    """

    def __init__(
        self,
        engine: _native.Engine,
        name: str,
        rank: int,
        size: int,
        timeout_s: float,
        hosts: tuple[str, ...],
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._hosts = hosts
        self._engine: _native.Engine | None = engine
        self._prepared: dict[tuple[str, str, int, int, int], Prepared] = {}
        self._code: dict[tuple[str, str, int], list[int]] = {}
        self._quick: dict[tuple[str, int, Op], _native.Quick] = {}
        self._works: list[Work] = []
        self._works_lock = threading.Lock()

    @property
    def timeout_s(self) -> float:
        """Seconds for an operation that names no timeout."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._timeout_s = value
        self._quick.clear()

    @property
    def engine(self) -> _native.Engine:
        """The engine.

        Raises:
            GroupClosed: the group was closed.
        """
        if self._engine is None:
            raise GroupClosed(f"group {self.name!r} was closed; rank {self.rank} used it afterwards")
        return self._engine

    def in_place(
        self,
        collective: str,
        x: Any,
        writable: bool,
        op: Op,
        root: int,
        algorithm: str | None,
        async_op: bool,
        timeout: float | timedelta | None,
    ) -> Work | None:
        """Run a collective that works on one buffer.

        A call like an earlier one takes the quick way: straight into the engine, which remembers the plan.
        """
        plain = algorithm is None and timeout is None and not async_op and type(op) is ReduceOp
        if plain:
            quick = self._quick.get((collective, root, op))
            fault = -1 if quick is None else quick(x)
            if not fault:
                return None
            if fault > 0:
                raise self.failure(collective, self._timeout_s)
        address, numel, dtype = view(x, writable, "x")
        prepared = self.prepare(collective, algorithm, dtype, numel, op, root)
        if plain:
            self._remember(prepared, x, dtype, numel, op, writable)
        factor = op.factor if isinstance(op, PremulSum) else 1.0
        return self.run(prepared, x, async_op, timeout, numel, address, numel, 0, 0, factor=factor)

    def _remember(self, prepared: Prepared, x: Any, dtype: int, numel: int, op: Op, writable: bool) -> None:
        key = (prepared.name, prepared.root, op)
        quick = self._quick.get(key)
        if quick is None:
            quick = _native.Quick(self.engine, prepared.root, 1.0, self._timeout_s, writable)
            self._quick[key] = quick
        quick.remember(dtype, numel, prepared.operation)
        if is_tensor(x):
            quick.know_tensor(x.dtype, x.layout, dtype)

    def prepare(
        self,
        collective: str,
        algorithm: str | None,
        dtype: int,
        numel: int,
        op: Op = ReduceOp.SUM,
        root: int = 0,
    ) -> Prepared:
        """The operation for a call.

        Args:
            algorithm: a name of the catalogue; None chooses by size.
            numel: elements per rank, by which an algorithm is chosen; the same on every rank.
        Raises:
            ValueError: there is no such root or algorithm.  TypeError: the dtype has no such operation.
            GroupClosed: the group was closed.
        """
        if algorithm is None:
            algorithm = choose(collective, self.size, numel * ITEMSIZES[dtype])
        if not isinstance(op, ReduceOp | PremulSum):
            raise TypeError(
                f"{collective}: op is {op!r}, expected a member of ReduceOp or premul_sum(factor)"
            )
        key = (collective, algorithm, root, dtype, op.value)
        found = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = self._prepare(collective, algorithm, root, dtype, op)
        return found

    def _prepare(self, collective: str, algorithm: str, root: int, dtype: int, op: Op) -> Prepared:
        engine = self.engine
        if not 0 <= root < self.size:
            raise ValueError(f"{collective}: rank {root} is not in group {self.name!r} of {self.size} ranks")
        if not _native.reducible(dtype, op.value):
            raise TypeError(f"{collective}: {op.name} has no meaning for {DTYPES[dtype]}{_hint(op, dtype)}")
        if collective in ("scan", "exclusive_scan") and op is ReduceOp.AVG:
            raise ValueError(f"{collective}: AVG has no meaning for a prefix; use SUM")
        operation = engine.operation(
            self._lowered(collective, algorithm, root), COLLECTIVES.index(collective), dtype, op.value
        )
        return Prepared(
            operation,
            operation.run,
            operation.start,
            operation.run_lists,
            operation.start_lists,
            collective,
            root,
        )

    def _lowered(self, collective: str, algorithm: str, root: int) -> list[int]:
        """This rank's code of a plan; the same for every dtype and operation."""
        key = (collective, algorithm, root)
        code = self._code.get(key)
        if code is None:
            code = self._code[key] = lower(make(collective, algorithm, self.size, root))[self.rank]
        return code

    def run(
        self,
        prepared: Prepared,
        keep: Any,
        async_op: bool,
        timeout: float | timedelta | None,
        numel: int,
        *extents: Any,
        lists: bool = False,
        factor: float = 1.0,
    ) -> Work | None:
        """Run an operation, or queue it and hand out its work.

        Args:
            keep: the arrays behind the addresses, kept alive while the work is under way.
            numel: what all ranks must agree on; 0 where they may differ.
            extents: address and numel of the output and of the input, or (`lists`) a list of those each.
        Raises:
            GroupError: what went wrong; the group is aborted.
        """
        timeout_s = self.timeout_s if timeout is None else seconds(timeout, 0.0)
        engine = self._engine or self.engine
        if async_op:
            start = prepared.start_lists if lists else prepared.start
            ticket = start(engine, prepared.root, numel, factor, timeout_s, *extents)
            return self._hand_out(engine, ticket, keep, prepared.name, timeout_s)
        run = prepared.run_lists if lists else prepared.run
        if run(engine, prepared.root, numel, factor, timeout_s, *extents):
            raise self.failure(prepared.name, timeout_s, engine)
        return None

    def run_blocks(
        self,
        prepared: Prepared,
        out: Layout,
        given: Layout,
        keep: Any,
        async_op: bool,
        timeout: float | timedelta | None,
        numel: int,
        counts: tuple[int, int],
        factor: float = 1.0,
    ) -> Work | None:
        """As `run`, for an output and an input that may be lists; `counts`: chunks of out and input."""
        if out.extents is None and given.extents is None:
            whole, piece = out.pieces[0], given.pieces[0]
            extents: tuple[Any, ...] = (whole.address, whole.numel, piece.address, piece.numel)
            return self.run(prepared, keep, async_op, timeout, numel, *extents, factor=factor)
        return self.run(
            prepared,
            keep,
            async_op,
            timeout,
            numel,
            out.spread(counts[0]),
            given.spread(counts[1]),
            lists=True,
            factor=factor,
        )

    def scene(self, engine: _native.Engine, operation: str, timeout_s: float) -> Scene:
        """What an error of an operation has to say of its place."""
        return Scene(engine, self.name, self.rank, self.size, self._hosts, operation, timeout_s)

    def failure(self, operation: str, timeout_s: float, engine: _native.Engine | None = None) -> GroupError:
        """The error for what aborted the group; `engine` is its engine, when the group may be closed."""
        engine = engine or self.engine
        return explain(self.scene(engine, operation, timeout_s))

    def _hand_out(
        self, engine: _native.Engine, ticket: int, keep: Any, name: str, timeout_s: float
    ) -> CollectiveWork:
        work = CollectiveWork(engine, ticket, keep, self.scene(engine, name, timeout_s))
        self.keep(work)
        return work

    def keep(self, work: Work) -> None:
        """Keep a work, and with it its buffers, until it is done, whatever the caller does with it."""
        with self._works_lock:
            self._works = [one for one in self._works if not one.done()]
            self._works.append(work)

    def abandon(self) -> None:
        """In a fork's child: forget the parent's group without touching it."""
        engine, self._engine = self._engine, None
        self._prepared.clear()
        self._quick.clear()
        if engine is not None:
            engine.abandon()

    def leave(self) -> None:
        """Stop: tell the others, end the threads, forget the memory."""
        engine, self._engine = self._engine, None
        self._prepared.clear()
        self._quick.clear()
        if engine is not None:
            engine.leave()
        self._works.clear()  # only now no thread is left that moves bytes of their buffers


def _hint(op: Op, dtype: int) -> str:
    if op is ReduceOp.AVG:
        return "; use SUM and divide, or a floating-point dtype"
    return "; complex numbers have no order" if DTYPES[dtype].startswith("complex") else ""
