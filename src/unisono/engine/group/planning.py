"""Checks a call, chooses and lowers its plan, and binds it to its buffers for the engine.

The native base class of `Group` calls `Planner.plan` for every call that it does not remember.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, SupportsIndex

from unisono import _native
from unisono.engine.costs.choice import Choice, Chooser
from unisono.engine.costs.machine import DEFAULTS, Calibration
from unisono.engine.diagnosis.calls import number_of_ranks
from unisono.engine.diagnosis.read import Scene, read, read_late
from unisono.engine.diagnosis.render import error
from unisono.engine.diagnosis.site import site
from unisono.engine.group import coalesced
from unisono.engine.group.canon import Canon
from unisono.engine.group.custom import CustomAlgorithms
from unisono.engine.group.layout import Laid, check_alike, lay_out, named
from unisono.engine.group.results import Made, allocate
from unisono.engine.group.work import Work, seconds
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES, pinned
from unisono.engine.operations.kinds import KINDS, kind_of
from unisono.engine.operations.reduction import Op, PremulSum, ReduceOp
from unisono.errors import Aborted, GroupClosed, GroupError, message
from unisono.plans import StepFunction, lower_rank
from unisono.plans.lowering import lower_agreement

if TYPE_CHECKING:
    from unisono.codecs.codec import Codec
    from unisono.engine.group.coding import CodedAs
    from unisono.engine.group.codings import Codings

__all__ = ["Planner", "Prepared", "check_algorithm", "check_op", "check_reducible"]

_OPS = (ReduceOp, PremulSum)
_OP_NAMES = ", ".join(f"un.{op.name}" for op in ReduceOp)


class Prepared(NamedTuple):
    """An operation of the engine, ready to be bound to buffers. note: a further text for a Mismatch."""

    operation: _native.Operation
    name: str
    root: int
    note: str | None = None


class Planner:
    """Checks and plans the calls of one rank of one group, and makes the errors of failed calls.

    Attributes:
        name, rank, size: of the group.  timeout_s: of an operation without its own.
        hosts: the number of the host of each rank, by which algorithms are chosen; the same on all ranks.
        reproducible: all reductions are reproducible.
        machine: the calibration by which algorithms are chosen; call `place` after a change.
        reported: whether a call has raised what aborted the group.
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
        self.timeout_s = timeout_s
        self.reproducible = reproducible
        self.reported = False
        self._host_names = host_names
        self.machine = machine
        self._engine: _native.Engine | None = engine
        distinct = list(dict.fromkeys(host_names))
        self.place(tuple(distinct.index(name) for name in host_names))

    def place(self, hosts: tuple[int, ...]) -> None:
        """Choose and plan for this placement from now on."""
        if len(hosts) != self.size:
            raise ValueError(f"got the hosts of {len(hosts)} ranks, expected {self.size}")
        self.hosts = tuple(hosts)
        self._chooser = Chooser(self.size, self.hosts, self.machine)
        self._canon = Canon(self.size, self.hosts)
        self._custom = CustomAlgorithms(self.rank, self.size, self.hosts)
        self._prepared: dict[tuple[str, str, int, int, int, CodedAs | None], Prepared] = {}
        self._code: dict[tuple[str, str, int, str, bool], list[int]] = {}
        self._agreements: dict[tuple[str | int, ...], _native.Operation] = {}
        self.__dict__.pop("codings", None)

    @property
    def engine(self) -> _native.Engine:
        """The engine.

        Raises:
            GroupClosed: the group was closed.
        """
        engine = self._engine  # read once: another thread may close the group
        if engine is None:
            raise GroupClosed(f"group {self.name!r} was closed; rank {self.rank} used it afterwards")
        return engine

    @cached_property
    def codings(self) -> Codings:
        """The codecs of calls; most programs need none."""
        from unisono.engine.group.codings import Codings

        return Codings(self.rank, self.size, self.hosts, self._chooser)

    def close(self) -> _native.Engine | None:
        """Drop the engine and return it; None if it was dropped before."""
        engine, self._engine = self._engine, None
        self._prepared.clear()
        self._agreements.clear()
        return engine

    def close_copies(self) -> None:
        """In a forked child: close its copies of connections, which would hide the parent's death."""
        if self._engine is not None:
            self._engine.close_copies()

    # ---- plans -----------------------------------------------------------------------------------------

    def plan(
        self,
        kind: str,
        out: Any,
        given: Any,
        op: Op,
        root: int,
        algorithm: str | StepFunction | None,
        reproducible: bool,
        codec: Codec | str | None = None,
        between_hosts: bool | None = None,
        feedback: Any = None,
        max_error: float | None = None,
    ) -> _native.BoundCall:
        """Check a call, choose its plan, lower it, bind it.

        Args:
            kind: of the call, see `kinds`.
            out: its buffer, or its output.  given: its input, where it has one; see `layout`.
            codec, between_hosts, feedback, max_error: see `Group`.
        Raises:
            ValueError, TypeError: an argument is wrong.  GroupClosed: the group was closed.
        """
        root = self.member(kind, root, "the root")
        check_algorithm(kind, algorithm)
        laid, keep, made = self.lay_out(kind, out, given, root)
        if laid.blocks and algorithm not in (None, "direct"):
            check_alike(kind, laid.blocks)
        coded, fed = None, None
        if codec is not None or between_hosts is not None or feedback is not None or max_error is not None:
            in_order = reproducible or self.reproducible
            asked = codec, between_hosts, feedback, max_error
            coded, fed, laid = self.codings.of_call(kind, asked, in_order, out, laid, op, root)
        operation, name, root, note = self.prepare(
            kind, algorithm, laid.dtype, laid.typical, op, root, reproducible, coded
        )
        factor = op.factor if type(op) is PremulSum else 1.0
        return _native.BoundCall(
            name,
            operation,
            root,
            laid.numel,
            factor,
            laid.target,
            laid.source,
            (*keep, fed),
            laid.writes,
            made=made.array,
            returned=made.kind,
            note=note,
            feedback=0 if fed is None else fed.address,
            feedback_numel=0 if fed is None else fed.numel,
        )

    def plan_coalesced(
        self,
        kind: str,
        outs: Any,
        givens: Any,
        op: Op,
        root: int,
        reproducible: bool,
        codec: Codec | str | None,
        between_hosts: bool | None,
    ) -> Any:
        """Check a coalesced call and plan it; see `coalesced.plan`."""
        self.engine  # noqa: B018 (raises once the group was closed)
        check_op(kind, op)
        root, coding = self.member(kind, root, "the root"), (codec, between_hosts)
        return coalesced.plan(self, kind, outs, givens, op, root, reproducible, coding)

    def lay_out(self, kind: str, out: Any, given: Any, root: int) -> tuple[Laid, Any, Made]:
        """The checked buffers of a call, the objects that pin them, and the caller's result.

        Raises:
            ValueError, TypeError: see `plan`.
        """
        try:
            out, given = (list(side) if type(side) is list else side for side in (out, given))
            out, given, made = allocate(kind, out, given, self.size, self.rank, root)
            keep = (pinned(out), pinned(given))  # before their addresses are read
            return lay_out(kind_of(kind).layout, out, given, self.size, self.rank, root), keep, made
        except (TypeError, ValueError) as error:
            raise named(kind, error) from None

    def prepare(
        self,
        collective: str,
        algorithm: str | StepFunction | None,
        dtype: int,
        numel: int,
        op: Op = ReduceOp.SUM,
        root: int = 0,
        reproducible: bool = False,
        coded: CodedAs | None = None,
    ) -> Prepared:
        """The operation for a call.

        Args:
            algorithm: a name of the catalogue, or a function that returns the steps; None chooses by size.
            numel: elements per rank, by which an algorithm is chosen; the same on every rank.
            reproducible: contributions must be combined in the order of ranks.
            coded: the encoding of its edges; None: values.
        Raises:
            ValueError: there is no such root or algorithm.  TypeError: the dtype has no such operation.
            GroupClosed: the group was closed.
        """
        check_op(collective, op)
        plan = kind_of(collective).plan
        if coded is not None:
            return self._prepare_coded(collective, algorithm, dtype, numel, op, root, coded)
        if callable(algorithm):
            return self._prepare_custom(collective, algorithm, dtype, op, root, reproducible)
        asked = algorithm is not None
        if algorithm is None:
            whole = numel * ITEMSIZES[dtype]
            in_order = reproducible or self.reproducible
            ask = self._chooser.direct if in_order else self._chooser.choose
            algorithm = ask(plan, whole)
        if reproducible or self.reproducible:
            self.member(collective, root, "the root")
            algorithm = self._canon.algorithm(plan, algorithm, root, asked)
        key = (collective, algorithm, root, dtype, op.value, None)
        found = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = self._prepare(collective, algorithm, root, dtype, op)
        return found

    def _prepare_coded(
        self,
        collective: str,
        algorithm: str | StepFunction | None,
        dtype: int,
        numel: int,
        op: Op,
        root: int,
        coded: CodedAs,
    ) -> Prepared:
        """The operation for a call with codes; a named algorithm is proved."""
        if callable(algorithm):
            raise ValueError(f"{collective}: codec= needs a named algorithm, or none")
        engine, plan, codec = self.engine, kind_of(collective).plan, coded.codec
        root = self.member(collective, root, "the root")
        check_reducible(collective, dtype, op)
        name, placed, side = self.codings.way(plan, algorithm, root, coded, numel * ITEMSIZES[dtype])
        key = (collective, f"{name} {placed}", root, dtype, op.value, coded)
        if key in self._prepared:
            return self._prepared[key]
        if algorithm is not None:
            self.codings.prove(plan, algorithm, root, coded)
        operation = engine.operation(
            self._lowered(plan, name, root, coded.edges, placed),
            KINDS.index(collective),
            dtype,
            op.value,
            coded.number,
            codec.number,
            codec.block,
            side == "out",
            side == "in",
            coded.between_hosts,
            coded.feedback,
        )
        found = self._prepared[key] = Prepared(operation, collective, root, str(coded))
        return found

    def agree(self, kind: str, ranks: tuple[int, ...]) -> _native.BoundCall:
        """A call in which all ranks compare a list of ranks: the listed ranks wait for all others, the others
        only report their list.
        """
        first = ranks[0]
        others = sorted(ranks[1:]) if self.rank == first else [self.rank] * (self.rank in ranks)
        key: tuple[str | int, ...] = (kind, first, *others)  # this rank's steps depend on nothing else
        operation = self._agreements.get(key)
        if operation is None:
            code = lower_agreement(self.rank, self.size, (first, *others))
            operation = self.engine.operation(code, KINDS.index(kind), DTYPES.index("uint8"), ReduceOp.SUM)
            self._agreements[key] = operation
        return _native.BoundCall(kind, operation, len(ranks), number_of_ranks(ranks), 1.0, [], [], None)

    # ---- overridden by a group over another library ---------------------------------------------------

    def seen(self, kind: str, array: Any) -> Any:  # noqa: ARG002
        """An array, or a list of them, in a form that the checks can read."""
        return array

    def own_message(self, *message: Any) -> Any:  # noqa: ARG002
        """The work of a checked message; None: the engine runs it."""
        return None

    def own_list(self, *buffers: Any) -> Any:  # noqa: ARG002
        """What runs a list of checked buffers, see `Calls._execute`; None: the engine does."""
        return None

    def choice(self, collective: str, nbytes: int, algorithm: str | None = None) -> Choice:
        """The algorithm and the predicted time of a collective; `nbytes` of the whole buffer."""
        return self._chooser.explain(collective, nbytes, algorithm)

    def _prepare(self, collective: str, algorithm: str, root: int, dtype: int, op: Op) -> Prepared:
        engine = self.engine
        self.member(collective, root, "the root")
        check_reducible(collective, dtype, op)
        code = self._lowered(kind_of(collective).plan, algorithm, root)
        operation = engine.operation(code, KINDS.index(collective), dtype, op.value)
        return Prepared(operation, collective, root)

    def _prepare_custom(
        self, collective: str, function: StepFunction, dtype: int, op: Op, root: int, reproducible: bool
    ) -> Prepared:
        """The operation for the caller's own algorithm, which is proved at its first use."""
        engine = self.engine
        root = self.member(collective, root, "the root")
        check_reducible(collective, dtype, op)
        custom = self._custom.plan(kind_of(collective).plan, function, root)
        if (reproducible or self.reproducible) and not custom.canonical:
            raise ValueError(
                f"{collective}: algorithm {custom.name!r} does not combine contributions in the order of "
                "ranks, which reproducible=True asks for"
            )
        key = (collective, f"#{custom.number:x}", root, dtype, op.value, None)
        found = self._prepared.get(key)
        if found is None:
            kind = KINDS.index(collective)
            operation = engine.operation(custom.code, kind, dtype, op.value, custom.number)
            note = f"algorithm {custom.name}, plan {custom.number:016x}"
            found = self._prepared[key] = Prepared(operation, collective, root, note)
        return found

    def _lowered(
        self, collective: str, algorithm: str, root: int, coding: str = "", placed: bool = True
    ) -> list[int]:
        """This rank's code of a plan; the same for every dtype and operation. placed: it depends on hosts."""
        key = (collective, algorithm, root, coding, placed)
        code = self._code.get(key)
        if code is None:
            hosts = self.hosts if placed else ()
            code = lower_rank(self.rank, collective, algorithm, self.size, root, hosts, coding)
            self._code[key] = code
        return code

    def member(self, operation: str, rank: SupportsIndex, name: str = "the rank") -> int:
        """A rank of this group as an int; it may be a NumPy integer, as from `argmax`.

        Raises:
            TypeError: it is no integer.  ValueError: there is no such rank.
        """
        try:
            number = index(rank)
        except TypeError:
            what = f"{operation}: {name} is {rank!r}, expected the number of a rank"
            raise TypeError(what) from None
        if not 0 <= number < self.size:
            raise ValueError(f"{operation}: rank {number} is not in group {self.name!r} of {self.size} ranks")
        return number

    # ---- errors ----------------------------------------------------------------------------------------

    def scene(self, engine: _native.Engine, operation: str, timeout_s: float, where: str = "") -> Scene:
        """Where an operation fails: its group, rank, timeout and source line, for an error."""
        return Scene(engine, self.name, self.rank, self.size, self._host_names, operation, timeout_s, where)

    def failure(
        self, operation: str, timeout_s: float, engine: _native.Engine | None = None, where: str = ""
    ) -> GroupError:
        """The error for what aborted the group; `engine` is its engine, when the group may be closed."""
        self.reported = True
        return error(read(self.scene(engine or self.engine, operation, timeout_s, where)))

    def fail(self, operation: str, timeout_s: float, note: str | None) -> NoReturn:
        """Raise the error for what aborted the group. note: a further text for a Mismatch."""
        if self._engine is None:  # closed by a signal handler or another thread, while the call was under way
            where = f"group={self.name} rank={self.rank}/{self.size}"
            what = f"{operation} failed: this rank closed the group during the call"
            raise Aborted(message(what, where=where))
        raise self.failure(operation, timeout_s, None, f"{site()} with {note}" if note else "")

    def late(self, operation: str, waited_s: float, engine: _native.Engine, where: str) -> GroupError:
        """The error of a wait that timed out while its operation continues."""
        return error(read_late(self.scene(engine, operation, waited_s, where), waited_s))

    def describe(self, work: Work) -> str:
        """The repr of a work."""
        return Work.__repr__(work)

    def seconds(self, timeout: float | timedelta) -> float:
        """The seconds of a timeout argument.

        Raises:
            ValueError, TypeError: it is no timeout.
        """
        return seconds(timeout, self.timeout_s)


