"""Makes the text and the exception of a `FaultReport`, from the report alone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from unisono.engine.diagnosis.call_text import FUNCTION, OWN, odd_ones
from unisono.engine.diagnosis.report import FaultReport, RankSnapshot, SizeFault
from unisono.errors import Aborted, Evicted, GroupError, Mismatch, PeerLost, Timeout, message

MOST_MEMBERS = 8
"""The most runs of ranks that a text lists."""


def error(report: FaultReport) -> GroupError:
    """The exception for a fault; it carries the report."""
    headline = text(report)
    if report.kind in ("peer_lost", "peer_left", "host_silent", "stopped", "replaced"):
        assert report.rank is not None
        return PeerLost(
            headline,
            rank=report.rank,
            pid=report.pid,
            signal=report.signal,
            exit_code=report.exit_code,
            host=report.host,
            report=report,
        )
    if report.kind == "evicted":
        return Evicted(headline, why=report.cause, report=report)
    kinds: dict[str, type[GroupError]] = {
        "mismatch": Mismatch,
        "timeout": Timeout,
        "late": Timeout,
        "nothing_came": Timeout,
    }
    return kinds.get(report.kind, Aborted)(headline, report=report)


def text(report: FaultReport, *, for_all: bool = False) -> str:
    """A report as text.

    Args:
        for_all: the text is for all ranks that reported the same; it does not name the reporter.
    """
    if report.failed:
        earlier = msgspec.structs.replace(
            report, operation=report.failed, timeout_s=report.failed_timeout_s, failed=""
        )
        return f"{_doing(report)} failed: this group failed before: {text(earlier, for_all=for_all)}"
    return _WRITERS[report.kind](report, _where(report, for_all))


def signal_name(number: int) -> str:
    """Return "SIGSEGV" for 11; real-time signals have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _where(report: FaultReport, for_all: bool) -> str:
    rank = f"size={report.size}" if for_all else f"rank={report.reporter}/{report.size}"
    job = f" ranks of the job: {listed(report.members, MOST_MEMBERS)}" if report.members else ""
    return f"group={report.group} seq={report.status.started} {rank}{job}"


