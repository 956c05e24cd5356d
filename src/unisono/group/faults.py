"""From the engine's numbers to an error that names the rank, the operation and the remedy."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from unisono import _native
from unisono._native import FaultKind
from unisono.buffers import DTYPES, ITEMSIZES
from unisono.errors import Aborted, GroupError, Mismatch, PeerLost, Timeout, message
from unisono.group.differences import COLLECTIVES, Called, called, odd_ones
from unisono.group.site import site

__all__ = ["Scene", "explain", "last_seen", "late", "tell_cause"]

REMARK_PATIENCE_S = 0.5
"""How long a rank that explains a mismatch waits for the others to say where they are."""

LEAVING = 2**64 - 1
"""The number of a remark of why its rank leaves. That of another one is the operation's it speaks of."""

MOST_MESSAGES = 4
"""So many of the messages that nobody asked for are listed."""


class _Fault(NamedTuple):
    kind: int
    by: int
    about: int
    signal: int
    exit_code: int
    seq: int


class _Sizes(NamedTuple):
    """A message of another size than was wanted. tag: of a collective, the number of the chunk.

    seq: the collective, 0 for one between two ranks.  more: may have followed.  scratch: the chunk is one.
    """

    tag: int
    wanted_dtype: int
    got_dtype: int
    wanted: int
    got: int
    seq: int
    more: bool
    scratch: bool


