"""From the engine's numbers to a `FaultReport`. This is the only reader of those numbers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from unisono import _native
from unisono._native import FaultKind
from unisono.buffers import ITEMSIZES
from unisono.diagnosis import report
from unisono.diagnosis.calls import KIND_SHIFT, called, kind_name, message_text
from unisono.diagnosis.report import Called, FaultReport, MessageFault, RankState, SizeFault, Waiting
from unisono.diagnosis.site import site
from unisono.kinds import KINDS, kind_of
from unisono.limits import described

__all__ = ["Scene", "last_seen", "read", "read_late", "read_nothing_came", "tell_cause"]

REMARK_PATIENCE_S = 0.5
"""How long a rank that reports a mismatch waits for the others to say where they are."""

LEAVING_PATIENCE_S = 2.0
"""How long a survivor waits for the end of a process that leaves because of an exception."""

LEAVING = 2**64 - 1
"""The number of a remark of why its rank leaves. That of another one is the operation's it speaks of."""

MOST_MESSAGES = 4
"""So many of the messages that no receive has asked for are listed."""

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


class _Fault(NamedTuple):
    kind: int
    by: int
    about: int
    signal: int
    exit_code: int
    seq: int


class _Misfit(NamedTuple):
    """A message of another size than was wanted. tag: of a collective, the number of the chunk.

    wanted_form, got_form: the dtype, and above it what the message is part of; see `calls.message_text`.
    seq: the collective, 0 for one between two ranks.  more: may have followed.  scratch: the chunk is one.
    """

    tag: int
    wanted_form: int
    got_form: int
    wanted: int
    got: int
    seq: int
    more: bool
    scratch: bool


class Scene(NamedTuple):
    """Where a fault is looked at: on which rank of which group, and what that rank was doing.

    Attributes:
        operation: what this rank was doing, if anything.
        called_at: where in the caller's source; "" when the call is still on the stack of whoever asks.
    """

    engine: _native.Engine
    group: str
    rank: int
    size: int
    hosts: tuple[str, ...]
    operation: str = ""
    timeout_s: float = 0.0
    called_at: str = ""


def read(scene: Scene, numbers: tuple[int, int, int, int, int, int] | None = None) -> FaultReport:
    """The report of the fault that aborted the group, or of the one of these numbers."""
    scene.engine.refresh()
    fault = _Fault(*(numbers or scene.engine.fault()))
    own_end = fault.kind == FaultKind.PEER_LEFT and fault.about == scene.rank
    if own_end or fault.kind == FaultKind.NONE:
        return _report(scene, "closed")
    if fault.kind in (FaultKind.PEER_LOST, FaultKind.PEER_LEFT, FaultKind.HOST_SILENT):
        return _peer(scene, fault)
    if fault.kind == FaultKind.MISMATCH:
        return _mismatch(scene, fault) if fault.seq else _message_mismatch(scene, fault)
    if fault.kind == FaultKind.TIMEOUT:
        return _timeout(scene, fault) if fault.seq else _message_timeout(scene, fault)
    if fault.kind == FaultKind.BAD_FRAME:
        return _report(scene, "bad_frame", fault, rank=fault.about, detail=scene.engine.bad_frame())
    if fault.kind == FaultKind.NO_MEMORY:
        detail = described(MemoryError()) if fault.by == scene.rank else ""
        return _report(scene, "no_memory", fault, rank=fault.by, detail=detail)
    return _report(scene, _NAMES[fault.kind], fault, rank=fault.by, cause=_cause(scene, fault.by))


def read_late(scene: Scene, waited_s: float) -> FaultReport:
    """The report of work that is not done after `waited_s` and goes on: who has not come."""
    scene.engine.refresh()
    if scene.operation in KINDS:
        seq = scene.engine.standing(scene.rank)[1]
        missing = _absent(scene, seq)
        first = missing[0] if missing else None
        return _report(scene, "late", rank=first, missing=missing, sequence=seq, timeout_s=waited_s)
    unexpected, more = _unexpected(scene)
    return _report(scene, "late", unexpected=unexpected, more_unexpected=more, timeout_s=waited_s)