def listed(numbers: Sequence[int], most: int | None = None) -> str:
    """A short list, in this order: "2, 3", "0-7, 9"; after `most` entries "..."."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    names = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(names[:most]) + (", ..." if most is not None and len(names) > most else "")


def _in_job(report: FaultReport, ranks: Sequence[int]) -> str:
    """The numbers of ranks in the job, where they differ: "rank 3 of the job"; otherwise ""."""
    numbers = [report.members[rank] for rank in ranks] if report.members else list(ranks)
    if numbers == list(ranks):
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, numbers))} of the job"


def _name(report: FaultReport, *ranks: int) -> str:
    """Ranks by their numbers in the group and in the job: "rank 1 (rank 3 of the job)"."""
    job = _in_job(report, ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}{job and f' ({job})'}"


def _output(report: FaultReport, rank: int) -> str:
    """What to look at. The launcher writes the number in the job before each line."""
    job = _in_job(report, [rank])
    return f"the output of {job}" if job else f"rank {rank}'s output"


def _doing(report: FaultReport) -> str:
    return report.operation or "an operation"


def _process(report: FaultReport, rank: int) -> str:
    """The process of a rank: its number in the job, its pid, and its host if there are several."""
    state = report.ranks[rank]
    host = [f"host {state.host}"] if len({each.host for each in report.ranks}) > 1 else []
    return ", ".join(filter(None, [_in_job(report, [rank]), *host, f"pid {state.pid}"]))


def _because(cause: str) -> str:
    return f" because of {cause}" if cause else ""


def _closed(report: FaultReport, where: str) -> str:
    return message(f"{_doing(report)} failed: this rank closed the group during the call", where=where)


def _evicted(report: FaultReport, where: str) -> str:
    why = f": {report.cause}" if report.cause else ""
    return message(
        f"{_doing(report)} failed: {_name(report, report.reporter)} was evicted{why}",
        where=where,
        remedy="The other ranks go on without it. Join their group again (unisono.join), or end this rank.",
    )


def _interrupted(report: FaultReport, where: str) -> str:
    cause = _because(report.cause)
    by = f"{cause}, which a signal handler raised" if cause else " (Ctrl-C)"
    return message(
        f"{_doing(report)} failed: {_name(report, report.found_by)} was interrupted{by}", where=where
    )


def _no_memory(report: FaultReport, where: str) -> str:
    headline = f"{_doing(report)} failed: {_name(report, report.found_by)} ran out of memory"
    return message(headline, where=where, observed=report.detail)


def _aborted(report: FaultReport, where: str) -> str:
    headline = (
        f"{_doing(report)} failed: {_name(report, report.found_by)} aborted the group{_because(report.cause)}"
    )
    known = report.cause or report.found_by == report.reporter
    return message(
        headline, where=where, remedy="" if known else f"Look at {_output(report, report.found_by)}."
    )


def _bad_frame(report: FaultReport, where: str) -> str:
    sender = report.rank
    assert sender is not None
    found = (
        f"rank {sender} ({_process(report, sender)}) sent {_name(report, report.found_by)} bytes "
        "that are no frame"
    )
    return message(
        f"{_doing(report)} failed: {found} of Unisono: {report.detail}",
        where=where,
        remedy=f"See whether all ranks run the same build, and what else writes to {_name(report, sender)}'s "
        "connections.",
    )


def _memory(report: FaultReport, where: str) -> str:
    rank = report.rank
    assert rank is not None
    owner = f"rank {rank} ({_process(report, rank)})"
    if report.kind == "no_access":
        headline = f"the system refuses {_name(report, report.found_by)} to copy from the memory of {owner}"
        remedy = "See what has changed since the group was made (a sandbox); UNISONO_ZERO_COPY=0 avoids it."
    else:
        used = "read" if report.kind == "unreadable" else "written"
        headline = f"the buffer of {owner} cannot be {used}"
        remedy = "It may be a mapped file that was cut, or whose disk is full."
    return message(f"{_doing(report)} failed: {headline}", where=where, remedy=remedy)


def _peer(report: FaultReport, where: str) -> str:
    rank = report.rank
    assert rank is not None
    how, remedy = "died", f"Look at {_output(report, rank)}."
    if report.kind == "peer_left":
        how = f"has closed the group{_because(report.cause)}"
        if not report.cause:
            who = _name(report, rank).capitalize()
            remedy = f"{who} must make the same calls before it closes the group or ends."
    elif report.kind == "stopped":
        how, remedy = "is stopped", "See what has stopped it (SIGSTOP, a debugger)."
    elif report.kind == "replaced":
        how, remedy = "runs another program", "Close the group before exec, or start a process instead."
    elif report.kind == "host_silent":
        how = "is lost: its host no longer answers"
        remedy = "Look at that host, and at the network to it; UNISONO_PEER_TIMEOUT_S bounds such a silence."
    elif report.signal is not None:
        how = f"was ended by {signal_name(report.signal)}"
    elif report.exit_code is not None:
        how = f"ended with exit code {report.exit_code}"
    elif report.relayed:
        how = "is lost: its connection over TLS has ended"
        remedy += (
            " If it still ran, a process that encrypts connections has ended, beside "
            f"{_name(report, rank)} or {_name(report, report.found_by)}: unisono.engine.bootstrap.tls_relay."
        )
    seen = report.ranks[rank].last_seen
    return message(
        f"{_doing(report)} failed: rank {rank} ({_process(report, rank)}) {how}; it was last seen {seen}",
        where=where,
        remedy=remedy,
    )


def _timeout(report: FaultReport, where: str) -> str:
    if report.sequence == 0:
        return (_window_timeout if report.detail else _message_timeout)(report, where)
    rank = report.rank
    assert rank is not None
    who = (
        f"{_name(report, *report.missing)} never arrived" if report.missing else f"rank {rank} did not answer"
    )
    found_here = report.found_by == report.reporter
    limit = f" after {_duration(report.timeout_s)}" if report.timeout_s else ""
    after = limit if found_here else f" on {_name(report, report.found_by)}"
    seen = report.ranks[rank].last_seen
    who += f" ({_process(report, rank)}, last seen {seen}){_places(report)}"
    if report.reporter in report.missing:
        waiting = f"{_name(report, report.found_by)} gave up {report.ranks[report.found_by].last_seen}"
        return message(
            f"{_doing(report)} failed: {waiting}: {who}",
            where=where,
            remedy="All ranks must make the same calls in the same order. A rank that is only late needs a "
            "longer timeout.",
        )
    return message(
        f"{_doing(report)} timed out{after}: {who}",
        where=where,
        remedy=f"Give it a longer timeout or look at {_output(report, rank)}.",
    )


def _places(report: FaultReport) -> str:
    """Where the late ranks are, as far as it is known: "; it was at train.py:42 in load"."""
    assert report.rank is not None
    late = report.missing or (report.rank,)
    at: dict[str, list[int]] = {}
    for rank in late:
        at.setdefault(report.ranks[rank].place, []).append(rank)
    at.pop("", None)
    if len(late) == 1:
        return "".join(f"; it was at {place}" for place in at)
    each = [f"rank{'s' if len(some) > 1 else ''} {listed(some)} at {place}" for place, some in at.items()]
    return f"; {', '.join(each)}" if each else ""


def _duration(seconds: float) -> str:
    """0.001 -> "1 ms"; 2.0 -> "2.0 s"."""
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds * 1000:.3g} ms"


def _message_timeout(report: FaultReport, where: str) -> str:
    what = f"{_doing(report)} failed: a send or receive of {_name(report, report.found_by)} timed out"
    if report.found_by == report.reporter:
        what = f"{_doing(report)} timed out after {_duration(report.timeout_s)}"
    who = "no rank sent"
    if report.rank is not None:
        seen = report.ranks[report.rank].last_seen
        who = f"rank {report.rank} did not answer ({_process(report, report.rank)}, last seen {seen})"
        who += _places(report)
    if report.rank == report.found_by:
        who = f"{_name(report, report.found_by)} has not sent itself such a message"
    remedy = "Compare the tags, give it a longer timeout, or look at the other rank's output."
    return message(f"{what}: {who}", where=where, observed=_unexpected(report), remedy=remedy)


def _window_timeout(report: FaultReport, where: str) -> str:
    rank = report.rank
    assert rank is not None
    what = f"{_doing(report)} failed: a call of {_name(report, report.found_by)} for a window timed out"
    if report.found_by == report.reporter:
        what = f"{_doing(report)} timed out after {_duration(report.timeout_s)}"
    seen = report.ranks[rank].last_seen
    return message(
        f"{what}: rank {rank} {report.detail} ({_process(report, rank)}, last seen {seen}){_places(report)}",
        where=where,
        remedy=f"Give it a longer timeout or look at {_output(report, rank)}.",
    )


def _late(report: FaultReport, where: str) -> str:
    who = _unexpected(report)
    if report.missing:
        seen = report.ranks[report.missing[0]].last_seen
        have = "has" if len(report.missing) == 1 else "have"
        who = f"{_name(report, *report.missing)} {have} not arrived, last seen {seen}"
    what = f"{report.operation} is not done after {report.timeout_s:.3f} s; it continues"
    return message(what, where=where, observed=who)


def _empty_probe(report: FaultReport, where: str) -> str:
    what = f"{report.operation}: no such message arrived within {report.timeout_s:.3f} s; the group continues"
    return message(what, where=where, observed=_unexpected(report))


def _unexpected(report: FaultReport) -> str:
    if not report.unexpected:
        return ""
    each = [
        f"from {_name(report, one.source)} with tag {one.tag}, {one.content} ({one.nbytes} bytes)"
        for one in report.unexpected
    ]
    more = f"; and {report.more_unexpected} more" if report.more_unexpected else ""
    return f"unexpected messages: {'; '.join(each)}{more}"


def _mismatch(report: FaultReport, where: str) -> str:
    if report.message is not None:
        return _message_mismatch(report, where)
    calls = [state.call for state in report.ranks]
    uneven = _uneven(report, report.sizes) if report.sizes is not None else ""
    what = "sizes do not fit" if uneven else "ranks called different things"
    odd = uneven or odd_ones(calls, partial(_name, report))
    lines = [f"{what}{odd and f': {odd}'} [{where}]"]
    lines += [_row(report, state) for state in report.ranks]
    own = any(call is not None and f"algorithm={OWN}" in call.arguments for call in calls)
    if not uneven and len(set(calls) - {None}) == 1 and (own or None not in calls):
        lines.append(_hidden_difference(report, own))
    rule = "A rank must send as many elements as the receiver expects."
    lines.append(rule if uneven else "Every rank of a group must make the same calls in the same order.")
    if report.several_threads:
        lines.append(
            "Several threads of a rank have called this group: give their calls one order on all ranks, or "
            "each thread a group."
        )
    return "\n".join(lines)


def _hidden_difference(report: FaultReport, own: bool) -> str:
    """In what calls of equal texts differ."""
    call = next(state.call for state in report.ranks if state.call is not None)
    if FUNCTION in call.arguments or call.name in ("reduce_object", "all_reduce_object", "scan_object"):
        return "Their operations differ."
    if own:
        return "The plans of their algorithms differ."
    return "Their lists of buffers differ in order, sizes or dtypes."


def _row(report: FaultReport, state: RankSnapshot) -> str:
    """A rank's line in the table of a mismatch."""
    return (
        f"  {_name(report, state.rank)}  #{report.sequence} {state.call or _unknown_call(report, state)}"
        f"{_place(state)}"
    )


