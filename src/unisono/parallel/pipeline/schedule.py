"""Schedules: the ordered actions of each rank. Pure lists, without tensors.

    F forward        B backward        I backward for inputs only        W backward for weights only

A schedule of p ranks with v stages each has p * v stages. Stage s lives on rank s % p; under "zbv", which
folds the stages into a V, the second half runs back: with p = 2 stages 0 1 2 3 are on ranks 0 1 1 0.

Example: 1f1b with p = 2, m = 2: rank 0: F0 F1 B0 B1; rank 1: F0 B0 F1 B1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Action", "Schedule", "StageMessage", "schedule"]


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


def schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Make the schedule called `name`.

    Args:
        ranks: of the pipeline. One rank has the schedule of accumulation: F B F B.
        chunks: stages on each rank, for "interleaved".
    Sources: GPipe, arXiv:1811.06965. 1F1B: PipeDream-Flush, arXiv:2006.09503. Interleaved: arXiv:2104.04473.
        ZB-H1: arXiv:2401.10241. ZBV: arXiv:2405.15362.
    """
    if ranks == 1:
        order = [Action(kind, 0, micro) for micro in range(micro_batches) for kind in "FB"]
        return Schedule(name, (tuple(order),), (0,), micro_batches)
    if name == "zbv":
        rank_of = (*range(ranks), *reversed(range(ranks)))
        orders = _zbv(rank_of, ranks, micro_batches)
    else:
        rank_of = tuple(stage % ranks for stage in range(ranks * chunks))
        make = {"gpipe": _gpipe, "1f1b": _1f1b, "interleaved": _interleaved, "zb-h1": _zb_h1}[name]
        orders = [make(rank, ranks, micro_batches, chunks) for rank in range(ranks)]
    return Schedule(name, tuple(map(tuple, orders)), rank_of, micro_batches)


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