def read_nothing_came(scene: Scene) -> FaultReport:
    """The report of a probe to which no message came; it ends nothing."""
    unexpected, more = _unexpected(scene)
    return _report(
        scene, "nothing_came", unexpected=unexpected, more_unexpected=more, timeout_s=scene.timeout_s
    )


def tell_cause(engine: _native.Engine, cause: str) -> None:
    """Tell the others of the exception that makes this rank leave, unless they have a fault to report."""
    if not engine.fault()[0]:
        engine.remark(LEAVING, cause)


def last_seen(engine: _native.Engine, rank: int) -> str:
    """Where a rank was: "in barrier #40", "after barrier #40", "before any operation"."""
    _, started, finished, _ = engine.standing(rank)
    if started == 0:
        return "before any operation"
    call = engine.remembered(rank, started)
    name = kind_name(call[0]) if call is not None else "operation"
    return f"{'after' if finished >= started else 'in'} {name} #{started}"


def _report(
    scene: Scene,
    kind: report.FaultKind,
    fault: _Fault | None = None,
    *,
    rank: int | None = None,
    sequence: int = 0,
    timeout_s: float | None = None,
    **more: Any,
) -> FaultReport:
    """The record, with every rank's standing. rank: whose process it is about."""
    ranks = tuple(_state(scene, each, sequence) for each in range(scene.size))
    return FaultReport(
        kind=kind,
        group=scene.group,
        size=scene.size,
        reporter=scene.rank,
        found_by=scene.rank if fault is None else fault.by,
        operation=scene.operation,
        timeout_s=scene.timeout_s if timeout_s is None else timeout_s,
        sequence=sequence,
        rank=rank,
        host="" if rank is None else ranks[rank].host,
        pid=0 if rank is None else ranks[rank].pid,
        ranks=ranks,
        **more,
    )


def _state(scene: Scene, rank: int, sequence: int) -> RankState:
    engine = scene.engine
    pid, started, finished, _ = engine.standing(rank)
    remark = engine.remark_of(rank)
    leaves = remark is not None and remark[0] == LEAVING
    place = "" if remark is None or leaves else remark[1]
    return RankState(
        rank,
        scene.hosts[rank],
        pid,
        started,
        finished,
        last_seen(engine, rank),
        _called(engine, rank, sequence),
        place,
        bool(place) and remark is not None and remark[0] != sequence,
        _cause(scene, rank) if leaves else "",
    )


def _called(engine: _native.Engine, rank: int, sequence: int) -> Called | None:
    call = engine.remembered(rank, sequence)
    return None if call is None else called(call)


def _cause(scene: Scene, rank: int) -> str:
    """The exception that made a rank leave; "" where it told none."""
    remark = scene.engine.remark_of(rank)
    return remark[1] if remark is not None and remark[0] == LEAVING else ""


def _absent(scene: Scene, sequence: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(scene.size) if scene.engine.standing(rank)[1] < sequence)


def _peer(scene: Scene, fault: _Fault) -> FaultReport:
    cause = ""
    if fault.kind == FaultKind.PEER_LEFT:
        cause = _cause(scene, fault.about)
        if cause:  # where several processes end, the first one's error is what people are shown
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


def _timeout(scene: Scene, fault: _Fault) -> FaultReport:
    missing = _absent(scene, fault.seq)
    silent = fault.about if fault.about >= 0 else fault.by
    return _report(
        scene,
        "timeout",
        fault,
        rank=missing[0] if missing else silent,
        missing=missing,
        sequence=fault.seq,
    )


def _message_timeout(scene: Scene, fault: _Fault) -> FaultReport:
    found, more = _unexpected(scene) if fault.by == scene.rank else ((), 0)
    rank = fault.about if fault.about >= 0 else None
    return _report(scene, "timeout", fault, rank=rank, unexpected=found, more_unexpected=more)


def _unexpected(scene: Scene) -> tuple[tuple[Waiting, ...], int]:
    """Messages that have come here and wait, with other tags or from others than asked for; how many more."""
    if scene.operation.partition("(")[0] in ("send", "isend", "send_object"):
        return (), 0
    found = scene.engine.unexpected()
    listed = found[:MOST_MESSAGES]
    waiting = (
        Waiting(source, tag, message_text(form, nbytes), nbytes) for source, tag, form, nbytes in listed
    )
    return tuple(waiting), len(found) - len(listed)


