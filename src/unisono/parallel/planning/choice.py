"""The answer: a plan of a model, and everything that speaks for it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from unisono.parallel.costs.collectives import PricedCollective
from unisono.parallel.costs.forecast import CAUSES as TIMES
from unisono.parallel.costs.forecast import StepForecast
from unisono.parallel.plan import Plan
from unisono.planner.choice_page import ChoicePage, PageCollective, TradePoint
from unisono.planner.readable import readable_size, readable_time, signed_time

from .candidates import RECOMPUTE, changes
from .memory_account import MemoryPeak

__all__ = ["ModelChoice", "PlanForecast", "RefusedPlan"]

ROUNDING = 1e-9  # seconds; plans that differ by less are as fast
WIDTH = 100  # columns of the text
TIME_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recomputation",
    "update": "optimizer",
    "fixed": "runtime",
    "tensor": "tensor collectives",
    "context": "context exchange",
    "experts": "rows of experts",
    "data": "data collectives",
    "messages": "pipeline messages",
    "swap": "swapping",
    "waiting": "waiting",
}
NAMES = {
    **TIME_NAMES,
    "gathered": "gathered parameters",
    "buffers": "buffers of collectives",
    "inputs": "batch",
}
"""Causes as people read them; other causes are as they are called."""

RECORDED = (
    "model", "parameters", "batch", "seconds", "limit", "bubble_seconds", "memory_bytes", "limit_bytes",
    "fits", "candidates", "tried", "complete", "speed", "links", "batch_norm_rows",
)  # fmt: skip
"""What is in a record as it is called here."""


class PlanForecast(NamedTuple):
    """A plan, the seconds of its step by cause, and the peak of its fullest rank, which may use so much."""

    plan: Plan
    time: StepForecast
    peak: MemoryPeak
    rank: int
    limit_bytes: int


class RefusedPlan(NamedTuple):
    """A plan one step away from the chosen one.

    Attributes:
        change: the fields that differ, such as "zero=1".    problem: why it cannot be run; "" if it can.
            The bytes and seconds that are known are beside it.
        excess_bytes: memory above the limit; 0: it fits, or its seconds refuse it already.
        excess_s: seconds more than the chosen plan's; below 0 where it is faster and does not fit. None: its
            seconds are not known.
        cause: the part of the step, or of the memory if it does not fit, that grows most.
    """

    change: str
    problem: str
    excess_bytes: int
    excess_s: float | None
    cause: str


class ModelChoice(NamedTuple):
    """A plan of a model, priced, with its reasons. `print` shows it on a screen; `parallelize` takes it.

    Attributes:
        model: its name.    parameters: how many.    batch: rows of a step, of all ranks.
        chosen: the plan, its time and its memory.
        next_best: up to five others that fit.    refused: the plans one step away.
        candidates: how many plans were compared.    tried: how many of them in a dry run.
        speed: where the costs of operators come from: a calibration's file, or a roofline.
        collectives: of a step on a rank, what takes longest first.
        links: where the costs of collectives come from: a calibration's file, the defaults, or hardware.
        batch_norm_rows: rows whose mean and variance a BatchNorm of the model takes; 0: there is none.
        inputs: of a micro-batch of the sample: where `parallelize` gets no sample, it records the model on
            these.
    """

    model: str
    parameters: int
    batch: int
    chosen: PlanForecast
    next_best: list[PlanForecast]
    refused: list[RefusedPlan]
    candidates: int
    tried: int
    speed: str
    collectives: list[PricedCollective]
    links: str = ""
    batch_norm_rows: int = 0
    inputs: Any = None

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.chosen.plan

    @property
    def complete(self) -> bool:
        """No plan that may be faster was left out: they are tried in the order of their seconds."""
        return True

    @property
    def seconds(self) -> float:
        """A step, as predicted."""
        return self.chosen.time.total

    @property
    def forecast(self) -> StepForecast:
        """The step as predicted, with the peak of rank 0 if that is the fullest: a run compares both."""
        chosen = self.chosen
        return replace(chosen.time, memory_bytes=None if chosen.rank else chosen.peak.nbytes or None)

    @property
    def memory_bytes(self) -> int:
        """The peak of the fullest rank: what PyTorch's allocator keeps for it, or on a host all tensors."""
        return self.chosen.peak.reserved

    @property
    def limit_bytes(self) -> int:
        """What the fullest rank may use."""
        return self.chosen.limit_bytes

    @property
    def fits(self) -> bool:
        """Whether a rank has this memory."""
        return self.chosen.peak.exceeded == 0

    @property
    def limit(self) -> str:
        """The cause that takes the largest share of the step."""
        return max(self.chosen.time.seconds.items(), key=lambda item: item[1])[0]

    @property
    def bubble_seconds(self) -> float:
        """What a rank of the pipeline waits in a step."""
        return self.chosen.time.seconds.get("waiting", 0.0)

    def html(self) -> str:
        """One page with all of it, which needs no network."""
        return self._page().html()

    def _page(self) -> ChoicePage:
        head, seconds = list(self._head()), self.chosen.time.seconds
        chosen, *others = (_point(each, self.plan) for each in (self.chosen, *self.next_best))
        return ChoicePage(
            title=head[0],
            chosen=chosen,
            summary=[line.strip() for line in (*head[2:5], *head[6:])],
            time={TIME_NAMES[cause]: seconds[cause] for cause in TIMES if seconds.get(cause)},
            memory={_named(cause): nbytes for cause, nbytes in self.chosen.peak.parts.items()},
            limit_bytes=self.limit_bytes,
            fits=self.fits,
            limit=TIME_NAMES[self.limit],
            collectives=[
                PageCollective(f"{one.collective} ({one.axis})", *one[2:]) for one in self.collectives
            ],
            others=others,
            refused=[(each.change, _refusal(each)) for each in self.refused],
            points=[chosen, *others],
            groups={str(each): f"recompute={each}" for each in RECOMPUTE},
        )

    def record(self) -> dict[str, Any]:
        """All of it as plain data; seconds and bytes."""
        peak = self.chosen.peak
        return {
            **{name: getattr(self, name) for name in RECORDED},
            "plan": str(self.plan),
            "time": dict(self.chosen.time.seconds),
            "tensor_bytes": peak.nbytes,
            "memory": dict(peak.parts),
            "peak": {"rank": self.chosen.rank, **peak.place._asdict()},
            "next_best": [
                {"plan": str(each.plan), "seconds": each.time.total, "memory_bytes": each.peak.reserved}
                for each in self.next_best
            ],
            "collectives": [each._asdict() for each in self.collectives],
            "refused": [each._asdict() for each in self.refused],
        }

    def __str__(self) -> str:
        lines = [*self._head(), "", *self._page().lines()]
        return "\n".join(part for line in lines for part in _folded(line))

    def _head(self) -> Iterator[str]:
        ranks, peak = self.plan.ranks, self.chosen.peak
        yield f"{self.model}: {self.parameters:,} parameters, {self.batch} rows a step, {ranks} ranks"
        yield f"  {self.plan}"
        among = f"; the fastest of {self.candidates:,} plans, {self.tried} of them in a dry run"
        rate = f"{readable_time(self.seconds)} a step, {self.batch / self.seconds:,.0f} rows/s"
        yield f"  {rate}{among if self.candidates > 1 else ''}"
        yield f"  prices of operators: {_told(self.speed)}"
        yield f"  prices of collectives: {_told(self.links)}"
        state = "fits" if self.fits else f"DOES NOT FIT: {readable_size(peak.exceeded)} are missing"
        held = f"{readable_size(peak.reserved)} of {readable_size(self.limit_bytes)}"
        yield f"  memory: {held} on rank {self.chosen.rank}, {readable_size(peak.nbytes)} in tensors: {state}"
        yield f"  peak of memory: {peak.place}"
        if self.batch_norm_rows:
            yield f"  BatchNorm takes its mean and variance of {self.batch_norm_rows} rows"


