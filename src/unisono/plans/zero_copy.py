"""Which messages may be read in the sender's memory, without a copy: those whose chunk does not change until
its receivers have released the message.

This holds for a chunk that is never written again. It also holds for a chunk that is overwritten only by an
answer of its only receiver, which sends the answer after it has released the message. In a buffer that is
reduced in place these are the parts that other ranks reduce. Where chunks travel around a ring, the same may
follow from the steps of many ranks: this is not analysed, and a copy is made.
"""

from __future__ import annotations

from unisono.plans.plan import Chunk, Copy, Recv, Send
from unisono.plans.provenance import Provenance

__all__ = ["zero_copy_sends"]


def zero_copy_sends(rank: int, plan: Provenance) -> list[bool]:
    """For every step of a rank, whether it sends a message that may be read in place.

    Args:
        plan: the steps of all ranks; only some of them are read.
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
            found[number] = writer is None or _is_released(rank, number, writer, plan)
    return found


def _is_released(rank: int, sent: int, taken: int, plan: Provenance) -> bool:
    """Whether the message that step `taken` receives was sent after that of step `sent` was released."""
    steps = plan.steps(rank)
    message, answer = steps[sent], steps[taken]
    if not isinstance(message, Send) or not isinstance(answer, Recv) or message.to != (answer.frm,):
        return False
    return plan.answered(rank, sent, taken, answer.frm)
