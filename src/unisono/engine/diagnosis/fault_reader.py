"""From the engine's record of a fault to a `FaultReport`. This is the only reader of that record."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from unisono import _native
from unisono._native import CallRecord, FaultKind, FaultRecord, RankRecord
from unisono.engine.base.limits import limit_text
from unisono.engine.diagnosis import report
from unisono.engine.diagnosis.call_site import call_site
from unisono.engine.diagnosis.call_text import KIND_SHIFT, describe_call, kind_name, message_text
from unisono.engine.diagnosis.report import (
    ENDED_CALLS,
    CallDescription,
    FaultReport,
    FirstFailure,
    MessageFault,
    RankSnapshot,
    SizeFault,
    UnexpectedMessage,
)
from unisono.engine.membership.eviction import Eviction, eviction
from unisono.engine.memory.buffers import ITEMSIZES
from unisono.engine.operations.kinds import KINDS, kind_of

SOURCE_LINE_PATIENCE_S = 0.5
"""How long a rank that reports a mismatch waits for the others' source lines."""

LEAVING_PATIENCE_S = 2.0
"""How long a survivor waits for the end of a process that leaves because of an exception."""

LEAVING = 2**64 - 1
"""The number of a report that is a close reason. Any other number is that of a collective."""

MOST_MESSAGES = 4
"""The most unexpected messages that are listed."""

_NAMES: dict[int, report.FaultKind] = {
    FaultKind.TIMEOUT: "timeout",
    FaultKind.PEER_LOST: "peer_lost",
    FaultKind.PEER_LEFT: "peer_left",
    FaultKind.MISMATCH: "mismatch",
    FaultKind.INTERRUPTED: "interrupted",
    FaultKind.ABORTED: "aborted",
    FaultKind.NO_MEMORY: "no_memory",
    FaultKind.BAD_FRAME: "bad_frame",
    FaultKind.HOST_SILENT: "host_silent",
    FaultKind.STOPPED: "stopped",
    FaultKind.UNREADABLE: "unreadable",
    FaultKind.UNWRITABLE: "unwritable",
    FaultKind.NO_ACCESS: "no_access",
    FaultKind.REPLACED: "replaced",
}

_LOST = FaultKind.PEER_LOST, FaultKind.PEER_LEFT, FaultKind.HOST_SILENT, FaultKind.STOPPED, FaultKind.REPLACED
_MEMORY = FaultKind.UNREADABLE, FaultKind.UNWRITABLE, FaultKind.NO_ACCESS


_WINDOW_WAITS = (
    "",
    "has the lock",
    "is in an update",
    "has not called fence",
    "has not called post",
    "has not called complete",
    "did not answer",
)
"""What a rank did for which a call of a window waited, by its number in the engine."""


class FaultContext(NamedTuple):
    """Where a fault is read: on which rank of which group, and what that rank was doing.

    Attributes:
        operation: what this rank was doing, if anything.
        called_at: where in the caller's source; "" when the call is still on the stack of this thread.
        members: the number of every rank in the job.
        first: what failed first on this rank.
        relayed: the host of every rank, where relays for TLS carry what goes between hosts; (): none do.
    """

    engine: _native.Engine
    group: str
    rank: int
    size: int
    hosts: tuple[str, ...]
    operation: str = ""
    timeout_s: float = 0.0
    called_at: str = ""
    members: tuple[int, ...] = ()
    first: FirstFailure | None = None
    relayed: tuple[int, ...] = ()


def read(context: FaultContext, record: FaultRecord | None = None) -> FaultReport:
    """The report of the fault that aborted the group, or of the fault in `record`."""
    report, first = _read(context, record), context.first
    if record is not None or first is None or report.kind not in ENDED_CALLS:
        return report
    call = report.status.call if report.kind == "timeout" else None
    failed = f"{call.name} #{report.sequence}" if call is not None else first.operation
    if not first.operation:
        first.operation, first.timeout_s = context.operation, context.timeout_s
        if call is None or call.name == context.operation:
            return report
    limit = first.timeout_s if call is None or call.name == first.operation else 0.0
    return msgspec.structs.replace(report, failed=failed, failed_timeout_s=limit)


