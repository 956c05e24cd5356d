"""Schedules: the ordered actions of each rank, their proof, and their times. Pure lists, without tensors.

    F forward        B backward        I backward for inputs only        W backward for weights only

A schedule of p ranks with v stages each has p * v stages. Stage s lives on rank s % p; under "zbv", which
folds the stages into a V, the second half runs back: with p = 2 stages 0 1 2 3 are on ranks 0 1 1 0.

Example: 1f1b with p = 2, m = 2: rank 0: F0 F1 B0 B1; rank 1: F0 B0 F1 B1.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from unisono.errors import PlanError


class Action(NamedTuple):
    """One action: kind F, B, I or W, on a stage, for a micro-batch."""

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro} of stage {self.stage}"


class StageMessage(NamedTuple):
    """The output of one action that another one waits for: activations (F) or gradients (B) from `stage`."""

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        what = "activations" if self.kind == "F" else "gradients"
        return f"{what} of micro-batch {self.micro} from stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """Actions of each rank, in order, and where the stages are."""

    name: str
    orders: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]  # stage -> rank
    micro_batches: int

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.rank_of)

    def kept(self, rank: int) -> int:
        """The most forwards of a rank that wait for their backward."""
        waits = itertools.accumulate(
            {"F": 1, "B": -1, "W": -1}.get(each.kind, 0) for each in self.orders[rank]
        )
        return max(waits, default=0)

    def needs(self, action: Action) -> StageMessage | None:
        """The message that `action` needs, from another stage, on this rank or another."""
        kind, stage, micro = action
        if kind == "F":
            return StageMessage("F", stage - 1, micro) if stage else None
        if kind in "BI":
            return StageMessage("B", stage + 1, micro) if stage + 1 < self.stages else None
        return None

    def gives(self, action: Action) -> tuple[StageMessage, int] | None:
        """The message from `action`, and the stage that receives it."""
        kind, stage, micro = action
        if kind == "F" and stage + 1 < self.stages:
            return StageMessage("F", stage, micro), stage + 1
        if kind in "BI" and stage:
            return StageMessage("B", stage, micro), stage - 1
        return None

    def run_order(self) -> Iterator[tuple[int, Action]]:
        """Yield (rank, action) in an order in which the ranks can run, as far as they get."""
        given: set[StageMessage] = set()
        at, moved = [0] * self.ranks, True
        while moved:
            moved = False
            for rank, order in enumerate(self.orders):
                while at[rank] < len(order):
                    action = order[at[rank]]
                    needed = self.needs(action)
                    if needed is not None and needed not in given:
                        break
                    yield rank, action
                    if handed := self.gives(action):
                        given.add(handed[0])
                    at[rank] += 1
                    moved = True


def schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Make the schedule called `name`.

    Args:
        ranks: of the pipeline. One rank has the schedule of accumulation: F B F B.
        chunks: stages on each rank.
    """
    if ranks == 1:
        order = [Action(kind, 0, micro) for micro in range(micro_batches) for kind in "FB"]
        return Schedule(name, (tuple(order),), (0,), micro_batches)
    kind = KINDS[name]
    rank_of = tuple(stage % ranks for stage in range(ranks * chunks))
    if kind.folded:
        rank_of = rank_of[:ranks] + rank_of[ranks - 1 :: -1]
    orders = kind.make(rank_of, ranks, micro_batches)
    return Schedule(name, tuple(map(tuple, orders)), rank_of, micro_batches)


Orders = Sequence[Sequence[Action]]
MakeOrders = Callable[[tuple[int, ...], int, int], Orders]


class ScheduleKind(NamedTuple):
    """What there is to know of a schedule.

    Args:
        make: (stage -> rank, ranks, micro-batches) -> the actions of each rank.
        stages: numbers of stages that a rank may have, the usual one first; (): 2, or any other.
        folded: the second half of the stages runs back.
        searched: numbers of stages on a rank that a search tries; (): where it is asked for.
    """

    make: MakeOrders
    stages: tuple[int, ...] = (1,)
    folded: bool = False
    searched: tuple[int | None, ...] = (None,)


