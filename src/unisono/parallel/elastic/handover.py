"""A change of a run's ranks, and what one that is behind gets then: the state, and its place in the data."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unisono.engine.group.departure import Departure
from unisono.engine.group.native import NativeGroup
from unisono.parallel.arguments import describe
from unisono.parallel.plan import Plan

from .batches import DrawnOrder, ElasticBatches
from .shards import HeldCopy

NOTHING = -1
"""The calls of a newcomer, which has no state."""


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


@dataclass(frozen=True)
class CallReport:
    """What each rank tells the others after a change.

    Attributes:
        calls: how many calls it has completed; NOTHING: it is a newcomer.
        program: the fingerprint of its plan and its model.
        steps: how many it had made after its newest call.
        reach_back: the earliest state from which it can make all steps again.
        copies: of shards, that it holds.
        caches: (name, dtype, shape) of each buffer that is not persistent.
    """

    calls: int
    program: str
    steps: int
    reach_back: int
    copies: list[HeldCopy]
    caches: list[tuple[str, str, tuple[int, ...]]]


@dataclass(frozen=True)
class SavedState:
    """A checkpoint of this run: its folder, and the steps before it."""

    folder: str
    steps: int


@dataclass(frozen=True)
class Handover:
    """The state of a rank that is not behind, but for the tensors themselves.

    Attributes:
        calls, result, grad_norm: its newest call, and what that returned.
        change: what has changed since all ranks were told last.
        kinds: (name, dtype, shape) of each tensor.
        sharded: names of those of which each rank gets its rows.
        written: what is JSON, by name.
        settings: of the optimizers' groups, right after its newest call.
        attached: the states of attached objects, as JSON.
        places: the epochs that have begun and not ended, in the order in which they have begun.
        drawn: the newest order, for ranks of the former group.
        generator: the state of PyTorch's default generator.
        saved: the newest checkpoint.
    """

    calls: int
    result: float | None
    grad_norm: float | None
    change: Change
    kinds: list[tuple[str, str, tuple[int, ...]]]
    sharded: set[str]
    written: dict[str, bytes]
    settings: list[dict[str, Any]]
    attached: str
    places: list[DrawnOrder]
    drawn: DrawnOrder | None
    generator: np.ndarray
    saved: SavedState | None


def fingerprint(plan: Plan, model: nn.Module) -> str:
    """A digest of what all ranks have alike: the plan, as it was at the start, and the model's tensors."""
    told = repr((str(plan), sorted(describe(model).items())))
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


# ---- records ----


@dataclass(frozen=True)
class StepRecord:
    """What a step began with, beside the state.

    Attributes:
        batches, drawn: the loader of its batch, and the batch as `ElasticBatches.drawn` has it.
        settings: of the optimizers' groups.
        modes: whether each module of the model was in training mode.
    """

    batches: ElasticBatches
    drawn: Any
    settings: list[dict[str, Any]]
    modes: bytes


class StepRecords:
    """The records of successive steps."""

    def __init__(self) -> None:
        self._steps: dict[int, StepRecord] = {}

    def add(self, step: int, record: StepRecord) -> None:
        """Record a step that begins; one that is begun anew takes the place of its first attempt."""
        self._steps[step] = record

    def forget(self, copied: int, saved: int | None) -> None:
        """Forget what is not needed any more.

        Args:
            copied: the steps of the oldest copy. Batches with their data are kept after it only.
            saved: those of the newest checkpoint; None: there is none.
        """
        oldest = copied if saved is None else min(copied, saved)
        for step in [*self._steps]:
            if step <= oldest or (step <= copied and not self._steps[step].batches.is_drawn):
                del self._steps[step]

    def clear(self) -> None:
        """Forget all."""
        self._steps.clear()

    def reach_back(self, steps: int) -> int:
        """The earliest state from which this rank can make all steps again. steps: that of the newest one."""
        first = max([steps, *self._steps])
        while first in self._steps:
            first -= 1
        return first

    def between(self, state: int, newest: int) -> list[StepRecord]:
        """The records of the steps after one state, up to another."""
        return [self._steps[step] for step in range(state + 1, newest + 1)]


# ---- transfer ----


PIECE_BYTES = 16 << 20
SMALL_BYTES = 1 << 16
AT_ONCE = 16
"""Messages under way for each pair of ranks."""


def spread(
    group: NativeGroup, sources: Sequence[int], receivers: Sequence[int], tensors: Sequence[Tensor]
) -> None:
    """Fill the tensors of each receiver with those of the sources. Sources and receivers call this.

    Shapes: the same sizes and dtypes, in one order, on all of them. In CPU memory.
    Cost: each receiver gets all bytes once; each source sends its share of them to each receiver.

    Args:
        sources, receivers: ranks of the group; all sources have the same values.
    Raises:
        PeerLost: one of them died; what was received is then of no use.
    """
    if group.rank not in (*sources, *receivers):
        return
    receiving = group.rank in receivers
    small = [one for one in tensors if one.nbytes < SMALL_BYTES]
    packed = torch.cat([_bytes(one) for one in small]) if small else torch.empty(0, dtype=torch.uint8)
    large = [one for one in tensors if one.nbytes >= SMALL_BYTES]
    whole = [one if one.is_contiguous() else one.contiguous() for one in large]
    pieces = [piece for one in (packed, *whole) for piece in _bytes(one).split(PIECE_BYTES) if len(piece)]
    peers = sources if receiving else receivers
    under_way: deque[Any] = deque()
    for number, piece in enumerate(pieces):
        source = sources[number % len(sources)]
        for peer in peers:
            if receiving and peer == source:
                under_way.append(group.irecv(piece.numpy(), peer))
            elif not receiving and group.rank == source:
                under_way.append(group.isend(piece.numpy(), peer))
        while len(under_way) > AT_ONCE * len(peers):
            under_way.popleft().wait()
    for work in under_way:
        work.wait()
    if receiving:
        _unpack(packed, small)
        for one, filled in zip(large, whole, strict=True):
            if filled is not one:
                one.copy_(filled)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@torch.no_grad()
def _unpack(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    for part, one in zip(packed.split([one.nbytes for one in tensors]), tensors, strict=True):
        one.copy_(part.clone().view(one.dtype).view(one.shape))