def _read(context: FaultContext, record: FaultRecord | None) -> FaultReport:
    evicted = eviction(context.engine, context.rank, context.size) if record is None else None
    if evicted is not None:
        return read_eviction(context, evicted)
    fault = context.engine.read_fault(refresh=True) if record is None else record
    own_end = fault.kind == FaultKind.PEER_LEFT and fault.rank == context.rank
    if own_end or fault.kind == FaultKind.NONE:
        return _report(context, "closed", fault, found_by=context.rank)
    if fault.kind in _LOST:
        return _peer(context, fault)
    if fault.kind in _MEMORY:
        return _report(context, _NAMES[fault.kind], fault, rank=fault.rank)
    if fault.kind == FaultKind.MISMATCH:
        return _mismatch(context, fault) if fault.seq else _message_mismatch(context, fault)
    if fault.kind == FaultKind.TIMEOUT:
        return _timeout(context, fault) if fault.seq else _message_timeout(context, fault)
    if fault.kind == FaultKind.BAD_FRAME:
        return _report(context, "bad_frame", fault, rank=fault.rank, detail=fault.frame)
    if fault.kind == FaultKind.NO_MEMORY:
        detail = limit_text(MemoryError()) if fault.found_by == context.rank else ""
        if fault.rank != fault.found_by:
            what = message_text(fault.size_mismatch.sent_form, fault.size_mismatch.sent_nbytes)
            detail = f"rank {fault.rank} sends {what}, {fault.size_mismatch.sent_nbytes} bytes" + (
                f"; {detail}" if detail else ""
            )
        return _report(context, "no_memory", fault, rank=fault.found_by, detail=detail)
    cause = _cause(fault.ranks[fault.found_by])
    return _report(context, _NAMES[fault.kind], fault, rank=fault.found_by, cause=cause)


def read_eviction(context: FaultContext, evicted: Eviction) -> FaultReport:
    """The report of a rank without which the others go on."""
    record = context.engine.read_fault(refresh=False)
    return _report(context, "evicted", record, found_by=evicted.by, rank=context.rank, cause=evicted.why)


def read_late(context: FaultContext, waited_s: float) -> FaultReport:
    """The report of work that continues after `waited_s`: which ranks have not arrived."""
    record = context.engine.read_fault(refresh=True)
    if context.operation in KINDS:
        seq = record.ranks[context.rank].started
        missing = _absent(record, seq)
        first = missing[0] if missing else None
        return _report(
            context,
            "late",
            record,
            found_by=context.rank,
            rank=first,
            missing=missing,
            sequence=seq,
            timeout_s=waited_s,
        )
    return _report_unexpected(context, "late", record, waited_s)


def read_empty_probe(context: FaultContext) -> FaultReport:
    """The report of a probe that found no message; the group continues."""
    record = context.engine.read_fault(refresh=False)
    return _report_unexpected(context, "nothing_came", record, context.timeout_s)


def _report_unexpected(
    context: FaultContext, kind: report.FaultKind, record: FaultRecord, waited_s: float
) -> FaultReport:
    found, more = _unexpected(context)
    return _report(
        context,
        kind,
        record,
        found_by=context.rank,
        unexpected=found,
        more_unexpected=more,
        timeout_s=waited_s,
    )


def publish_close_reason(engine: _native.Engine, cause: str) -> None:
    """Report to the other ranks why this rank leaves, unless there is a fault already."""
    if not engine.faulted:
        engine.report(LEAVING, cause)


def last_operation(rank: RankRecord) -> str:
    """Where a rank was: "in barrier #40", "after barrier #40", "before any operation"."""
    if rank.started == 0:
        return "before any operation"
    call = rank.call(rank.started)
    name = kind_name(call.kind) if call is not None else "operation"
    return f"{'after' if rank.finished >= rank.started else 'in'} {name} #{rank.started}"


