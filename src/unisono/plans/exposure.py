"""Which messages may be read where their sender has them, without a copy: those whose chunk stays as it is
until its receivers have taken them.

A chunk that is never written again does. So does one that its only receiver overwrites with an answer that it
sends after it has taken the message; of a buffer that is reduced in place that is each part that somebody
else reduces. Where ranks hand chunks around in a circle the same may follow from the steps of many others:
that is not looked for, and a copy is made.
"""

from __future__ import annotations

from unisono.plans.origins import Origins
from unisono.plans.plan import Chunk, Copy, Recv, Send

__all__ = ["exposed"]


def exposed(rank: int, plan: Origins) -> list[bool]:
    """For every step of a rank, whether it sends what may be read in place.

    Args:
        plan: the steps of all ranks, of which only some are asked for.
    """
    steps = plan.steps(rank)
    found = [False] * len(steps)
    next_writer: dict[Chunk, int] = {}
    for number in reversed(range(len(steps))):
        step = steps[number]
        if not isinstance(step, Send):
            next_writer[step.dst if isinstance(step, Copy) else step.chunk] = number
        elif step.chunk.space != "tmp":
            writer = next_writer.get(step.chunk)
            found[number] = writer is None or _answered(rank, number, writer, plan)
    return found


def _answered(rank: int, sent: int, taken: int, plan: Origins) -> bool:
    """Whether what step `taken` receives was sent after the message of step `sent` was done with."""
    steps = plan.steps(rank)
    message, answer = steps[sent], steps[taken]
    if not isinstance(message, Send) or not isinstance(answer, Recv) or message.to != (answer.frm,):
        return False
    return plan.answered(rank, sent, taken, answer.frm)
