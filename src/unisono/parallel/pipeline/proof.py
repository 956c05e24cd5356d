"""The proof of a schedule: every action once and in order, no deadlock, no message left over. It
needs neither tensors nor processes.

A message is found by its pair of ranks and its tag, which is its kind and stage; those of one tag arrive in
the order in which they were sent. A send does not wait, a receive does.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from unisono.errors import PlanError

from .schedule import Action, StageMessage

if TYPE_CHECKING:
    from .schedule import Schedule

__all__ = ["prove"]

Channel = tuple[int, int, str, int]  # from, to, kind, stage


def prove(schedule: Schedule) -> None:
    """Raise PlanError, naming rank and action, if `schedule` is wrong or can deadlock."""
    for rank, order in enumerate(schedule.orders):
        _complete(schedule, rank, order)
    _run(schedule)


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


def _run(schedule: Schedule) -> None:
    """Run all ranks on messages without content. Whatever the timing, ranks get equally far."""
    sent: dict[Channel, deque[StageMessage]] = {}
    here: list[set[StageMessage]] = [set() for _ in schedule.orders]  # from a rank's own stages
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order) and _ready(schedule, rank, at[rank], sent, here[rank]):
                _give(schedule, rank, order[at[rank]], sent, here[rank])
                at[rank] += 1
                moved = True
    stuck = [rank for rank, order in enumerate(schedule.orders) if at[rank] < len(order)]
    if stuck:
        waits = (f"rank {rank} at {schedule.orders[rank][at[rank]]}" for rank in stuck)
        wanted = (str(schedule.needs(schedule.orders[rank][at[rank]])) for rank in stuck)
        cycle = "; ".join(f"{wait} waits for {want}" for wait, want in zip(waits, wanted, strict=True))
        raise PlanError(f"schedule {schedule.name}: deadlock: {cycle}")
    left = {channel[:2]: str(queue[0]) for channel, queue in sent.items() if queue}
    if left:
        raise PlanError(f"schedule {schedule.name}: messages that no rank receives: {left}")


def _ready(
    schedule: Schedule,
    rank: int,
    index: int,
    sent: dict[Channel, deque[StageMessage]],
    here: set[StageMessage],
) -> bool:
    message = schedule.needs(schedule.orders[rank][index])
    if message is None:
        return True
    source = schedule.rank_of[message.stage]
    if source == rank:
        return message in here
    queue = sent.get((source, rank, message.kind, message.stage))
    if not queue:
        return False
    if queue[0] != message:
        raise _wrong(schedule, rank, index, f"waits for {message}, but rank {source} sends {queue[0]} first")
    queue.popleft()
    return True


def _give(
    schedule: Schedule,
    rank: int,
    action: Action,
    sent: dict[Channel, deque[StageMessage]],
    here: set[StageMessage],
) -> None:
    given = schedule.gives(action)
    if given is None:
        return
    message, stage = given
    to = schedule.rank_of[stage]
    if to == rank:
        here.add(message)
    else:
        sent.setdefault((rank, to, message.kind, message.stage), deque()).append(message)


def _wrong(schedule: Schedule, rank: int, index: int, what: str) -> PlanError:
    return PlanError(f"schedule {schedule.name}, rank {rank}, action {index}: {what}")