def _mismatch(scene: Scene, fault: _Fault) -> FaultReport:
    _, started, finished, _ = scene.engine.standing(scene.rank)
    mine = started if started > finished else started + 1  # a call of a group aborted before was not begun
    scene.engine.remark(mine, scene.called_at or site())
    misfit = _Misfit(*scene.engine.misfit())
    seq = _first_difference(scene, misfit.seq or fault.seq)
    there = [rank for rank in range(scene.size) if scene.engine.remembered(rank, seq) is not None]
    _listen(scene, there)
    calls = {_called(scene.engine, rank, seq) for rank in there}
    sizes = _sizes(scene, fault, misfit) if len(calls) == 1 and misfit.seq == seq else None
    return _report(scene, "mismatch", fault, sequence=seq, sizes=sizes)


def _sizes(scene: Scene, fault: _Fault, misfit: _Misfit) -> SizeFault:
    if not misfit.wanted and not misfit.got:
        return SizeFault(fault.about, fault.by, None, None)
    item = ITEMSIZES[misfit.wanted_form]
    block, origin, destination = _passed_on(scene, fault, misfit)
    return SizeFault(
        fault.about,
        fault.by,
        misfit.got // item,
        misfit.wanted // item,
        misfit.more,
        block,
        origin,
        destination,
    )


def _passed_on(scene: Scene, fault: _Fault, misfit: _Misfit) -> tuple[int | None, int | None, int | None]:
    """Whose block did not fit, where one of the two ranks only passes it on and has no say in its size; and
    where it came from or was going to.

    The number of a chunk is the rank whose block it is. Only where a scatter ends it is 0.
    """
    call = scene.engine.remembered(fault.by, misfit.seq)
    if call is None:
        return None, None, None
    kind, _, _, root, _, _ = call
    plan = kind_of(KINDS[kind]).plan if kind < len(KINDS) else ""
    if plan == "all_gather" and misfit.tag != fault.about:
        return misfit.tag, None, None
    if plan == "gather" and (fault.about, fault.by) != (misfit.tag, root):
        return misfit.tag, None, root
    if plan == "scatter" and (misfit.scratch or fault.about != root):
        return misfit.tag if misfit.scratch else fault.by, root, None
    return None, None, None


def _listen(scene: Scene, ranks: Iterable[int]) -> None:
    """Wait until these ranks have said where they are: each is in its call, and finds out as we did."""
    end = time.monotonic() + REMARK_PATIENCE_S
    for rank in ranks:
        while scene.engine.remark_of(rank) is None and time.monotonic() < end:
            time.sleep(0.001)


def _message_mismatch(scene: Scene, fault: _Fault) -> FaultReport:
    if scene.rank == fault.by:
        operation = scene.operation.partition("(")[0]
        receiving = operation in ("recv", "irecv", "sendrecv", "batch", "recv_object")
        scene.engine.remark(0, f"{operation} at {scene.called_at or site()}" if receiving else "")
    _listen(scene, (fault.by,))
    remark = scene.engine.remark_of(fault.by)
    misfit = _Misfit(*scene.engine.misfit())
    message = MessageFault(
        fault.about,
        fault.by,
        misfit.tag,
        message_text(misfit.got_form, misfit.got),
        message_text(misfit.wanted_form, misfit.wanted),
        misfit.got_form >> KIND_SHIFT != misfit.wanted_form >> KIND_SHIFT,
        remark[1] if remark is not None and remark[0] == 0 else "",
    )
    return _report(scene, "mismatch", fault, message=message)


def _first_difference(scene: Scene, found_at: int) -> int:
    """Where ranks first differed: one that could finish alone may have gone on before it was found."""
    for seq in range(max(1, found_at - _native.HISTORY + 2), found_at):
        known = {scene.engine.remembered(rank, seq) for rank in range(scene.size)} - {None}
        if len(known) > 1:
            return seq
    return found_at
