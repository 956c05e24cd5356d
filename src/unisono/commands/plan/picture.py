"""The trade of a choice as SVG: the time of a step over the memory of a rank, for all plans of a space."""

from __future__ import annotations

from collections.abc import Iterable

from unisono.planner import PlanChoice
from unisono.planner.choice_page import trade_svg
from unisono.planner.search import PricedPlan

__all__ = ["svg"]


def svg(choice: PlanChoice, plans: Iterable[PricedPlan]) -> str:
    """The drawing: each point names its plan; the ring is the chosen one, the line the limit of memory."""
    title = f"{choice.candidates:,} plans: seconds of a step over memory of a rank"
    return trade_svg(title, choice.points(plans), choice.job.limit_bytes)