class Scene(NamedTuple):
    """Where an error happened, for its text.

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

    def where(self) -> str:
        """The place of an error: group, operation number, rank."""
        seq = self.engine.standing(self.rank)[1]
        return f"group={self.group} seq={seq} rank={self.rank}/{self.size}"

    def process(self, rank: int) -> str:
        """Which process a rank is: its id, and where there are several hosts, its host."""
        pid = f"pid {self.engine.standing(rank)[0]}"
        return f"host {self.hosts[rank]}, {pid}" if len(set(self.hosts)) > 1 else pid


def explain(scene: Scene) -> GroupError:
    """The error for the fault that aborted the group."""
    scene.engine.refresh()
    fault = _Fault(*scene.engine.fault())
    doing = scene.operation or "an operation"
    own_end = fault.kind == FaultKind.PEER_LEFT and fault.about == scene.rank
    if own_end or fault.kind == FaultKind.NONE:
        return Aborted(message(f"{doing} failed: this rank closed the group meanwhile", where=scene.where()))
    if fault.kind in (FaultKind.PEER_LOST, FaultKind.PEER_LEFT):
        return _peer_lost(scene, fault, doing)
    if fault.kind == FaultKind.MISMATCH:
        return Mismatch(_mismatch(scene, fault))
    if fault.kind == FaultKind.TIMEOUT:
        return Timeout(_timeout(scene, fault, doing))
    if fault.kind == FaultKind.INTERRUPTED:
        return Aborted(
            message(f"{doing} failed: rank {fault.by} was interrupted (Ctrl-C)", where=scene.where())
        )
    if fault.kind == FaultKind.NO_MEMORY:
        return Aborted(message(f"{doing} failed: rank {fault.by} ran out of memory", where=scene.where()))
    return Aborted(
        message(
            f"{doing} failed: rank {fault.by} aborted the group{_cause(scene, fault.by)}",
            where=scene.where(),
            remedy="Its own error tells why.",
        )
    )


def tell_cause(engine: _native.Engine, cause: str) -> None:
    """Tell the others of the exception that makes this rank leave, unless they have a fault to explain."""
    if not engine.fault()[0]:
        engine.remark(LEAVING, cause)


def _cause(scene: Scene, rank: int) -> str:
    remark = scene.engine.remark_of(rank)
    return f" because of {remark[1]}" if remark is not None and remark[0] == LEAVING else ""


def late(scene: Scene, waited_s: float) -> str:
    """What to say of work that is not done yet, and goes on: who has not come."""
    scene.engine.refresh()
    seq = scene.engine.standing(scene.rank)[1]
    absent = [rank for rank in range(scene.size) if scene.engine.standing(rank)[1] < seq]
    who = "" if scene.operation in COLLECTIVES else _unexpected(scene)
    if absent and scene.operation in COLLECTIVES:
        who = f"rank {', '.join(map(str, absent))} has not arrived, last seen {last_seen(scene, absent[0])}"
    return message(
        f"{scene.operation} is not done after {waited_s:.3f} s; it goes on", where=scene.where(), observed=who
    )


def _peer_lost(scene: Scene, fault: _Fault, doing: str) -> PeerLost:
    pid = scene.engine.standing(fault.about)[0]
    how, remedy = "died", f"Look at rank {fault.about}'s output."
    if fault.kind == FaultKind.PEER_LEFT:
        cause = _cause(scene, fault.about)
        how = f"has closed the group{cause}"
        if not cause:
            remedy = f"Rank {fault.about} must make the same calls before it closes the group or ends."
    elif fault.signal:
        how = f"was ended by {_signal_name(fault.signal)}"
    elif fault.exit_code >= 0:
        how = f"ended with exit code {fault.exit_code}"
    seen = last_seen(scene, fault.about)
    text = message(
        f"{doing} failed: rank {fault.about} ({scene.process(fault.about)}) {how}; it was last seen {seen}",
        where=scene.where(),
        remedy=remedy,
    )
    return PeerLost(
        text,
        rank=fault.about,
        pid=pid,
        signal=fault.signal or None,
        exit_code=fault.exit_code if fault.exit_code >= 0 else None,
    )


def _signal_name(number: int) -> str:
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _timeout(scene: Scene, fault: _Fault, doing: str) -> str:
    if fault.seq == 0:  # a message between two ranks
        return _message_timeout(scene, fault, doing)
    absent = [rank for rank in range(scene.size) if scene.engine.standing(rank)[1] < fault.seq]
    if absent:
        blamed = absent[0]
        who = f"rank {', '.join(map(str, absent))} never arrived"
    else:
        blamed = fault.about if fault.about >= 0 else fault.by
        who = f"rank {blamed} did not answer"
    after = f" after {scene.timeout_s:.1f} s" if fault.by == scene.rank else f" on rank {fault.by}"
    return message(
        f"{doing} timed out{after}: {who} ({scene.process(blamed)}, last seen {last_seen(scene, blamed)})",
        where=scene.where(),
        remedy=f"Give it a longer timeout or look at rank {blamed}'s output.",
    )


def _message_timeout(scene: Scene, fault: _Fault, doing: str) -> str:
    if fault.by == scene.rank:
        what = f"{doing} timed out after {scene.timeout_s:.1f} s"
    else:
        what = f"{doing} failed: a send or receive of rank {fault.by} timed out"
    who = "nobody sent"
    if fault.about >= 0:
        seen = last_seen(scene, fault.about)
        who = f"rank {fault.about} did not answer ({scene.process(fault.about)}, last seen {seen})"
    if fault.about == fault.by:
        who = f"rank {fault.by} has sent itself no such message"
    remedy = "Compare the tags, give it a longer timeout, or look at the other rank's output."
    came = _unexpected(scene) if fault.by == scene.rank else ""
    return message(f"{what}: {who}", where=scene.where(), observed=came, remedy=remedy)


def _unexpected(scene: Scene) -> str:
    """Messages that have come here and wait: with other tags, or from others, than was asked for."""
    found = [] if scene.operation.partition("(")[0] in ("send", "isend") else scene.engine.unexpected()
    if not found:
        return ""
    each = [
        f"from rank {source} with tag {tag}, {_array_text(dtype, nbytes)} ({nbytes} bytes)"
        for source, tag, dtype, nbytes in found[:MOST_MESSAGES]
    ]
    more = f"; and {len(found) - MOST_MESSAGES} more" if len(found) > MOST_MESSAGES else ""
    return f"messages that have come and nobody here has asked for: {'; '.join(each)}{more}"


def last_seen(scene: Scene, rank: int) -> str:
    """Where a rank was: "in barrier #40", "after barrier #40", "before any operation"."""
    _, started, finished, _ = scene.engine.standing(rank)
    if started == 0:
        return "before any operation"
    call = scene.engine.remembered(rank, started)
    name = COLLECTIVES[call[0]] if call is not None else "operation"
    return f"{'after' if finished >= started else 'in'} {name} #{started}"


def _mismatch(scene: Scene, fault: _Fault) -> str:
    if fault.seq == 0:
        return _message_mismatch(scene, fault)
    _, started, finished, _ = scene.engine.standing(scene.rank)
    mine = started if started > finished else started + 1  # a call of a group aborted before was not begun
    scene.engine.remark(mine, scene.called_at or site())
    sizes = _Sizes(*scene.engine.misfit())
    seq = _first_difference(scene, sizes.seq or fault.seq)
    there = [rank for rank in range(scene.size) if scene.engine.remembered(rank, seq) is not None]
    _listen(scene, there)
    calls = [_call_of(scene, rank, seq) for rank in range(scene.size)]
    alike = len(set(calls) - {None}) == 1
    uneven = _uneven(scene, fault, sizes) if alike and sizes.seq == seq else ""
    only_sizes = bool(uneven) or (alike and None not in calls)
    what = "sizes do not fit" if only_sizes else "ranks called different things"
    odd = uneven or odd_ones(calls)
    lines = [f"{what}{odd and f': {odd}'} [{scene.where()}]"]
    for rank, call in enumerate(calls):
        lines.append(f"  rank {rank}  #{seq} {call or _away(scene, rank, seq)}{_place(scene, rank, seq)}")
    if only_sizes and not uneven:
        lines.append("The buffers that travel together in it differ in their sizes.")
    rule = "What a rank sends another one, and what that one expects, must be of one size."
    lines.append(rule if uneven else "Every rank of a group must make the same calls in the same order.")
    return "\n".join(lines)


def _uneven(scene: Scene, fault: _Fault, sizes: _Sizes) -> str:
    """Whose sizes do not fit whose: "rank 0 sent 5 elements to rank 1, which expected 4"."""
    if not sizes.wanted and not sizes.got:
        return f"rank {fault.about} sent more elements to rank {fault.by} than that expected"
    item = ITEMSIZES[sizes.wanted_dtype]
    count = f"{sizes.got // item}{' or more' if sizes.more else ''}"
    return (
        f"rank {fault.about} sent {count} elements{_passed_on(scene, fault, sizes)} to rank {fault.by}, "
        f"which expected {sizes.wanted // item}"
    )


def _passed_on(scene: Scene, fault: _Fault, sizes: _Sizes) -> str:
    """Whose block did not fit, where one of the two ranks only passes it on and has no say in its size.

    The number of a chunk is the rank whose block it is. Only where a scatter ends it is 0.
    """
    call = scene.engine.remembered(fault.by, sizes.seq)
    if call is None:
        return ""
    kind, _, _, root, _, _ = call
    block = f"the block of rank {sizes.tag}"
    if COLLECTIVES[kind] == "all_gather" and sizes.tag != fault.about:
        return f" ({block})"
    if COLLECTIVES[kind] == "gather" and (fault.about, fault.by) != (sizes.tag, root):
        return f" ({block}, on its way to rank {root})"
    if COLLECTIVES[kind] == "scatter" and (sizes.scratch or fault.about != root):
        block = block if sizes.scratch else f"the block of rank {fault.by}"
        return f" ({block}, on its way from rank {root})"
    return ""


def _listen(scene: Scene, ranks: Iterable[int]) -> None:
    """Wait until these ranks have said where they are: each is in its call, and finds out as we did."""
    end = time.monotonic() + REMARK_PATIENCE_S
    for rank in ranks:
        while scene.engine.remark_of(rank) is None and time.monotonic() < end:
            time.sleep(0.001)


def _place(scene: Scene, rank: int, seq: int) -> str:
    """Where in its source a rank made the call, or where it had come to when it found out."""
    remark = scene.engine.remark_of(rank)
    if remark is None or not remark[1]:
        return ""
    if remark[0] == LEAVING:
        return f"  (left{_cause(scene, rank)})"
    return f"  at {remark[1]}" if remark[0] == seq else f"  (by now at {remark[1]})"


def _message_mismatch(scene: Scene, fault: _Fault) -> str:
    if scene.rank == fault.by:
        operation = scene.operation.partition("(")[0]
        receiving = operation in ("recv", "irecv", "sendrecv", "batch")
        scene.engine.remark(0, f"{operation} at {scene.called_at or site()}" if receiving else "")
    _listen(scene, (fault.by,))
    remark = scene.engine.remark_of(fault.by)
    place = f" in {remark[1]}" if remark is not None and remark[0] == 0 and remark[1] else ""
    sizes = _Sizes(*scene.engine.misfit())
    return message(
        f"a message from rank {fault.about} with tag {sizes.tag} had another size or dtype than "
        f"rank {fault.by} expected{place}",
        where=scene.where(),
        observed=_array_text(sizes.got_dtype, sizes.got),
        expected=_array_text(sizes.wanted_dtype, sizes.wanted),
        remedy="Send and receive arrays of one size and dtype.",
    )


def _array_text(dtype: int, nbytes: int) -> str:
    return f"{DTYPES[dtype]}[{nbytes // ITEMSIZES[dtype]}]"


def _first_difference(scene: Scene, found_at: int) -> int:
    """Where ranks first differed: one that could finish alone may have gone on before it was found."""
    for seq in range(max(1, found_at - _native.HISTORY + 2), found_at):
        known = {scene.engine.remembered(rank, seq) for rank in range(scene.size)} - {None}
        if len(known) > 1:
            return seq
    return found_at


def _call_of(scene: Scene, rank: int, seq: int) -> Called | None:
    call = scene.engine.remembered(rank, seq)
    return None if call is None else called(call)


def _away(scene: Scene, rank: int, seq: int) -> str:
    """Where a rank is that has not made this call, or has forgotten it."""
    where = "not there yet" if scene.engine.standing(rank)[1] < seq else "already further"
    return f"{where}; last seen {last_seen(scene, rank)}"
