"""Checks what a `StepPredictor` is given, before anything is recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from unisono.parallel.plan import Plan

__all__ = ["check_plan", "check_predictor"]


def check_predictor(model: object, **given: Any) -> None:
    """Raise TypeError or ValueError for a model, a loss, an optimizer, rows, hosts or speeds that are none.

    Args:
        given: as `StepPredictor` takes them.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"StepPredictor: model is a {type(model).__name__}, expected an nn.Module")
    for name in ("loss", "optimizer"):
        if given[name] is not None and not callable(given[name]):
            raise TypeError(f"StepPredictor: {name} is a {type(given[name]).__name__}, expected a function")
    for name, kind, what in (("pieces", Sequence, "a list of modules"), ("cuts", Mapping, "a dict")):
        if given[name] is not None and not isinstance(given[name], kind):
            raise TypeError(f"StepPredictor: {name} is a {type(given[name]).__name__}, expected {what}")
    rows = given["rows"]
    if rows is not None and (type(rows) is not int or rows < 1):
        raise ValueError(f"StepPredictor: rows is {rows!r}; it must be a whole number of at least 1")
    if not all(type(host) is int and host >= 0 for host in given["hosts"]):
        raise ValueError(
            f"StepPredictor: hosts is {given['hosts']!r}, expected the number of each rank's host"
        )
    if not all(_is_rate(speed) for speed in given["speeds"]):
        raise ValueError(f"StepPredictor: speeds is {given['speeds']!r}, expected finite rates above 0")


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
