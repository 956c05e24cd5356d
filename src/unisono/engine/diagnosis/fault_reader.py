"""From the engine's record of a fault to a `FaultReport`. This is the only reader of that record."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from unisono import _native
from unisono._native import CallRecord, FaultKind, FaultRecord, RankRecord
from unisono.engine.base.limits import limit_text
from unisono.engine.diagnosis import report
from unisono.engine.diagnosis.call_site import call_site
from unisono.engine.diagnosis.call_text import KIND_SHIFT, describe_call, kind_name, message_text
from unisono.engine.diagnosis.report import (
    CallDescription,
    FaultReport,
    MessageFault,
    RankSnapshot,
    SizeFault,
    UnexpectedMessage,
)
from unisono.engine.memory.buffers import ITEMSIZES
from unisono.engine.operations.kinds import KINDS, kind_of

__all__ = ["FaultContext", "last_operation", "publish_close_reason", "read", "read_empty_probe", "read_late"]

REMARK_PATIENCE_S = 0.5
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
}


class FaultContext(NamedTuple):
    """Where a fault is read: on which rank of which group, and what that rank was doing.

    Attributes:
        operation: what this rank was doing, if anything.
        called_at: where in the caller's source; "" when the call is still on the stack of this thread.
    """

    engine: _native.Engine
    group: str
    rank: int
    size: int
    hosts: tuple[str, ...]
    operation: str = ""
    timeout_s: float = 0.0
    called_at: str = ""


def read(scene: FaultContext, record: FaultRecord | None = None) -> FaultReport:
    """The report of the fault that aborted the group, or of the fault in `record`."""
    fault = scene.engine.read_fault(refresh=True) if record is None else record
    own_end = fault.kind == FaultKind.PEER_LEFT and fault.about == scene.rank
    if own_end or fault.kind == FaultKind.NONE:
        return _report(scene, "closed", fault, found_by=scene.rank)
    if fault.kind in (FaultKind.PEER_LOST, FaultKind.PEER_LEFT, FaultKind.HOST_SILENT):
        return _peer(scene, fault)
    if fault.kind == FaultKind.MISMATCH:
        return _mismatch(scene, fault) if fault.seq else _message_mismatch(scene, fault)
    if fault.kind == FaultKind.TIMEOUT:
        return _timeout(scene, fault) if fault.seq else _message_timeout(scene, fault)
    if fault.kind == FaultKind.BAD_FRAME:
        return _report(scene, "bad_frame", fault, rank=fault.about, detail=fault.frame)
    if fault.kind == FaultKind.NO_MEMORY:
        detail = limit_text(MemoryError()) if fault.by == scene.rank else ""
        if fault.about != fault.by:
            what = message_text(fault.misfit.got_form, fault.misfit.got_nbytes)
            detail = f"rank {fault.about} sends {what}, {fault.misfit.got_nbytes} bytes" + (
                f"; {detail}" if detail else ""
            )
        return _report(scene, "no_memory", fault, rank=fault.by, detail=detail)
    cause = _cause(fault.ranks[fault.by])
    return _report(scene, _NAMES[fault.kind], fault, rank=fault.by, cause=cause)


def read_late(scene: FaultContext, waited_s: float) -> FaultReport:
    """The report of work that continues after `waited_s`: which ranks have not arrived."""
    record = scene.engine.read_fault(refresh=True)
    if scene.operation in KINDS:
        seq = record.ranks[scene.rank].started
        missing = _absent(record, seq)
        first = missing[0] if missing else None
        return _report(
            scene,
            "late",
            record,
            found_by=scene.rank,
            rank=first,
            missing=missing,
            sequence=seq,
            timeout_s=waited_s,
        )
    return _report_unexpected(scene, "late", record, waited_s)


def read_empty_probe(scene: FaultContext) -> FaultReport:
    """The report of a probe that found no message; the group continues."""
    record = scene.engine.read_fault(refresh=False)
    return _report_unexpected(scene, "nothing_came", record, scene.timeout_s)


def _report_unexpected(
    scene: FaultContext, kind: report.FaultKind, record: FaultRecord, waited_s: float
) -> FaultReport:
    found, more = _unexpected(scene)
    return _report(
        scene,
        kind,
        record,
        found_by=scene.rank,
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
    scene: FaultContext,
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
    ranks = tuple(_state(scene, each, sequence) for each in record.ranks)
    return FaultReport(
        kind=kind,
        group=scene.group,
        size=scene.size,
        reporter=scene.rank,
        found_by=record.by if found_by is None else found_by,
        operation=scene.operation,
        timeout_s=scene.timeout_s if timeout_s is None else timeout_s,
        sequence=sequence,
        rank=rank,
        host="" if rank is None else ranks[rank].host,
        pid=0 if rank is None else ranks[rank].pid,
        ranks=ranks,
        **more,
    )


def _state(scene: FaultContext, record: RankRecord, sequence: int) -> RankSnapshot:
    cause = _cause(record)
    leaves = record.has_report and record.report_seq == LEAVING
    place = record.report if record.has_report and not leaves else ""
    return RankSnapshot(
        record.rank,
        scene.hosts[record.rank],
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


def _peer(scene: FaultContext, fault: FaultRecord) -> FaultReport:
    cause = ""
    if fault.kind == FaultKind.PEER_LEFT:
        cause = _cause(fault.ranks[fault.about])
        if cause:  # several processes may end: the launcher shows the first one's error
            patience = min(LEAVING_PATIENCE_S, scene.timeout_s or LEAVING_PATIENCE_S)
            scene.engine.await_end(fault.about, patience)
    return _report(
        scene,
        _NAMES[fault.kind],
        fault,
        rank=fault.about,
        cause=cause,
        signal=fault.signal or None,
        exit_code=fault.exit_code if fault.exit_code >= 0 else None,
    )


def _timeout(scene: FaultContext, fault: FaultRecord) -> FaultReport:
    missing = _absent(fault, fault.seq)
    silent = fault.about if fault.about >= 0 else fault.by
    rank = missing[0] if missing else silent
    return _report(scene, "timeout", fault, rank=rank, missing=missing, sequence=fault.seq)


def _message_timeout(scene: FaultContext, fault: FaultRecord) -> FaultReport:
    found, more = _unexpected(scene) if fault.by == scene.rank else ((), 0)
    rank = fault.about if fault.about >= 0 else None
    return _report(scene, "timeout", fault, rank=rank, unexpected=found, more_unexpected=more)


def _unexpected(scene: FaultContext) -> tuple[tuple[UnexpectedMessage, ...], int]:
    """The unexpected messages, with other tags or sources than the receives; and how many more there are."""
    if scene.operation.partition("(")[0] in ("send", "isend", "send_object"):
        return (), 0
    found = scene.engine.unexpected()
    listed = found[:MOST_MESSAGES]
    waiting = (
        UnexpectedMessage(source, tag, message_text(form, nbytes), nbytes)
        for source, tag, form, nbytes in listed
    )
    return tuple(waiting), len(found) - len(listed)


def _mismatch(scene: FaultContext, fault: FaultRecord) -> FaultReport:
    mine = fault.ranks[scene.rank]
    # A call of a group that was aborted before has not begun.
    seq = mine.started if mine.started > mine.finished else mine.started + 1
    scene.engine.report(seq, scene.called_at or call_site())
    first = _first_difference(fault)
    there = [each.rank for each in fault.ranks if each.call(first) is not None]
    reported = _after_remarks(scene, there)
    calls = {_describe_call(reported.ranks[rank].call(first)) for rank in there}
    misfit = fault.misfit
    sizes = _sizes(fault) if len(calls) == 1 and misfit.seq == first else None
    return _report(scene, "mismatch", reported, sequence=first, sizes=sizes)


def _sizes(fault: FaultRecord) -> SizeFault:
    misfit = fault.misfit
    if not misfit.wanted_nbytes and not misfit.got_nbytes:
        return SizeFault(fault.about, fault.by, None, None)
    item = ITEMSIZES[misfit.wanted_form]
    block, origin, destination = _forwarded_block(fault)
    return SizeFault(
        fault.about,
        fault.by,
        misfit.got_nbytes // item,
        misfit.wanted_nbytes // item,
        misfit.more,
        block,
        origin,
        destination,
    )


def _forwarded_block(fault: FaultRecord) -> tuple[int | None, int | None, int | None]:
    """The block that did not fit, its origin and its destination, if one of the two ranks only forwards it
    and does not decide its size.

    The number of a chunk is the rank of its block, except that it is 0 at the end of a scatter.
    """
    misfit = fault.misfit
    call = fault.ranks[fault.by].call(misfit.seq)
    if call is None:
        return None, None, None
    plan = kind_of(KINDS[call.kind]).plan if call.kind < len(KINDS) else ""
    if plan == "all_gather" and misfit.tag != fault.about:
        return misfit.tag, None, None
    if plan == "gather" and (fault.about, fault.by) != (misfit.tag, call.root):
        return misfit.tag, None, call.root
    if plan == "scatter" and (misfit.scratch or fault.about != call.root):
        return misfit.tag if misfit.scratch else fault.by, call.root, None
    return None, None, None


def _after_remarks(scene: FaultContext, ranks: Iterable[int]) -> FaultRecord:
    """The record after these ranks have reported their source lines; each of them is in its call."""
    end = time.monotonic() + REMARK_PATIENCE_S
    for rank in ranks:
        while not scene.engine.record_of(rank).has_report and time.monotonic() < end:
            time.sleep(0.001)
    return scene.engine.read_fault(refresh=False)


def _message_mismatch(scene: FaultContext, fault: FaultRecord) -> FaultReport:
    if scene.rank == fault.by:
        operation = scene.operation.partition("(")[0]
        receiving = operation in ("recv", "irecv", "sendrecv", "batch", "recv_object")
        scene.engine.report(0, f"{operation} at {scene.called_at or call_site()}" if receiving else "")
    reported = _after_remarks(scene, (fault.by,))
    receiver, misfit = reported.ranks[fault.by], fault.misfit
    message = MessageFault(
        fault.about,
        fault.by,
        misfit.tag,
        message_text(misfit.got_form, misfit.got_nbytes),
        message_text(misfit.wanted_form, misfit.wanted_nbytes),
        (misfit.got_form ^ misfit.wanted_form) >> KIND_SHIFT & 1 == 1,
        receiver.report if receiver.has_report and receiver.report_seq == 0 else "",
    )
    return _report(scene, "mismatch", reported, message=message)


def _first_difference(fault: FaultRecord) -> int:
    """The first collective in which ranks differed: a rank that could finish it alone may be further."""
    found_at = fault.misfit.seq or fault.seq
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
