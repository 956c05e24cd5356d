"""`Change`: what a run's `on_change` gets after the number of its ranks has changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.engine.group.departure import Departure

__all__ = ["Change"]


@dataclass(frozen=True)
class Change:
    """A change of a run's ranks, the same on all of them.

    Attributes:
        before, size: data ranks before and after it.
        left: who is out, and why; ranks are numbered as before the change.
        joined: how many newcomers came.
        steps: batches trained on so far. The next step is number `steps` + 1.
        rebuilt: shards that were lost with their rank, and where they came from.
        redone: the newest steps that the run makes again, because the state is an earlier one.
    """

    before: int
    size: int
    left: tuple[Departure, ...]
    joined: int
    steps: int
    rebuilt: tuple[str, ...] = ()
    redone: int = 0

    def __str__(self) -> str:
        """One line, such as "step 12: 4 -> 3 ranks: rank 1 ended by SIGKILL"."""
        who = [f"rank {one.rank} {one.why}" for one in self.left]
        who += [f"{self.joined} joined"] * (self.joined > 0)
        how = f"; {', '.join(self.rebuilt)}" if self.rebuilt else ""
        first = self.steps - self.redone + 1
        again = f"steps {first} to {self.steps}" if self.redone > 1 else f"step {first}"
        how += f"; {again} again" if self.redone else ""
        return f"step {self.steps + 1}: {self.before} -> {self.size} ranks: {', '.join(who)}{how}"