def _report(
    context: FaultContext,
    kind: report.FaultKind,
    record: FaultRecord,
    *,
    found_by: int | None = None,
    rank: int | None = None,
    sequence: int = 0,
    timeout_s: float | None = None,
    **more: Any,
) -> FaultReport:
    """The report, with the status of every rank. rank: the rank that it is about."""
    ranks = tuple(_snapshot(context, each, sequence) for each in record.ranks)
    return FaultReport(
        kind=kind,
        group=context.group,
        size=context.size,
        members=() if context.members == tuple(range(context.size)) else context.members,
        reporter=context.rank,
        found_by=record.found_by if found_by is None else found_by,
        operation=context.operation,
        timeout_s=context.timeout_s if timeout_s is None else timeout_s,
        sequence=sequence,
        rank=rank,
        host="" if rank is None else ranks[rank].host,
        pid=0 if rank is None else ranks[rank].pid,
        ranks=ranks,
        **more,
    )


def _snapshot(context: FaultContext, record: RankRecord, sequence: int) -> RankSnapshot:
    cause = _cause(record)
    leaves = record.has_report and record.report_seq == LEAVING
    place = record.report if record.has_report and not leaves else ""
    return RankSnapshot(
        record.rank,
        context.hosts[record.rank],
        record.pid,
        record.started,
        record.finished,
        last_operation(record),
        _describe_call(record.call(sequence)),
        place,
        bool(place) and record.report_seq != sequence,
        cause,
    )


def _describe_call(call: CallRecord | None) -> CallDescription | None:
    return None if call is None else describe_call(call)


def _cause(record: RankRecord) -> str:
    """The exception that made a rank leave; "" where it reported none."""
    return record.report if record.has_report and record.report_seq == LEAVING else ""


def _absent(record: FaultRecord, sequence: int) -> tuple[int, ...]:
    return tuple(each.rank for each in record.ranks if each.started < sequence)


def _peer(context: FaultContext, fault: FaultRecord) -> FaultReport:
    cause = ""
    if fault.kind == FaultKind.PEER_LEFT:
        cause = _cause(fault.ranks[fault.rank])
        # Several processes may end: the launcher shows the first one's error. An elastic group goes on.
        if cause and not context.engine.elastic:
            patience = min(LEAVING_PATIENCE_S, context.timeout_s or LEAVING_PATIENCE_S)
            context.engine.await_end(fault.rank, patience)
    hosts = context.relayed
    return _report(
        context,
        _NAMES[fault.kind],
        fault,
        rank=fault.rank,
        cause=cause,
        signal=fault.signal or None,
        exit_code=fault.exit_code if fault.exit_code >= 0 else None,
        relayed=bool(hosts) and hosts[fault.rank] != hosts[fault.found_by],
    )


def _timeout(context: FaultContext, fault: FaultRecord) -> FaultReport:
    missing = _absent(fault, fault.seq)
    silent = fault.rank if fault.rank >= 0 else fault.found_by
    rank = missing[0] if missing else silent
    return _report(context, "timeout", fault, rank=rank, missing=missing, sequence=fault.seq)


def _message_timeout(context: FaultContext, fault: FaultRecord) -> FaultReport:
    rank = fault.rank if fault.rank >= 0 else None
    if fault.window:
        return _report(context, "timeout", fault, rank=rank, detail=_WINDOW_WAITS[fault.window])
    found, more = _unexpected(context) if fault.found_by == context.rank else ((), 0)
    return _report(context, "timeout", fault, rank=rank, unexpected=found, more_unexpected=more)


def _unexpected(context: FaultContext) -> tuple[tuple[UnexpectedMessage, ...], int]:
    """The unexpected messages, with other tags or sources than the receives; and how many more there are."""
    if context.operation.partition("(")[0] in ("send", "isend", "send_object"):
        return (), 0
    found = context.engine.unexpected()
    listed = found[:MOST_MESSAGES]
    waiting = (
        UnexpectedMessage(source, tag, message_text(form, nbytes), nbytes)
        for source, tag, form, nbytes in listed
    )
    return tuple(waiting), len(found) - len(listed)


def _mismatch(context: FaultContext, fault: FaultRecord) -> FaultReport:
    mine = fault.ranks[context.rank]
    # A call of a group that was aborted before has not begun.
    seq = mine.started if mine.started > mine.finished else mine.started + 1
    context.engine.report(seq, context.called_at or call_site())
    first = _first_difference(fault)
    there = [each.rank for each in fault.ranks if each.call(first) is not None]
    reported = _after_source_lines(context, there)
    calls = {_describe_call(reported.ranks[rank].call(first)) for rank in there}
    size_mismatch = fault.size_mismatch
    sizes = _sizes(fault) if len(calls) == 1 and size_mismatch.seq == first else None
    several = context.engine.several_threads
    return _report(context, "mismatch", reported, sequence=first, sizes=sizes, several_threads=several)