def refusal(chosen: PlanForecast, plan: Plan, time: StepForecast, tried: PlanForecast | None) -> RefusedPlan:
    """What speaks against another plan: the bytes that are missing, or the seconds more."""
    excess = 0 if tried is None else tried.peak.exceeded
    if tried is not None and excess:
        cause = _grown(chosen.peak.parts, tried.peak.parts)
    else:
        cause = _grown(chosen.time.seconds, time.seconds)
    return RefusedPlan(changes(plan, chosen.plan), "", excess, time.total - chosen.time.total, cause)


def _point(each: PlanForecast, chosen: Plan) -> TradePoint:
    plan, nbytes = each.plan, each.peak.reserved
    return TradePoint(str(plan), each.time.total, nbytes, str(plan.recompute), changes(plan, chosen))


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    return max({**before, **after}, key=lambda name: after.get(name, 0.0) - before.get(name, 0.0))


def _named(cause: str) -> str:
    return NAMES.get(cause, cause)


def _refusal(each: RefusedPlan) -> str:
    why, words = f" ({_named(each.cause)})" if each.cause else "", [each.problem] if each.problem else []
    if each.excess_bytes:
        words.append(f"{readable_size(each.excess_bytes)} too many{why}")
    if each.excess_s is not None:
        same = abs(each.excess_s) < ROUNDING
        words.append(
            "as fast" if same else signed_time(each.excess_s) + (why if not each.excess_bytes else "")
        )
    return "; ".join(words)


def _told(source: str) -> str:
    """Where prices come from, without the long name of a calibration's file."""
    return "this machine's calibration" if source.startswith("/") else source


def _folded(line: str) -> list[str]:
    """A line in parts that fit a screen."""
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (4 + len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
