"""Checks what a `StepPredictor` is given, before anything is recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from unisono.parallel.plan import Plan

__all__ = ["check_plan", "check_predictor"]


def check_predictor(
    model: object,
    loss: object,
    optimizer: object,
    rows: object,
    hosts: Sequence[int],
    speeds: Sequence[float],
) -> None:
    """Raise TypeError or ValueError for arguments of `StepPredictor` that are none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"StepPredictor: model is a {type(model).__name__}, expected an nn.Module")
    for name, value in (("loss", loss), ("optimizer", optimizer)):
        if value is not None and not callable(value):
            raise TypeError(f"StepPredictor: {name} is a {type(value).__name__}, expected a function")
    if rows is not None and (type(rows) is not int or rows < 1):
        raise ValueError(f"StepPredictor: rows is {rows!r}; it must be a whole number of at least 1")
    if not all(type(host) is int and host >= 0 for host in hosts):
        raise ValueError(f"StepPredictor: hosts is {hosts!r}, expected the number of each rank's host")
    if not all(_is_rate(speed) for speed in speeds):
        raise ValueError(f"StepPredictor: speeds is {speeds!r}, expected finite rates above 0")


def check_plan(plan: object, hosts: Sequence[int], speeds: Sequence[float]) -> None:
    """Raise TypeError or ValueError for a plan that is not priced, or needs other ranks than there are."""
    if not isinstance(plan, Plan):
        raise TypeError(f"StepPredictor: plan is a {type(plan).__name__}, expected a Plan")
    if plan.precision == "autocast":
        raise ValueError("StepPredictor: precision='autocast' is not priced, bf16 is")
    for name, held in (("hosts", hosts), ("speeds", speeds)):
        if held and len(held) != plan.ranks:
            raise ValueError(f"StepPredictor: {plan} needs {plan.ranks} ranks, and {name} has {len(held)}")


def _is_rate(speed: object) -> bool:
    return isinstance(speed, (int, float)) and not isinstance(speed, bool) and 0 < speed < math.inf