def check_algorithm(kind: str, algorithm: Any) -> None:
    """Raises TypeError: it is neither a name nor a function."""
    if algorithm is not None and not isinstance(algorithm, str) and not callable(algorithm):
        raise TypeError(f"{kind}: algorithm is a {type(algorithm).__name__}, expected a name or a function")


def check_op(kind: str, op: Any) -> None:
    """Raises TypeError: it is no reduction operation."""
    if type(op) not in _OPS:
        raise TypeError(f"{kind}: op is {op!r}, expected {_OP_NAMES} or premul_sum(factor)")


def check_reducible(kind: str, dtype: int, op: Op) -> None:
    """Raises TypeError, ValueError: the operation has no meaning for the dtype, or for this collective."""
    if not _native.reducible(dtype, op.value):
        raise TypeError(f"{kind}: {op.name} has no meaning for {DTYPES[dtype]}{_hint(op, dtype)}")
    if kind in ("scan", "exclusive_scan") and op is ReduceOp.AVG:
        raise ValueError(f"{kind}: AVG has no meaning for a prefix; use SUM")


def _hint(op: Op, dtype: int) -> str:
    if op is ReduceOp.AVG:
        return "; use SUM and divide, or a floating-point dtype"
    return "; complex numbers have no order" if DTYPES[dtype].startswith("complex") else ""