def _uneven(report: FaultReport, sizes: SizeFault) -> str:
    """The sizes that do not fit: "rank 0 sent 5 elements to rank 1, which expected 4"."""
    sender, receiver = _name(report, sizes.sender), _name(report, sizes.receiver)
    if sizes.sent is None or sizes.expected is None:
        return f"{sender} sent more elements to {receiver} than that expected"
    count = f"{sizes.sent}{' or more' if sizes.at_least else ''} elements{_block(report, sizes)}"
    return f"{sender} sent {count} to {receiver}, which expected {sizes.expected}"


def _block(report: FaultReport, sizes: SizeFault) -> str:
    if sizes.block is None:
        return ""
    way = f", on its way to {_name(report, sizes.destination)}" if sizes.destination is not None else ""
    way = f", on its way from {_name(report, sizes.origin)}" if sizes.origin is not None else way
    return f" (the block of {_name(report, sizes.block)}{way})"


def _unknown_call(report: FaultReport, state: RankSnapshot) -> str:
    """Where a rank is whose call is not known: not made yet, made too late, or no longer remembered."""
    if state.started < report.sequence and state.place and not state.place_is_later:
        return "called when the group had already failed"
    where = "not there yet" if state.started < report.sequence else "already further"
    return f"{where}; last seen {state.last_seen}"


