"""The answer of the planner: a plan, and everything that speaks for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from unisono.engine.base.validation import whole
from unisono.planner.choice_page import (
    RECOMPUTE_GROUPS,
    ChoicePage,
    PageCollective,
    point_of,
)
from unisono.planner.cluster_model import ClusterModel, HostUse, PlanModels
from unisono.planner.collectives import PlannedCollective
from unisono.planner.readable import readable_time, signed_time
from unisono.planner.search import PricedPlan, RefusedNeighbour
from unisono.planner.step_time import TimeModel
from unisono.planner.training_plan import TrainingJob, TrainingPlan, runtime_arguments

__all__ = ["PlanChoice", "refusal_text"]

GIB = 1 << 30

CAUSES = {
    "matrix": "matrix products",
    "other": "other operators",
    "recompute": "recomputation",
    "tensor": "tensor collectives",
    "context": "context exchange",
    "experts": "rows of experts",
    "messages": "pipeline messages",
    "bubble": "pipeline bubble",
    "data": "data collectives",
    "codec": "codec",
    "swap": "swapping",
    "update": "optimizer",
}
RARE = {"context", "experts", "codec", "swap"}
"""They are shown where they take time."""

MEMORY_CAUSES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "moments": "moments",
    "activations": "activations",
    "recomputed": "one layer again",
    "ends": "embedding, loss",
    "buffers": "buffers",
}


RECORDED = (
    "seconds", "tflops_per_gpu", "model_tflops_per_gpu", "memory_bytes", "limit_bytes", "fits", "limit",
    "candidates", "compute",
)  # fmt: skip
"""What is in a record as it is called here."""


class PlanChoice(NamedTuple):
    """A plan of a job, priced, with its reasons. `print` shows it on a screen.

    Attributes:
        job: what it is for.  chosen: the plan, its time and its memory, by cause.
        collectives: of a step, those that take longest first.
        next_best: up to five others that fit.  refused: the plans one step away.
        candidates: the plans that were compared.
    """

    job: TrainingJob
    chosen: PricedPlan
    collectives: list[PlannedCollective]
    next_best: list[PricedPlan]
    refused: list[RefusedNeighbour]
    candidates: int

    @property
    def plan(self) -> TrainingPlan:
        """The plan."""
        return self.chosen.plan

    @property
    def compute(self) -> str:
        """Its type of compute."""
        return self.plan.compute or self.job.compute

    @property
    def seconds(self) -> float:
        """A step."""
        return self.chosen.time.total

    @property
    def memory_bytes(self) -> int:
        """Of the fullest rank."""
        return self.chosen.memory.total

    @property
    def fits(self) -> bool:
        """Whether a rank has this memory."""
        return not self._model.memory.excess_bytes(self.plan, self.chosen.memory)

    @property
    def limit_bytes(self) -> int:
        """What the fullest rank may use; where hosts differ, the one that has least to spare."""
        return self._model.memory.limit_bytes(self.plan)

    @property
    def tflops_per_gpu(self) -> float:
        """TFLOP/s of a rank; what is computed again counts. Narayanan et al., 2021, equation 3."""
        return self._tflops(self.plan.recompute)

    @property
    def model_tflops_per_gpu(self) -> float:
        """The same without what is computed again."""
        return self._tflops("none")

    @property
    def limit(self) -> str:
        """The cause that takes the largest share of the step."""
        return max(zip(self.chosen.time, self.chosen.time._fields, strict=True))[1]

    @property
    def hosts(self) -> list[HostUse]:
        """What the hosts of each kind have, in the order of ranks; empty where all are equal."""
        model = self._model
        return model.placement(self.plan) if isinstance(model, ClusterModel) else []

    def runtime_arguments(self, before: int = 1) -> dict[str, Any]:
        """The arguments of `unisono.parallel.Plan` for this plan.

        Args:
            before: pieces of your model before its first layer; stages that differ are cut by pieces.
        Raises:
            ValueError: that runtime has nothing that was priced so; the text says what it has.
        """
        return runtime_arguments(self.plan, self.job, whole(before, "before", 0))

    def record(self) -> dict[str, Any]:
        """All of it as JSON has it; seconds and bytes. docs/planner.md lists the fields."""
        chosen, job = self.chosen, self.job
        return {
            **{name: getattr(self, name) for name in RECORDED},
            "plan": msgspec.structs.asdict(chosen.plan),
            "bubble_seconds": chosen.time.bubble,
            "time": chosen.time._asdict(),
            "memory": {name: round(value) for name, value in chosen.memory._asdict().items()},
            "collectives": [{**each._asdict(), "nbytes": round(each.nbytes)} for each in self.collectives],
            "next_best": [
                {
                    "plan": msgspec.structs.asdict(each.plan),
                    "seconds": each.time.total,
                    "memory_bytes": each.memory.total,
                }
                for each in self.next_best
            ],
            "refused": [each._asdict() for each in self.refused],
            "hosts": [each._asdict() for each in self.hosts],
            "parameters": job.shape.parameters,
            "gpus": job.ranks,
            "batch": job.batch,
            "hardware": job.hardware.name,
            "network": job.links.name,
            "efficiency": job.hardware.efficiency.source,
        }

    def html(self, plans: Iterable[PricedPlan] = ()) -> str:
        """One page with all of it, which needs no network. `plans`: further points of its picture."""
        return self.page(plans).html()

    def page(self, plans: Iterable[PricedPlan] = ()) -> ChoicePage:
        """What that page shows."""
        chosen, head = self.chosen, list(self._head())
        return ChoicePage(
            title=head[0],
            chosen=point_of(chosen),
            summary=[line.strip() for line in head[2:4]],
            time={
                CAUSES[name]: value
                for name, value in chosen.time._asdict().items()
                if value or name not in RARE
            },
            memory={MEMORY_CAUSES[name]: value for name, value in chosen.memory._asdict().items()},
            limit_bytes=self.limit_bytes,
            fits=self.fits,
            limit=CAUSES[self.limit],
            collectives=[
                PageCollective(f"{one.collective} ({one.axis})", *one[2:]) for one in self.collectives
            ],
            others=[point_of(each, chosen) for each in self.next_best],
            refused=[(each.change, refusal_text(each)) for each in self.refused],
            points=[point_of(each) for each in (chosen, *self.next_best, *plans)],
            groups=RECOMPUTE_GROUPS,
        )

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", *self.page().lines()])

    @property
    def _model(self) -> TimeModel | ClusterModel:
        return PlanModels(self.job).of(self.plan)

    def _tflops(self, recompute: str) -> float:
        return self.job.shape.step_flops(self.job.batch, recompute) / self.job.ranks / self.seconds / 1e12

    def _head(self) -> Iterator[str]:
        job, tokens = self.job, self.job.batch * self.job.shape.sequence
        network = f", {job.links.name}" if job.cluster is None and job.links.name != job.hardware.name else ""
        yield (
            f"{_count(job.shape.parameters)} parameters, {job.batch} sequences of "
            f"{job.shape.sequence} a step, {self._accelerators()}{network}, {self.compute}"
        )
        yield f"  {self.plan}"
        again = f" ({self.model_tflops_per_gpu:.1f} of the model)" if self.plan.recompute != "none" else ""
        yield (
            f"  {readable_time(self.seconds)} a step, {tokens / self.seconds:,.0f} tokens/s, "
            f"{self.tflops_per_gpu:.1f} TFLOP/s a GPU{again}"
        )
        yield f"  efficiencies of {job.hardware.name}: {job.hardware.efficiency.source}"
        state = "fits" if self.fits else "DOES NOT FIT"
        best = f"; the best of {self.candidates:,} plans" if self.candidates > 1 else ""
        used = f"{_gib(self.memory_bytes)} of {_gib(self.limit_bytes)} GiB"
        yield f"  {used} on the fullest rank: {state}{best}"
        yield from map(_host_line, self.hosts)

    def _accelerators(self) -> str:
        name, count = self.job.hardware.name, self.job.ranks
        return f"{count} x {name}" if self.job.cluster is None else f"{count} on hosts {name}"


def _host_line(each: HostUse) -> str:
    first, last = each.ranks
    layers = ",".join(f"{count}" for count in each.layers)
    used = f"{_gib(each.memory_bytes)} of {_gib(each.limit_bytes)} GiB"
    return f"    ranks {first} to {last}: {each.hosts}; layers {layers}; micro-batches of {each.rows}; {used}"


def refusal_text(each: RefusedNeighbour) -> str:
    """The byte or the second that refuses a neighbour."""
    if each.problem:
        return each.problem
    slower = signed_time(each.excess_s)
    if each.excess_bytes:
        return f"{_gib(each.excess_bytes)} GiB too many; {slower}"
    return f"{slower} ({CAUSES[each.cause[0]]} {signed_time(each.cause[1])})"


def _count(number: int) -> str:
    if number < 1e6:
        return f"{number:,}"
    return f"{number / 1e9:.4g} billion" if number >= 1e9 else f"{number / 1e6:.4g} million"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f}"