def by_rank(order: Callable[[int, int, int, int], list[Action]]) -> MakeOrders:
    """Of a schedule that says what one rank does, from (rank, ranks, micro-batches, stages on each rank)."""

    def make(rank_of: tuple[int, ...], ranks: int, micro_batches: int) -> Orders:
        return [order(rank, ranks, micro_batches, len(rank_of) // ranks) for rank in range(ranks)]

    return make


def _gpipe(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:  # noqa: ARG001
    """All forwards, then all backwards. Bubble: (p-1) / (m+p-1)."""
    return [Action(kind, rank, micro) for kind in "FB" for micro in range(micro_batches)]


def _1f1b(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:  # noqa: ARG001
    """At most p - rank micro-batches in flight. Bubble: (p-1) / (m+p-1)."""
    forwards = [Action("F", rank, micro) for micro in range(micro_batches)]
    backwards = [Action("B", rank, micro) for micro in range(micro_batches)]
    return _alternating(forwards, backwards, min(ranks - rank - 1, micro_batches))


def _interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """Groups of p micro-batches pass through one stage of the rank after the other. Bubble: (p-1) /
    (vm+p-1).
    """
    groups = [range(first, min(first + ranks, micro_batches)) for first in range(0, micro_batches, ranks)]
    stages = [chunk * ranks + rank for chunk in range(chunks)]
    forwards = [Action("F", stage, micro) for group in groups for stage in stages for micro in group]
    backwards = [
        Action("B", stage, micro) for group in groups for stage in reversed(stages) for micro in group
    ]
    warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    if micro_batches % ranks:
        warm_up = len(forwards)  # a short group: the first gradients come later than by the formula
    return _alternating(forwards, backwards, min(warm_up, len(forwards)))


def _alternating(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then one forward and one backward in turn, then the remaining backwards."""
    order, rest = forwards[:warm_up], forwards[warm_up:]
    for forward, backward in zip(rest, backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(rest) :]


def _zb_h1(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:  # noqa: ARG001
    """1F1B whose weights' gradients come `rank` micro-batches late. Bubble, F = I = W: (p-1) / (3m+p-1)."""
    ahead = min(ranks - rank - 1, micro_batches)
    order = [Action("F", rank, micro) for micro in range(ahead)]
    late = 0
    for micro in range(micro_batches):
        if micro + ahead < micro_batches:
            order.append(Action("F", rank, micro + ahead))
        order.append(Action("I", rank, micro))
        if micro >= rank:
            order.append(Action("W", rank, late))
            late += 1
    return order + [Action("W", rank, micro) for micro in range(late, micro_batches)]


def _zbv(rank_of: tuple[int, ...], ranks: int, micro_batches: int) -> list[list[Action]]:
    """Every rank runs, in unit time, a ready action: I before F before W, the later stage first.

    A rank holds at most 2p micro-batches of a stage between F and W, as much as rank 0 of 1F1B does.
    """
    done: dict[Action, int] = {}  # action -> when it ends
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    total, time = 3 * micro_batches * len(rank_of), 0
    while sum(map(len, orders)) < total:
        taken = [_choose(rank_of, rank, orders[rank], done, time, micro_batches) for rank in range(ranks)]
        time += 1
        for rank, action in enumerate(taken):
            if action is not None:
                orders[rank].append(action)
                done[action] = time
    return orders


def _choose(
    rank_of: tuple[int, ...],
    rank: int,
    order: list[Action],
    done: dict[Action, int],
    time: int,
    micro_batches: int,
) -> Action | None:
    last = len(rank_of) - 1
    ready: dict[str, list[Action]] = {"I": [], "F": [], "W": []}
    for kind, actions in ready.items():
        for stage in (stage for stage in reversed(range(last + 1)) if rank_of[stage] == rank):
            micro = sum(action.kind == kind and action.stage == stage for action in order)
            if micro < micro_batches:
                before = _before(Action(kind, stage, micro), last)
                if all(action in done and done[action] <= time for action in before):
                    actions.append(Action(kind, stage, micro))
    held = sum({"F": 1, "W": -1}.get(action.kind, 0) for action in order)
    if held >= last + 1:
        ready["F"] = []
    return next((actions[0] for actions in ready.values() if actions), None)


def _before(action: Action, last: int) -> list[Action]:
    kind, stage, micro = action
    if kind == "F":
        return [Action("F", stage - 1, micro)] if stage else []
    if kind == "W":
        return [Action("I", stage, micro)]
    return [Action("F", stage, micro), *([Action("I", stage + 1, micro)] if stage < last else [])]


KINDS = {
    "gpipe": ScheduleKind(by_rank(_gpipe), searched=()),  # 1F1B has its bubble, and keeps less
    "1f1b": ScheduleKind(by_rank(_1f1b)),
    "zb-h1": ScheduleKind(by_rank(_zb_h1)),
    "zbv": ScheduleKind(_zbv, stages=(2,), folded=True),
    "interleaved": ScheduleKind(by_rank(_interleaved), stages=(), searched=(2, 3, 4)),
}
"""Sources: GPipe, arXiv:1811.06965. 1F1B: PipeDream-Flush, arXiv:2006.09503. ZB-H1: arXiv:2401.10241.
ZBV: arXiv:2405.15362. Interleaved: arXiv:2104.04473."""


@lru_cache
def splits_backward(name: str) -> bool:
    """Whether a schedule computes the gradients of weights in a pass of their own."""
    order = schedule(name, 2, 1, (KINDS[name].stages or (2,))[0])
    return any(action.kind == "W" for actions in order.orders for action in actions)


# ---- proof ----


Channel = tuple[int, int, str, int]  # from, to, kind, stage


def prove(schedule: Schedule) -> None:
    """Raise PlanError, naming rank and action, if `schedule` is wrong or can deadlock.

    Right is: every action once and in order, no deadlock, no message left over. A message is found by its
    pair of ranks and its tag, which is its kind and stage; those of one tag arrive in the order in which they
    were sent. A send does not wait, a receive does. Whatever the timing, ranks get equally far.
    """
    for rank, order in enumerate(schedule.orders):
        _complete(schedule, rank, order)
    sent: dict[Channel, deque[StageMessage]] = {}
    at = [0] * schedule.ranks
    for rank, action in schedule.run_order():
        message, given = schedule.needs(action), schedule.gives(action)
        if message is not None and (source := schedule.rank_of[message.stage]) != rank:
            first = sent[source, rank, message.kind, message.stage].popleft()
            if first != message:
                what = f"waits for {message}, but rank {source} sends {first} first"
                raise _wrong(schedule, rank, at[rank], what)
        if given is not None and (to := schedule.rank_of[given[1]]) != rank:
            sent.setdefault((rank, to, given[0].kind, given[0].stage), deque()).append(given[0])
        at[rank] += 1
    stuck = {rank: order[at[rank]] for rank, order in enumerate(schedule.orders) if at[rank] < len(order)}
    if stuck:
        waits = (
            f"rank {rank} at {action} waits for {schedule.needs(action)}" for rank, action in stuck.items()
        )
        cycle = "; ".join(waits)
        raise PlanError(f"schedule {schedule.name}: deadlock: {cycle}")
    left = {channel[:2]: str(queue[0]) for channel, queue in sent.items() if queue}
    if left:
        raise PlanError(f"schedule {schedule.name}: messages that no rank receives: {left}")


def _complete(schedule: Schedule, rank: int, order: tuple[Action, ...]) -> None:
    """Each stage of the rank does F once for each micro-batch, then B, or I and then W; no other action."""
    place: dict[Action, int] = {}
    for index, action in enumerate(order):
        if not 0 <= action.stage < schedule.stages or schedule.rank_of[action.stage] != rank:
            raise _wrong(schedule, rank, index, f"{action} is not a stage of this rank")
        if action in place or not 0 <= action.micro < schedule.micro_batches:
            raise _wrong(
                schedule, rank, index, f"{action} comes twice, or is no micro-batch of this schedule"
            )
        place[action] = index
    for stage in (stage for stage, at in enumerate(schedule.rank_of) if at == rank):
        for micro in range(schedule.micro_batches):
            kinds = [kind for kind in "FBIW" if Action(kind, stage, micro) in place]
            if kinds not in (["F", "B"], ["F", "I", "W"]):
                raise _wrong(schedule, rank, len(order), f"micro-batch {micro} of stage {stage} has {kinds}")
            at = [place[Action(kind, stage, micro)] for kind in kinds]
            if at != sorted(at):
                raise _wrong(
                    schedule, rank, at[1], f"micro-batch {micro} of stage {stage} goes backward first"
                )


def _wrong(schedule: Schedule, rank: int, index: int, what: str) -> PlanError:
    return PlanError(f"schedule {schedule.name}, rank {rank}, action {index}: {what}")


# ---- times, predicted or measured ----


COLOURS = {"F": "#7aa6c2", "B": "#d98e73", "I": "#d98e73", "W": "#a3b18a"}


class Span(NamedTuple):
    """One action on one rank, from start to end, in seconds."""

    rank: int
    action: Action
    start_s: float
    end_s: float


class Timeline:
    """Spans of all ranks of one pipeline."""

    def __init__(self, name: str, ranks: int, spans: Sequence[Span]) -> None:
        self.name, self.ranks, self.spans = name, ranks, list(spans)

    @property
    def span_s(self) -> float:
        """Seconds from the first start to the last end."""
        return max(span.end_s for span in self.spans) - min(span.start_s for span in self.spans)

    @property
    def bubble(self) -> float:
        """The share of rank-seconds in which no action ran: idle / (ranks * span)."""
        busy = sum(span.end_s - span.start_s for span in self.spans)
        return 1 - busy / (self.ranks * self.span_s)

    def text(self, width: int = 100) -> str:
        """One line for each rank: F as the digit of its micro-batch, backward as a letter, W as "w", idle as
        ".".
        """
        first = min(span.start_s for span in self.spans)
        scale = width / self.span_s
        lines = [["."] * width for _ in range(self.ranks)]
        for span in self.spans:
            columns = range(round((span.start_s - first) * scale), round((span.end_s - first) * scale))
            for column in columns:
                lines[span.rank][column] = _letter(span.action)
        rows = [f"rank {rank} |{''.join(line)}|" for rank, line in enumerate(lines)]
        return "\n".join([*rows, f"{self.name}: bubble {self.bubble:.1%} of {self.span_s:.3g} s"])

    def svg(self, width: int = 900, height: int = 24) -> str:
        """The picture as an SVG document."""
        first = min(span.start_s for span in self.spans)
        scale = width / self.span_s
        boxes = [
            f'<g><title>{span.action}: {span.end_s - span.start_s:.3g} s</title><rect x="{x:.2f}" y="{y}" '
            f'width="{w:.2f}" height="{height - 4}" fill="{COLOURS[span.action.kind]}" stroke="#fff"/>'
            f'<text x="{x + w / 2:.2f}" y="{y + height / 2 + 2}" text-anchor="middle">'
            f"{span.action.micro}</text></g>"
            for span in self.spans
            for x, w, y in [
                ((span.start_s - first) * scale, (span.end_s - span.start_s) * scale, span.rank * height)
            ]
        ]
        caption = f"{self.name}: bubble {self.bubble:.1%} of {self.span_s:.3g} s"
        bottom = self.ranks * height
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 20}" font-size="10" '
            f'font-family="sans-serif">{"".join(boxes)}<text x="0" y="{bottom + 14}">{caption}</text></svg>\n'
        )


def _letter(action: Action) -> str:
    if action.kind == "W":
        return "w"
    return str(action.micro % 10) if action.kind == "F" else chr(ord("a") + action.micro % 22)


def predict(
    schedule: Schedule, seconds: Callable[[Action], float] | dict[str, float], message_s: float = 0.0
) -> Timeline:
    """Time `schedule` when each action takes `seconds` and each message between ranks `message_s`.

    Example: 1f1b with p = 2, m = 3, F and B 1 s each: 8 s, bubble 1/4.
    """
    cost = seconds if callable(seconds) else lambda action: seconds[action.kind]
    given: dict[StageMessage, tuple[float, int]] = {}  # its time of arrival, and the rank
    free, spans = [0.0] * schedule.ranks, list[Span]()
    for rank, action in schedule.run_order():
        message = schedule.needs(action)
        ready, source = given[message] if message is not None else (0.0, rank)
        start = max(free[rank], ready + (message_s if source != rank else 0.0))
        free[rank] = start + cost(action)
        spans.append(Span(rank, action, start, free[rank]))
        if handed := schedule.gives(action):
            given[handed[0]] = (free[rank], rank)
    if len(spans) < sum(map(len, schedule.orders)):
        raise ValueError(f"schedule {schedule.name} deadlocks; prove() says where")
    return Timeline(schedule.name, schedule.ranks, spans)
