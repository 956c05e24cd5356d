"""The answer: a plan of a model, and everything that speaks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from unisono.networks.quantities import readable_size, readable_time
from unisono.parallel.costs.forecast import CAUSES, StepForecast
from unisono.parallel.plan import Plan
from unisono.planner.choice import CAUSE_NAMES, Choice, RefusedPlan

from .candidates import changes
from .memory_account import MemoryPeak


class PlanForecast(NamedTuple):
    """A plan, the seconds of its step by cause, and the peak of its fullest rank, which may use so much."""

    plan: Plan
    time: StepForecast
    peak: MemoryPeak
    rank: int
    limit_bytes: int

    @property
    def seconds(self) -> dict[str, float]:
        """Those of the step by cause."""
        given = self.time.seconds
        return {cause: given[cause] for cause in CAUSES if cause in given}

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of the fullest rank by cause."""
        return self.peak.parts

    @property
    def memory_bytes(self) -> int:
        """Its peak: what PyTorch's allocator keeps for it, or on a host all tensors."""
        return self.peak.reserved

    @property
    def excess_bytes(self) -> int:
        """What is missing; 0: it fits."""
        return self.peak.exceeded


@dataclass(frozen=True)
class ModelChoice(Choice):
    """A plan of a model, priced, with its reasons. `print` shows it on a screen; `parallelize` takes it.

    Attributes:
        model: its name.    parameters: how many.    batch: rows of a step, of all ranks.
        tried: how many of the candidates in a dry run.
        speed: where the costs of operators come from: a calibration's file, or a roofline.
        links: where the costs of collectives come from: a calibration's file, the defaults, or hardware.
        batch_norm_rows: rows whose mean and variance a BatchNorm of the model takes; 0: there is none.
        inputs: of a micro-batch of the sample: where `parallelize` gets no sample, it records the model on
            these.
    """

    model: str
    parameters: int
    batch: int
    tried: int
    speed: str
    links: str = ""
    batch_norm_rows: int = 0
    inputs: Any = None

    NAMES: ClassVar[Mapping[str, str]] = {
        **CAUSE_NAMES,
        **{name: name for name in ("forward", "backward", "waiting")},
        "fixed": "runtime",
        "gathered": "gathered parameters",
        "buffers": "buffers of collectives",
        "inputs": "batch",
    }
    WIDTH: ClassVar[int] = 100
    RECORDED: ClassVar[tuple[str, ...]] = (
        *Choice.RECORDED, "model", "parameters", "batch", "bubble_seconds", "tried", "complete", "speed",
        "links", "batch_norm_rows",
    )  # fmt: skip

    @property
    def complete(self) -> bool:
        """No plan that may be faster was left out: they are tried in the order of their seconds."""
        return True

    @property
    def forecast(self) -> StepForecast:
        """The step as predicted, with the peak of rank 0 if that is the fullest: a run compares both."""
        chosen: PlanForecast = self.chosen
        return replace(chosen.time, memory_bytes=None if chosen.rank else chosen.peak.nbytes or None)

    @property
    def bubble_seconds(self) -> float:
        """What a rank of the pipeline waits in a step."""
        return float(self.chosen.seconds.get("waiting", 0.0))

    def record(self) -> dict[str, Any]:
        """All of it as plain data; seconds and bytes."""
        peak = self.chosen.peak
        place = {"rank": self.chosen.rank, **peak.place._asdict()}
        return {**super().record(), "tensor_bytes": peak.nbytes, "peak": place}

    def _change(self, plan: Plan) -> str:
        return changes(plan, self.plan)

    def _title(self) -> str:
        rows = f"{self.batch} rows a step, {self.plan.ranks} ranks"
        return f"{self.model}: {self.parameters:,} parameters, {rows}"

    def _about(self) -> Iterator[str]:
        among = f"; the fastest of {self.candidates:,} plans, {self.tried} of them in a dry run"
        rate = f"{readable_time(self.seconds)} a step, {self.batch / self.seconds:,.0f} rows/s"
        yield f"{rate}{among if self.candidates > 1 else ''}"
        yield f"prices of operators: {_told(self.speed)}"
        yield f"prices of collectives: {_told(self.links)}"

    def _memory(self) -> str:
        peak, rank = self.chosen.peak, self.chosen.rank
        state = "fits" if self.fits else f"DOES NOT FIT: {readable_size(peak.exceeded)} are missing"
        held = f"{readable_size(peak.reserved)} of {readable_size(self.limit_bytes)}"
        return f"memory: {held} on rank {rank}, {readable_size(peak.nbytes)} in tensors: {state}"

    def _beside(self) -> Iterator[str]:
        yield f"peak of memory: {self.chosen.peak.place}"
        if self.batch_norm_rows:
            yield f"BatchNorm takes its mean and variance of {self.batch_norm_rows} rows"


def refusal(chosen: PlanForecast, plan: Plan, time: StepForecast, tried: PlanForecast | None) -> RefusedPlan:
    """What speaks against another plan: the bytes that are missing, or the seconds more."""
    excess = 0 if tried is None else tried.peak.exceeded
    if tried is not None and excess:
        cause = _grown(chosen.peak.parts, tried.peak.parts)
    else:
        cause = _grown(chosen.time.seconds, time.seconds)
    return RefusedPlan(changes(plan, chosen.plan), "", excess, time.total - chosen.time.total, cause)


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    return max({**before, **after}, key=lambda name: after.get(name, 0.0) - before.get(name, 0.0))


def _told(source: str) -> str:
    """Where prices come from, without the long name of a calibration's file."""
    return "this machine's calibration" if source.startswith("/") else source
