"""Which messages may be read where their sender has them, without a copy: those whose chunk stays as it is
until its receivers have taken them.

A chunk that is never written again does. So does one that its only receiver overwrites with an answer that it
sends after it has taken the message; of a buffer that is reduced in place that is each part that somebody
else reduces. Where ranks hand chunks around in a circle, each has to give its own away before it may take the
next: there nobody could wait for the others, and a copy is made.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from unisono.plans.plan import Chunk, Copy, Recv, Reduce, Send, Step

__all__ = ["exposed"]


def exposed(rank: int, steps: Sequence[Step], steps_of: Callable[[int], Sequence[Step]]) -> list[bool]:
    """For every step of a rank, whether it sends what may be read in place.

    Args:
        steps: the rank's.  steps_of: those of another rank, for which only some are asked.
    """
    written: dict[Chunk, list[int]] = defaultdict(list)
    for number, step in enumerate(steps):
        if not isinstance(step, Send):
            written[step.dst if isinstance(step, Copy) else step.chunk].append(number)
    found = []
    for number, step in enumerate(steps):
        if not isinstance(step, Send) or step.chunk.space == "tmp":
            found.append(False)
            continue
        after = [later for later in written[step.chunk] if later > number]
        found.append(not after or _answered(rank, steps, number, after[0], steps_of))
    return found


def _answered(
    rank: int, steps: Sequence[Step], sent: int, taken: int, steps_of: Callable[[int], Sequence[Step]]
) -> bool:
    """Whether what step `taken` receives was sent after the message of step `sent` was done with."""
    message, answer = steps[sent], steps[taken]
    if not isinstance(message, Send) or not isinstance(answer, Recv) or message.to != (answer.frm,):
        return False
    peer = answer.frm
    sends, takes = _places(peer, steps)
    their_sends, their_takes = _places(rank, steps_of(peer))
    return their_takes[sends.index(sent)] < their_sends[takes.index(taken)]


def _places(peer: int, steps: Sequence[Step]) -> tuple[list[int], list[int]]:
    """The numbers of the steps that send to a peer, and of those that take from it."""
    sends: list[int] = []
    takes: list[int] = []
    for number, step in enumerate(steps):
        if isinstance(step, Send):
            sends += [number] * Counter(step.to)[peer]
        elif isinstance(step, Recv):
            takes += [number] * (step.frm == peer)
        elif isinstance(step, Reduce):
            takes += [number] * Counter(step.frm)[peer]
    return sends, takes
