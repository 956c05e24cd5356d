"""The one path of every collective: checked arguments -> plan -> engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from operator import index
from typing import Any, NamedTuple, NoReturn, SupportsIndex

from unisono import _native
from unisono.buffers import DTYPES, ITEMSIZES
from unisono.choose import Choice, Chooser
from unisono.errors import Aborted, GroupClosed, GroupError, message
from unisono.group.canon import Canon
from unisono.group.differences import COLLECTIVES
from unisono.group.faults import Scene, explain, tell_cause
from unisono.group.layout import Extents, lay_out
from unisono.group.site import site
from unisono.group.work import NEVER_QUEUED, CollectiveWork, Work, seconds
from unisono.machine import DEFAULTS, Calibration
from unisono.plans import lower_rank
from unisono.reduction import Op, PremulSum, ReduceOp
from unisono.store.base import close_in_children

__all__ = ["Caller", "Options", "Prepared", "named"]

_OPS = (ReduceOp, PremulSum)
_OP_NAMES = ", ".join(f"un.{op.name}" for op in ReduceOp)
_PLANNED_AS = {"all_gather_v": "all_gather"}


class Prepared(NamedTuple):
    """An operation of the engine, ready to be bound to buffers."""

    operation: _native.Operation
    name: str
    root: int


class Options(NamedTuple):
    """What every collective takes beside its buffers; see `Collectives`."""

    async_op: bool
    timeout: float | timedelta | None
    algorithm: str | None = None
    reproducible: bool = False


class Caller:
    """Runs the collectives of one rank of one group.

    Attributes:
        name, rank, size: of the group.  timeout_s: of an operation that names none.
        quick: remembers the calls that were checked; what follows is its.
        call: runs a collective: at once when it repeats an earlier one, otherwise through `at_length`.
        again: repeats (collective, out, given, op, root); False when it does not remember such a call.
        send, recv: pass a message and wait; negative when something about it is not usual.
        send_now, recv_now: the same without waiting; negative also when it cannot be done at once.
        hosts: the number of the host of each rank; all on one until somebody says otherwise.
        reproducible: all reductions are, whether they ask for it or not.
        machine: the figures by which algorithms are chosen; alike on all ranks.
    """

    def __init__(
        self,
        engine: _native.Engine,
        name: str,
        rank: int,
        size: int,
        timeout_s: float,
        host_names: tuple[str, ...],
        reproducible: bool,
        machine: Calibration = DEFAULTS,
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self._reproducible = reproducible
        self._timeout_s = timeout_s
        self._host_names = host_names
        self._machine = machine
        self._engine: _native.Engine | None = engine
        self._prepared: dict[tuple[str, str, int, int, int], Prepared] = {}
        self._code: dict[tuple[str, str, int], list[int]] = {}
        self.quick = _native.Quick(self, engine, timeout_s)
        self.call: Callable[..., Work | None] = self.quick.call
        self.again: Callable[..., bool] = self.quick.again
        self.send: Callable[..., int] = self.quick.send
        self.recv: Callable[..., int] = self.quick.recv
        self.send_now: Callable[..., int] = self.quick.send_now
        self.recv_now: Callable[..., int] = self.quick.recv_now
        distinct = list(dict.fromkeys(host_names))
        self.hosts = tuple(distinct.index(name) for name in host_names)
        self._works: list[Work] = []
        self._works_lock = threading.RLock()  # a signal handler may close the group while this thread has it
        self._told = False  # whether a call has raised what aborted the group
        if len(distinct) > 1:
            close_in_children(self.close_copies)

    @property
    def timeout_s(self) -> float:
        """Seconds for an operation that names no timeout."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._timeout_s = value
        self.quick.forget(value)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The number of the host of each rank, by which algorithms are chosen and planned; alike on all."""
        return self._hosts

    @hosts.setter
    def hosts(self, value: tuple[int, ...]) -> None:
        if len(value) != self.size:
            raise ValueError(f"got the hosts of {len(value)} ranks, expected {self.size}")
        self._hosts = tuple(value)
        self._chooser = Chooser(self.size, self._hosts, self._machine)
        self._prepared.clear()  # what was planned for another placement
        self._code.clear()
        self._canon = Canon(self.size, self._hosts)
        self.quick.forget(self._timeout_s)

    @property
    def reproducible(self) -> bool:
        """Whether all reductions are, whether they ask for it or not."""
        return self._reproducible

    @reproducible.setter
    def reproducible(self, value: bool) -> None:
        self._reproducible = value
        self.quick.forget(self._timeout_s)

    @property
    def engine(self) -> _native.Engine:
        """The engine.

        Raises:
            GroupClosed: the group was closed.
        """
        if self._engine is None:
            raise GroupClosed(f"group {self.name!r} was closed; rank {self.rank} used it afterwards")
        return self._engine

    # ---- calls -----------------------------------------------------------------------------------------

    def at_length(
        self,
        collective: str,
        out: Any,
        given: Any,
        op: Op,
        root: int,
        algorithm: str | None,
        reproducible: bool,
        async_op: bool,
        timeout: float | timedelta | None,
    ) -> Work | None:
        """Check a call, choose its plan, run it: what `call` does with one that it does not remember.

        Args:
            out: its buffer, or its output.  given: its input, where it has one; see `layout`.
        """
        root = self._check_root(collective, root)
        try:
            laid = lay_out(collective, out, given, self.size, self.rank, root)
        except (TypeError, ValueError) as error:
            raise named(collective, error) from None
        if laid.blocks and algorithm not in (None, "direct"):
            self._check_alike(collective, laid.blocks)
        name = _PLANNED_AS.get(collective, collective)
        prepared = self.prepare(name, algorithm, laid.dtype, laid.typical, op, root, reproducible)
        if not async_op and timeout is None:
            words = (collective, out, given, op, root, algorithm, reproducible)
            factor = op.factor if type(op) is PremulSum else 1.0
            self.quick.remember(*words, laid.writes, prepared.operation, laid.numel, factor)
        options = Options(async_op, timeout)
        return self.run(prepared, (out, given), options, laid.numel, laid.target, laid.source, op)

    def prepare(
        self,
        collective: str,
        algorithm: str | None,
        dtype: int,
        numel: int,
        op: Op = ReduceOp.SUM,
        root: int = 0,
        reproducible: bool = False,
    ) -> Prepared:
        """The operation for a call.

        Args:
            algorithm: a name of the catalogue; None chooses by size.
            numel: elements per rank, by which an algorithm is chosen; the same on every rank.
            reproducible: it has to combine contributions in the order of ranks.
        Raises:
            ValueError: there is no such root or algorithm.  TypeError: the dtype has no such operation.
            GroupClosed: the group was closed.
        """
        asked = algorithm is not None
        if algorithm is None:
            whole = numel * ITEMSIZES[dtype]
            in_order = reproducible or self._reproducible
            ask = self._chooser.direct if in_order else self._chooser.choose
            algorithm = ask(collective, whole)
        if reproducible or self._reproducible:
            self._check_root(collective, root)
            algorithm = self._canon.algorithm(collective, algorithm, root, asked)
        if type(op) not in _OPS:
            raise TypeError(f"{collective}: op is {op!r}, expected {_OP_NAMES} or premul_sum(factor)")
        key = (collective, algorithm, root, dtype, op.value)
        found = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = self._prepare(collective, algorithm, root, dtype, op)
        return found

    def run(
        self,
        prepared: Prepared,
        keep: Any,
        options: Options,
        numel: int,
        out: Extents,
        given: Extents,
        op: Op = ReduceOp.SUM,
        *,
        together: bool = False,
    ) -> Work | None:
        """Run an operation, or queue it and hand out its work.

        Args:
            keep: the arrays behind the addresses, kept alive while the work is under way.
            numel: what all ranks must agree on; 0 where they may differ.
            out, given: (address, numel) of one buffer, or of one for each chunk.
            together: of buffers that are to be treated as one.
        Raises:
            GroupError: what went wrong; the group is aborted.
        """
        timeout_s = self._timeout_s if options.timeout is None else seconds(options.timeout, 0.0)
        factor = op.factor if type(op) is PremulSum else 1.0
        engine = self._engine or self.engine
        operation, name, root = prepared
        if not options.async_op:
            try:
                failed = operation.run(engine, root, numel, factor, timeout_s, out, given, together)
            except BaseException:
                engine.hold(keep)
                raise
            if failed:
                engine.hold(keep)
                raise self.failure(name, timeout_s, engine)
            return None
        where = site()
        work = CollectiveWork(engine, keep, self.scene(engine, name, timeout_s, where))
        issued = engine.issued
        try:
            self.keep(work)  # before the engine has the addresses: Ctrl-C may come between any two steps
            work.ticket = operation.start(engine, root, numel, factor, timeout_s, out, given, together, where)
        except BaseException:
            if engine.issued == issued:
                work.ticket = NEVER_QUEUED
            raise
        return work

    def choice(self, collective: str, nbytes: int, algorithm: str | None = None) -> Choice:
        """The algorithm and the predicted time of a collective; `nbytes` of the whole buffer."""
        return self._chooser.explain(collective, nbytes, algorithm)

    # ---- what calls need -------------------------------------------------------------------------------

    def _prepare(self, collective: str, algorithm: str, root: int, dtype: int, op: Op) -> Prepared:
        engine = self.engine
        self._check_root(collective, root)
        if not _native.reducible(dtype, op.value):
            raise TypeError(f"{collective}: {op.name} has no meaning for {DTYPES[dtype]}{_hint(op, dtype)}")
        if collective in ("scan", "exclusive_scan") and op is ReduceOp.AVG:
            raise ValueError(f"{collective}: AVG has no meaning for a prefix; use SUM")
        code = self._lowered(collective, algorithm, root)
        operation = engine.operation(code, COLLECTIVES.index(collective), dtype, op.value)
        return Prepared(operation, collective, root)

    def _lowered(self, collective: str, algorithm: str, root: int) -> list[int]:
        """This rank's code of a plan; the same for every dtype and operation."""
        key = (collective, algorithm, root)
        code = self._code.get(key)
        if code is None:
            code = lower_rank(self.rank, collective, algorithm, self.size, root, self._hosts)
            self._code[key] = code
        return code

    def _check_alike(self, collective: str, blocks: Extents) -> None:
        """Blocks may differ in size where each goes straight to its rank; others on the way cannot know."""
        sizes = {numel for _, numel in blocks}
        if len(sizes) > 1:
            raise ValueError(
                f"{collective}: blocks have {min(sizes)} to {max(sizes)} elements; sizes may differ with "
                "algorithm='direct' only"
            )

    def _check_root(self, collective: str, root: int) -> int:
        """The root as a plain int: it may be one of NumPy's, as `argmax` gives it."""
        if not isinstance(root, SupportsIndex):
            raise TypeError(f"{collective}: the root is {root!r}, expected the number of a rank")
        if not 0 <= index(root) < self.size:
            raise ValueError(f"{collective}: rank {root} is not in group {self.name!r} of {self.size} ranks")
        return index(root)

    # ---- errors, works, the end ------------------------------------------------------------------------

    def scene(self, engine: _native.Engine, operation: str, timeout_s: float, where: str = "") -> Scene:
        """What an error of an operation has to say of its place."""
        return Scene(engine, self.name, self.rank, self.size, self._host_names, operation, timeout_s, where)

    def failure(self, operation: str, timeout_s: float, engine: _native.Engine | None = None) -> GroupError:
        """The error for what aborted the group; `engine` is its engine, when the group may be closed."""
        self._told = True
        return explain(self.scene(engine or self.engine, operation, timeout_s))

    def fail(self, operation: str, timeout_s: float) -> NoReturn:
        """Raise the error for what aborted the group."""
        if self._engine is None:  # closed by a signal handler or another thread, while the call was under way
            where = f"group={self.name} rank={self.rank}/{self.size}"
            raise Aborted(message(f"{operation} failed: this rank closed the group meanwhile", where=where))
        raise self.failure(operation, timeout_s)

    def keep(self, work: Work) -> None:
        """Keep a work, and with it its buffers, until it is done, whatever the caller does with it."""
        with self._works_lock:
            under_way: list[Work] = []
            for one in self._works:
                if one.done():
                    one.let_go()
                else:
                    under_way.append(one)
            self._works = [*under_way, work]
            if self._engine is None:  # closed meanwhile, by a signal handler or another thread
                for one in self._works:
                    one.let_go()

    def unheard(self) -> BaseException | None:
        """What ended an asynchronous collective, when no call and no wait has raised it yet."""
        if self._told or self._engine is None or not self._engine.fault()[0]:
            return None
        with self._works_lock:
            works = [work for work in self._works if isinstance(work, CollectiveWork)]
        if any(work.heard for work in works):
            return None
        return next((error for work in works if (error := work.exception()) is not None), None)

    def close_copies(self) -> None:
        """In a fork's child: close its copies of connections, which would hide the parent's death."""
        if self._engine is not None:
            self._engine.close_copies()

    def abandon(self) -> None:
        """In a fork's child: forget the parent's group without touching it."""
        engine = self._forget()
        if engine is not None:
            engine.abandon()

    def leave(self, cause: str = "") -> None:
        """Stop: tell the others, end the threads, forget the memory. cause: the exception, if any."""
        engine = self._forget()
        try:
            if engine is not None and cause:
                tell_cause(engine, cause)
        finally:  # whatever becomes of it, as by Ctrl-C
            if engine is not None:
                engine.leave()
            with self._works_lock:
                works, self._works = self._works, []
            for work in works:  # only now no thread is left that moves bytes of their buffers
                work.let_go()

    def _forget(self) -> _native.Engine | None:
        engine, self._engine = self._engine, None
        self._prepared.clear()
        self.quick.close()
        return engine


def named(collective: str, error: Exception) -> Exception:
    """The same error, beginning with the name of the call."""
    return type(error)(f"{collective}: {error}")


def _hint(op: Op, dtype: int) -> str:
    if op is ReduceOp.AVG:
        return "; use SUM and divide, or a floating-point dtype"
    return "; complex numbers have no order" if DTYPES[dtype].startswith("complex") else ""