def _sizes(fault: FaultRecord) -> SizeFault:
    size_mismatch = fault.size_mismatch
    if not size_mismatch.expected_nbytes and not size_mismatch.sent_nbytes:
        return SizeFault(fault.rank, fault.found_by, None, None)
    item = ITEMSIZES[size_mismatch.expected_form]
    block, origin, destination = _forwarded_block(fault)
    return SizeFault(
        fault.rank,
        fault.found_by,
        size_mismatch.sent_nbytes // item,
        size_mismatch.expected_nbytes // item,
        size_mismatch.more,
        block,
        origin,
        destination,
    )


def _forwarded_block(fault: FaultRecord) -> tuple[int | None, int | None, int | None]:
    """The block that did not fit, its origin and its destination, if one of the two ranks only forwards it
    and does not decide its size.

    The number of a chunk is the rank of its block, except that it is 0 at the end of a scatter.
    """
    size_mismatch = fault.size_mismatch
    call = fault.ranks[fault.found_by].call(size_mismatch.seq)
    if call is None:
        return None, None, None
    plan = kind_of(KINDS[call.kind]).plan if call.kind < len(KINDS) else ""
    if plan == "all_gather" and size_mismatch.tag != fault.rank:
        return size_mismatch.tag, None, None
    if plan == "gather" and (fault.rank, fault.found_by) != (size_mismatch.tag, call.root):
        return size_mismatch.tag, None, call.root
    if plan == "scatter" and (size_mismatch.scratch or fault.rank != call.root):
        return size_mismatch.tag if size_mismatch.scratch else fault.found_by, call.root, None
    return None, None, None


def _after_source_lines(context: FaultContext, ranks: Iterable[int]) -> FaultRecord:
    """The record after these ranks have reported their source lines; each of them is in its call."""
    end = time.monotonic() + SOURCE_LINE_PATIENCE_S
    for rank in ranks:
        while not context.engine.record_of(rank).has_report and time.monotonic() < end:
            time.sleep(0.001)
    return context.engine.read_fault(refresh=False)


def _message_mismatch(context: FaultContext, fault: FaultRecord) -> FaultReport:
    if context.rank == fault.found_by:
        operation = context.operation.partition("(")[0]
        receiving = operation in ("recv", "irecv", "sendrecv", "batch", "recv_object")
        context.engine.report(0, f"{operation} at {context.called_at or call_site()}" if receiving else "")
    reported = _after_source_lines(context, (fault.found_by,))
    receiver, size_mismatch = reported.ranks[fault.found_by], fault.size_mismatch
    message = MessageFault(
        fault.rank,
        fault.found_by,
        size_mismatch.tag,
        message_text(size_mismatch.sent_form, size_mismatch.sent_nbytes),
        message_text(size_mismatch.expected_form, size_mismatch.expected_nbytes),
        (size_mismatch.sent_form ^ size_mismatch.expected_form) >> KIND_SHIFT & 1 == 1,
        receiver.report if receiver.has_report and receiver.report_seq == 0 else "",
    )
    return _report(context, "mismatch", reported, message=message)


def _first_difference(fault: FaultRecord) -> int:
    """The first collective in which ranks differed: a rank that could finish it alone may be further."""
    found_at = fault.size_mismatch.seq or fault.seq
    for seq in range(max(1, found_at - _native.HISTORY + 2), found_at):
        if len({_numbers(each.call(seq)) for each in fault.ranks} - {None}) > 1:
            return seq
    return found_at


def _numbers(call: CallRecord | None) -> tuple[int, ...] | None:
    """All numbers of a call, for a comparison: its text shows fewer."""
    if call is None:
        return None
    how = call.block, call.between_hosts, call.fed_back
    return call.kind, call.dtype, call.op, call.root, call.numel, call.algorithm, *how
