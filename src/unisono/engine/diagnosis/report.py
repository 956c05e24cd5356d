"""`FaultReport`: one immutable record of a fault. It makes no text.

Errors carry it (`error.report`), `render` turns it into text, and the launcher receives it as JSON.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import msgspec

FaultKind = Literal[
    "aborted",
    "bad_frame",
    "closed",
    "evicted",
    "host_silent",
    "interrupted",
    "late",
    "mismatch",
    "no_memory",
    "no_access",
    "nothing_came",
    "peer_left",
    "peer_lost",
    "replaced",
    "stopped",
    "timeout",
    "unreadable",
    "unwritable",
]
_KINDS = get_args(FaultKind)

ENDED_CALLS: tuple[FaultKind, ...] = (
    "timeout", "mismatch", "no_memory", "bad_frame", "unreadable", "unwritable", "no_access",
)  # fmt: skip
"""Faults of one call; those of later calls name it. The others are of a rank, and any call may find them."""


class FirstFailure:
    """The first failed operation of a rank in a group, for the texts of later ones; "": none has failed."""

    operation = ""
    timeout_s = 0.0


class CallDescription(NamedTuple):
    """A call in the form for error texts: "all_reduce", ("float64[4]", "SUM", "algorithm=ring")."""

    name: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)})"


class RankSnapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a rank was when the fault was read.

    Attributes:
        started, finished: numbers of its last collective begun and ended, 0: none.
        last_seen: the same as text: "in barrier #40".
        call: its call with the report's sequence number; None: not made, or not remembered.
        place: file and line of that call; "train.py:42 in load": where a late rank was; "" if unknown.
        place_is_later: `place` is where the rank was later, when it got the report or others gave up.
        cause: the exception that made it leave, "ValueError: bad loss".
    """

    rank: int
    host: str
    pid: int
    started: int
    finished: int
    last_seen: str
    call: CallDescription | None = None
    place: str = ""
    place_is_later: bool = False
    cause: str = ""


class SizeFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a collective of another size than its receiver expected, in elements.

    Attributes:
        sent, expected: both None if it is only known that there were too many.
        at_least: there may have been more than `sent`.
        block: the rank whose block it was, if `sender` or `receiver` only forwards it.
        origin, destination: the rank that made that block, or its final receiver, if known.
    """

    sender: int
    receiver: int
    sent: int | None
    expected: int | None
    at_least: bool = False
    block: int | None = None
    origin: int | None = None
    destination: int | None = None


class MessageFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message between two ranks that differs from what its receiver expected.

    Attributes:
        sent, expected: "float32[3]", "an object".
        other_kind: one is an object, the other an array.
        place: the receiver's call: "recv at train.py:41".
    """

    sender: int
    receiver: int
    tag: int
    sent: str
    expected: str
    other_kind: bool = False
    place: str = ""


class UnexpectedMessage(msgspec.Struct, frozen=True):
    """An unexpected message: it has arrived, and no receive matches it."""

    source: int
    tag: int
    content: str
    nbytes: int


class FaultReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fault, on the rank that reports it.

    Attributes:
        kind: what happened; see `FaultKind`.
        group, size: the group and its number of ranks.
        members: the number of every rank in the job; (): the same as in the group.
        failed, failed_timeout_s: the earlier call that the group failed in, and its limit if known; "": none.
        reporter: the rank that reports.  found_by: the rank that found the fault.
        operation: what the reporter was doing.
        timeout_s: the limit of that operation, its `timeout=`. For kind "late", whose operation continues:
            how long the reporter has waited for it. 0: the reporter was in no operation.
        sequence: the number of the collective concerned; 0: a message between two ranks, or none.
        rank, host, pid: the process that died, left, did not arrive or does not answer, or whose memory
            cannot be used; None, "", 0: none.
        signal, exit_code: how that process ended; None: unknown.
        relayed: its connection went through relays for TLS; the end of one of them looks like its own.
        missing: ranks that had not begun the collective.
        cause: the exception that made a rank leave or abort.
        detail: what was wrong with a frame, which limit was reached, or what a window waited for.
        ranks: the status of every rank, in order.
        several_threads: more than one thread of the reporter has called the group.
        sizes, message: for sizes that do not fit.
        unexpected: the first unexpected messages; more_unexpected: how many more.

    Raises:
        ValueError: a number is none of a rank of this group, or the kind is unknown.
    """

    kind: FaultKind
    group: str
    size: int
    reporter: int
    found_by: int
    operation: str
    timeout_s: float = 0.0
    sequence: int = 0
    rank: int | None = None
    host: str = ""
    pid: int = 0
    signal: int | None = None
    exit_code: int | None = None
    relayed: bool = False
    missing: tuple[int, ...] = ()
    cause: str = ""
    detail: str = ""
    ranks: tuple[RankSnapshot, ...] = ()
    several_threads: bool = False
    sizes: SizeFault | None = None
    message: MessageFault | None = None
    unexpected: tuple[UnexpectedMessage, ...] = ()
    more_unexpected: int = 0
    members: tuple[int, ...] = ()
    failed: str = ""
    failed_timeout_s: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"a fault of unknown kind {self.kind!r}")
        named = [self.reporter, self.found_by, *self.missing, *([] if self.rank is None else [self.rank])]
        for part in (self.sizes, self.message):
            named += [part.sender, part.receiver] if part is not None else []
        wrong = [rank for rank in named if not 0 <= rank < self.size]
        if wrong:
            raise ValueError(f"a fault report names rank {wrong[0]} in a group of {self.size} ranks")
        if [state.rank for state in self.ranks] not in ([], list(range(self.size))):
            raise ValueError(f"a fault report lists {len(self.ranks)} ranks of {self.size}")
        if len(self.members) not in (0, self.size):
            raise ValueError(f"a fault report numbers {len(self.members)} ranks of {self.size}")

    @property
    def status(self) -> RankSnapshot:
        """The status of the reporter."""
        return self.ranks[self.reporter]


class UncaughtError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error that ended a rank, as the rank sends it to its launcher.

    Attributes:
        at: when it reached the top of the program uncaught, seconds since the epoch.
        type: "unisono.errors.Mismatch".  message: the last lines of its traceback, type first.
        frames, all_frames: the lines before, without and with Unisono's own frames.
        lost: a consequence: another rank has ended or aborted.
        printed: the rank itself has printed it, too.
        missing: the ranks that did not arrive.
        report: the report of the fault, if the engine found it.
    """

    rank: int
    pid: int
    at: float
    type: str
    message: str
    frames: str = ""
    all_frames: str = ""
    lost: bool = False
    printed: bool = False
    missing: tuple[int, ...] = ()
    report: FaultReport | None = None


class LostRank(msgspec.Struct, frozen=True):
    """A rank that a group has lost, for its launcher; see `Departure`."""

    rank: int
    host: str
    pid: int
    why: str


class MembershipNotice(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank of an elastic job tells its launcher when its group has changed.

    Attributes:
        pid: of the rank.  new_rank: its number now.
        generation, size: of its group.
        here: the processes of the group on this host.
        left: who is not in it any more.
        listens: newcomers come to this rank.
        addresses: where newcomers may ask, as far as the rank knows; its own first.
    """

    pid: int
    new_rank: int
    generation: int
    size: int
    here: tuple[int, ...] = ()
    left: tuple[LostRank, ...] = ()
    listens: bool = False
    addresses: tuple[str, ...] = ()