def _place(state: RankSnapshot) -> str:
    """The source line of a rank's call, or where it was when it received the report."""
    if state.cause:
        return f"  (left{_because(state.cause)})"
    if not state.place:
        return ""
    return f"  (by now at {state.place})" if state.place_is_later else f"  at {state.place}"


def _falls_short(sent: str, expected: str) -> bool:
    """Whether a message of the expected dtype is smaller. Example: float32[4], float32[8] -> True."""
    (dtype, _, numel), (wanted, _, room) = sent.partition("["), expected.partition("[")
    numbers = numel.rstrip("]"), room.rstrip("]")
    return dtype == wanted and all(map(str.isdigit, numbers)) and int(numbers[0]) < int(numbers[1])


def _message_mismatch(report: FaultReport, where: str) -> str:
    found = report.message
    assert found is not None
    difference = "was of another kind" if found.other_kind else "had another size or dtype"
    remedy = "Send an array that has the dtype of the receiving array and fits into it."
    if " bytes of " in found.sent + found.expected and not found.other_kind:
        remedy = "Send and receive as many values with the same codec."
    elif _falls_short(found.sent, found.expected):  # a receive that must be filled, as PyTorch's
        remedy = "Receive into an array of the size that is sent."
    return message(
        f"a message from {_name(report, found.sender)} with tag {found.tag} {difference} than "
        f"{_name(report, found.receiver)} expected{f' in {found.place}' if found.place else ''}",
        where=where,
        observed=found.sent,
        expected=found.expected,
        remedy="Only recv_object takes what send_object sends." if found.other_kind else remedy,
    )


_WRITERS: dict[str, Callable[[FaultReport, str], str]] = {
    "aborted": _aborted,
    "bad_frame": _bad_frame,
    "closed": _closed,
    "evicted": _evicted,
    "host_silent": _peer,
    "interrupted": _interrupted,
    "late": _late,
    "mismatch": _mismatch,
    "no_memory": _no_memory,
    "no_access": _memory,
    "nothing_came": _empty_probe,
    "peer_left": _peer,
    "peer_lost": _peer,
    "replaced": _peer,
    "stopped": _peer,
    "timeout": _timeout,
    "unreadable": _memory,
    "unwritable": _memory,
}
