"""What a rank that is behind gets from those that are not: the run's state, and its place in the data."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono.parallel.model_agreement import describe

from .batches import DrawnOrder
from .change import Change
from .shards import HeldCopy

if TYPE_CHECKING:
    from torch import nn

    from unisono.parallel.plan import Plan

__all__ = ["CallReport", "Handover", "SavedState", "fingerprint"]

NOTHING = -1
"""The calls of a newcomer, which has no state."""


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
