"""Plans checked calls for the engine: chooses an algorithm, lowers it, binds it to the buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

from unisono import _native
from unisono.engine.bootstrap.forming import OpenConnections
from unisono.engine.costs.machine import DEFAULTS, MachineCalibration
from unisono.engine.costs.tuner import AlgorithmChoice, Tuner
from unisono.engine.diagnosis.call_site import call_site
from unisono.engine.diagnosis.call_text import number_of_list, number_of_ranks
from unisono.engine.diagnosis.close_reason import function_failure
from unisono.engine.diagnosis.fault_reader import (
    FaultContext,
    publish_close_reason,
    read,
    read_eviction,
    read_late,
)
from unisono.engine.diagnosis.fault_text import error
from unisono.engine.diagnosis.report import FirstFailure
from unisono.engine.environment.event_log import LOG
from unisono.engine.group.arguments import (
    CallArguments,
    check_beside,
    check_op,
    check_reducible,
)
from unisono.engine.group.buffer_layout import BufferLayout, check_alike, in_parts
from unisono.engine.group.call_log import log_call, log_end
from unisono.engine.group.call_results import CallResult
from unisono.engine.group.coalescing import (
    CoalescedBuffers,
    batches,
    block_counts,
    describe,
    extents_of,
    no_calls,
)
from unisono.engine.group.custom_algorithms import CustomAlgorithms
from unisono.engine.group.message_planning import MessagePlanner
from unisono.engine.group.reproducibility import ReproducibleAlgorithms
from unisono.engine.membership.eviction import Eviction
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES
from unisono.engine.operations.functions import UserOp
from unisono.engine.operations.kinds import KINDS, kind_of
from unisono.engine.operations.reduction import PremulSum, ReduceOp
from unisono.errors import Aborted, Evicted, GroupError, message
from unisono.plans import CONTRACTS, StepFunction, lower_rank
from unisono.plans.lowering import lower_agreement
from unisono.schedules.files import is_file

if TYPE_CHECKING:
    from unisono.engine.group.codec_arguments import EdgeCoding
    from unisono.engine.group.codec_planning import CodecPlanner
    from unisono.engine.group.listening import Listener
    from unisono.engine.store import TCPStore


class PreparedCall(NamedTuple):
    """An operation of the engine, ready to be bound to buffers.

    Attributes:
        note: a further text for a Mismatch.  parts: into how many chunks the plan cuts each block.
    """

    operation: _native.OperationDescriptor
    name: str
    algorithm: str
    root: int
    note: str | None = None
    parts: int = 1


class NativePlanner(MessagePlanner):
    """Plans the calls of one rank of one group for its engine, and makes the errors of failed calls.

    Attributes:
        reported: whether a call has raised what aborted the group.
        former_connections: connections to ranks that were in former groups; they end with this one.
        listening: where newcomers may come on this rank's host, (address or "", port or 0); None: nowhere.
        listener: their store, if this rank serves it.
        addresses: of all such stores, when the ranks last asked each other.
        admission_store: where this group was admitted, if it was; the next admission replaces it.
        leave_callbacks: what else ends with the group.
        encrypted: relays for TLS carry what goes between hosts.
    """

    def __init__(
        self,
        engine: _native.Engine,
        name: str,
        rank: int,
        size: int,
        timeout_s: float,
        host_names: tuple[str, ...],
        reproducible: bool = False,
        machine: MachineCalibration = DEFAULTS,
        members: tuple[int, ...] = (),
    ) -> None:
        super().__init__(engine, name, rank, size, timeout_s, host_names, reproducible, machine)
        self.reported = False
        self.former_connections = OpenConnections()
        self.listener: Listener | None = None
        self.listening: tuple[str, int] | None = None
        self.addresses: tuple[str, ...] = ()
        self.admission_store: TCPStore | None = None
        self.leave_callbacks: list[Callable[[], None]] = []
        self.encrypted = False
        self._host_names = host_names
        self.members = members
        self._first_failure = FirstFailure()

    def place(self, hosts: tuple[int, ...]) -> None:
        """See `Planner.place`."""
        super().place(hosts)
        self._tuner = Tuner(self.size, self.hosts, self.machine)
        self._reproducible = ReproducibleAlgorithms(self.size, self.hosts)
        self._custom = CustomAlgorithms(self.rank, self.size, self.hosts)
        self._code: dict[tuple[str, str, int, str, bool], list[int]] = {}
        self.forget()
        self.__dict__.pop("codings", None)

    def forget(self) -> None:
        """See `MessagePlanner.forget`."""
        self._prepared: dict[tuple[str, str, int, int, int, EdgeCoding | None], PreparedCall] = {}
        self._agreements: dict[tuple[str | int, ...], _native.OperationDescriptor] = {}
        # Weak keys, as in `CustomAlgorithms`.
        self._functions: WeakKeyDictionary[UserOp, dict[tuple[Any, ...], PreparedCall]] = WeakKeyDictionary()

    @cached_property
    def codings(self) -> CodecPlanner:
        """The codecs of calls; most programs need none."""
        from unisono.engine.group.codec_planning import CodecPlanner

        return CodecPlanner(self.rank, self.size, self.hosts, self._tuner)

    # ---- the end ---------------------------------------------------------------------------------------

    def leave(self, cause: str) -> None:
        """Tell the other ranks, end the threads, release the buffers."""
        engine = self.drop()
        if engine is None:
            return
        if self.context:  # the original goes on
            self.contexts.free(self.context)
            return
        if LOG.level:
            log_end(self, engine.issued, cause)
        try:
            if cause:
                publish_close_reason(engine, cause)
        finally:
            try:
                if self.listener is not None:
                    self.listener.close()  # before the others know: the next listener takes its port
            finally:
                engine.leave()
            self.former_connections.close()
            if self.admission_store is not None:
                self.admission_store.close()
            for end in list(self.leave_callbacks):  # another thread may end one, and remove it
                end()
            engine.wait_for_calls()  # not earlier: a call of a window ends with the window
            self.dropped_messages.close(engine.unsettled)  # not earlier: a thread may still move their bytes

    def drop(self) -> _native.Engine | None:
        """See `Planner.drop`."""
        self._prepared.clear()
        self._agreements.clear()
        return super().drop()

    def close_copies(self) -> None:
        """In a forked child: close its copies of connections, which would hide the parent's death."""
        if self._runner is not None:
            self._runner.close_copies()
            self.former_connections.close()

    # ---- plans -----------------------------------------------------------------------------------------

    def bind(
        self, call: CallArguments, layout: BufferLayout, pins: Any, result: CallResult
    ) -> _native.BoundCall:
        """See `Planner.bind`: choose a plan, lower it, bind it."""
        if layout.blocks and call.algorithm not in (None, "direct"):
            check_alike(call.kind, layout.blocks)
        if layout.source and CONTRACTS[call.plan].in_place:
            check_beside(call)
        coded, feedback = None, None
        if call.coding is not None:
            coded, feedback, layout = self.codings.of_call(call, pins[0], layout)
        made = self.prepare(call, layout.dtype, layout.typical, coded)
        operation, name, _, root, note, parts = made
        if LOG.level:
            log_call(self, call, made.algorithm, made.note, layout.dtype, layout.typical)
        if parts > 1:
            layout = in_parts(layout, call.kind, self.size, parts)
        factor = call.op.factor if type(call.op) is PremulSum else 1.0
        return _native.BoundCall(
            name,
            operation,
            root,
            layout.numel,
            factor,
            layout.target,
            layout.source,
            (*pins, feedback, call.op),
            layout.writes,
            made=result.array,
            returned=result.kind,
            note=note,
            feedback=0 if feedback is None else feedback.address,
            feedback_numel=0 if feedback is None else feedback.numel,
            unpack=result.unpack,
        )

    def bind_list(self, call: CallArguments, pieces: CoalescedBuffers) -> Any:
        """See `Planner.bind_list`: small buffers are packed into one operation."""
        collective, coded = call.plan, None
        if call.coding is not None:
            for piece in pieces.each:  # the same for all; the values of each are checked
                coded = self.codings.coded(call, piece.dtype, (piece.out, piece.sendbuf))
        number = number_of_list([(piece.dtype, piece.numel) for piece in pieces.each])
        blocks = block_counts(collective, self.size)
        factor = call.op.factor if isinstance(call.op, PremulSum) else 1.0
        note = describe(pieces.each)
        calls = []
        together = list(batches(pieces.each))
        for number_of_batch, batch in enumerate(together, 1):
            dtype, numel = batch[0].dtype, sum(piece.numel for piece in batch)
            made = self.prepare(call, dtype, numel, coded)
            operation, name, _, root, _, parts = made
            if LOG.level:
                log_call(self, call, made.algorithm, made.note, dtype, numel)
            if parts > 1:
                raise ValueError(f"{call.kind}: a coalesced call cannot cut each block into {parts} chunks")
            item = ITEMSIZES[dtype]
            calls.append(
                _native.BoundCall(
                    name,
                    operation,
                    root,
                    number,
                    factor,
                    extents_of([piece.out for piece in batch], blocks[0], item),
                    extents_of([piece.sendbuf for piece in batch], blocks[1], item),
                    pieces.keep,
                    writes=pieces.writes,
                    pieces=[piece.place for piece in batch],
                    blocks=blocks,
                    note=note,
                    unpack=pieces.unpack if number_of_batch == len(together) else None,
                )
            )
        return calls or no_calls

    def choice(self, collective: str, nbytes: int, algorithm: str | None = None) -> AlgorithmChoice:
        """See `Planner.choice`."""
        return self._tuner.explain(collective, nbytes, algorithm)

    def reason(self, call: CallArguments, nbytes: int, algorithm: str) -> str:
        """See `Planner.reason`."""
        if call.algorithm is not None:
            return "asked for by the call"
        if call.coding is not None:
            return "chosen for the codec"
        by = "in the order of ranks" if call.reproducible else self._tuner.reason(call.plan, nbytes)
        whole = nbytes * self.size if call.plan in ("all_gather", "reduce_scatter") else nbytes
        return f"{by}; predicted {self._tuner.predict(call.plan, algorithm, whole) * 1e6:.3g} us"

    def prepare(
        self, call: CallArguments, dtype: int, numel: int, coded: EdgeCoding | None = None
    ) -> PreparedCall:
        """The operation for a call.

        Args:
            numel: elements per rank, by which an algorithm is chosen; the same on every rank.
            coded: the encoding of its edges; None: values.
        Raises:
            ValueError: there is no such algorithm.  TypeError: the dtype has no such operation.
            GroupClosed: the group was closed.
        """
        kind, op, root, algorithm, in_order, _, _ = call
        check_op(kind, op)
        if type(op) is UserOp:
            return self._prepare_function(call, op, dtype, numel)
        if coded is not None:
            return self._prepare_coded(call, dtype, numel, coded)
        if callable(algorithm) or (algorithm is not None and is_file(algorithm)):
            return self._prepare_custom(call, algorithm, dtype)
        plan = kind_of(kind).plan
        if algorithm is None:
            choose = self._tuner.direct if in_order else self._tuner.choose
            algorithm = choose(plan, numel * ITEMSIZES[dtype])
        if in_order:
            algorithm = self._reproducible.algorithm(plan, algorithm, root, call.algorithm is not None)
        key = (kind, algorithm, root, dtype, op.value, None)
        found = self._prepared.get(key)
        if found is None:
            engine = self.engine
            check_reducible(kind, dtype, op)
            operation = engine.operation(
                self._lowered(plan, algorithm, root), KINDS.index(kind), dtype, op.value
            )
            found = self._prepared[key] = PreparedCall(operation, kind, algorithm, root)
        return found

    def _prepare_coded(self, call: CallArguments, dtype: int, numel: int, coded: EdgeCoding) -> PreparedCall:
        """The operation for a call with codes; a named algorithm is proved."""
        kind, op, root, algorithm = call[:4]
        if callable(algorithm) or (algorithm is not None and is_file(algorithm)):
            raise ValueError(f"{kind}: codec= needs a named algorithm, or none")
        engine, plan, codec = self.engine, call.plan, coded.codec
        check_reducible(kind, dtype, op)
        name, placed, side = self.codings.way(plan, algorithm, root, coded, numel * ITEMSIZES[dtype])
        key = (kind, f"{name} {placed}", root, dtype, op.value, coded)
        if key in self._prepared:
            return self._prepared[key]
        if algorithm is not None:
            self.codings.prove(plan, algorithm, root, coded)
        operation = engine.operation(
            self._lowered(plan, name, root, coded.edges, placed),
            KINDS.index(kind),
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
        found = self._prepared[key] = PreparedCall(operation, kind, name, root, str(coded))
        return found

    def _prepare_custom(self, call: CallArguments, function: StepFunction | str, dtype: int) -> PreparedCall:
        """The operation for the caller's own algorithm or file, which is proved at its first use."""
        kind, op, root = call[:3]
        engine = self.engine
        check_reducible(kind, dtype, op)
        custom = self._custom.plan(call.plan, function, root)
        self._reproducible.check_custom(kind, custom.name, call.reproducible and not custom.canonical)
        key = (kind, f"#{custom.number:x}", root, dtype, op.value, None)
        found = self._prepared.get(key)
        if found is None:
            operation = engine.operation(custom.code, KINDS.index(kind), dtype, op.value, custom.number)
            note = f"algorithm {custom.name}, plan {custom.number:016x}"
            found = self._prepared[key] = PreparedCall(operation, kind, custom.name, root, note, custom.parts)
        return found

    def _prepare_function(self, call: CallArguments, op: UserOp, dtype: int, numel: int) -> PreparedCall:
        """The operation for a call with a reduction function; every result is computed on one rank."""
        kind, _, root, algorithm, in_order, _, element = call
        plan, in_order, custom = call.plan, in_order or not op.commutative, None
        if callable(algorithm) or (algorithm is not None and is_file(algorithm)):
            custom = self._custom.plan(plan, algorithm, root)
            self._reproducible.check_custom(kind, custom.name, in_order and not custom.canonical)
            name = f"#{custom.number:x}"
        else:
            choose = self._tuner.direct if in_order else self._tuner.choose
            name = choose(plan, numel * ITEMSIZES[dtype]) if algorithm is None else algorithm
            name = self._reproducible.algorithm(plan, name, root, algorithm is not None, in_order, True)
        known = self._functions.setdefault(op, {})
        key = (kind, name, root, dtype, element)
        if key not in known:
            number, combiner = op.number, None
            if element is not None:
                item = element.itemsize // ITEMSIZES[dtype]
                if custom is not None and custom.parts > 1 and item > 1:
                    raise ValueError(f"{kind}: algorithm {custom.name!r} cuts blocks of a structured dtype")
                number, combiner = op.number_for(element), op.combiner(element, item, function_failure)
            code = self._lowered(plan, name, root) if custom is None else custom.code
            number ^= 0 if custom is None else custom.number
            value = op.value if combiner is not None else ReduceOp.SUM.value
            operation = self.engine.operation(
                code, KINDS.index(kind), dtype, value, number, combiner=combiner
            )
            parts = 1 if custom is None else custom.parts
            known[key] = PreparedCall(operation, kind, name, root, op.description, parts)
        return known[key]

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

    # ---- errors ----------------------------------------------------------------------------------------

    def fault_context(
        self, engine: _native.Engine, operation: str, timeout_s: float, where: str = ""
    ) -> FaultContext:
        """Where an operation fails: its group, rank, timeout and source line, for an error."""
        place = engine, self.name, self.rank, self.size, self._host_names, operation, timeout_s, where
        return FaultContext(*place, self.members, self._first_failure, self.hosts if self.encrypted else ())

    def failure(
        self, operation: str, timeout_s: float, engine: _native.Engine | None = None, where: str = ""
    ) -> GroupError:
        """The error for what aborted the group; `engine` is its engine, when the group may be closed."""
        self.reported = True
        found = error(read(self.fault_context(engine or self.engine, operation, timeout_s, where)))
        raised = [op.raised for op in self._functions if op.raised is not None]
        if raised and isinstance(found, Aborted):
            found.__cause__ = raised[0]
        return found

    def evicted(self, operation: str, why: str) -> Evicted:
        """The error of a rank without which the others go on."""
        self.reported = True
        report = read_eviction(self.fault_context(self.engine, operation, 0.0), Eviction(self.rank, why))
        found = error(report)
        assert isinstance(found, Evicted)
        return found

    def fail(self, operation: str, timeout_s: float, note: str | None) -> NoReturn:
        """Raise the error for what aborted the group. note: a further text for a Mismatch."""
        if self._runner is None:  # closed by a signal handler or another thread, while the call was under way
            where = f"group={self.name} rank={self.rank}/{self.size}"
            what = f"{operation} failed: this rank closed the group during the call"
            raise Aborted(message(what, where=where))
        raise self.failure(operation, timeout_s, None, f"{call_site()} with {note}" if note else "")

    def late(self, operation: str, waited_s: float, engine: _native.Engine, where: str) -> GroupError:
        """The error of a wait that timed out while its operation continues."""
        return error(read_late(self.fault_context(engine, operation, waited_s, where), waited_s))
