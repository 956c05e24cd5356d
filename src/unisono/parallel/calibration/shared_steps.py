"""Measures what steps of ranks that train together on a host take beside the sum of their costs."""

from __future__ import annotations

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

import unisono.parallel as up
from unisono.parallel.calibration.reference_models import (
    Reference,
    adamw,
    mean_of_ranks,
    reference_models,
    timed,
    tiny,
)
from unisono.parallel.costs.task import TrainingTask
from unisono.parallel.costs.trace import TracedRows
from unisono.planner.compute_calibration import ComputeCalibration, SharedSteps

ROUNDS, ROUND_SECONDS = 3, 0.04
"""Each model takes its turn in each round: the machine may become faster or slower meanwhile."""

LEAST_STEPS, MOST_STEPS = 4, 25
SHORT, LONG = 3, 9
"""Layers of tiny models: a long one shows what operators and calls pay, a short one what a step pays."""

FEW, MANY = 2, 8
"""Micro-batches of a pipeline, which tell what a message takes."""

PROBE = 1e-3
"""Seconds that count the calls of a forecast."""

CUT = ("gpt", "mlp")
"""The larger models that the tensor axis cuts."""

LEAST_SCALE, MOST_SCALE = 0.5, 5.0


class _Trained(NamedTuple):
    """A model under a plan: a tiny one of so many layers, or one of the larger ones, by its name."""

    plan: up.Plan
    model: int | str

    def reference(self) -> Reference:
        if isinstance(self.model, int):
            return tiny(self.model)
        return next(each for each in reference_models() if each.name == self.model)


def measure_shared_steps(so_far: ComputeCalibration) -> SharedSteps | None:
    """Tiny models tell what steps, operators and calls pay, larger ones what operators do.

    Args:
        so_far: the figures of this machine.
    Returns:
        on rank 0; None on the others.
    """
    torch.manual_seed(0)  # ranks that share their sequences have the same
    ranks, names = dist.get_world_size(), [each.name for each in reference_models()]
    even, half = ranks % 2 == 0, ranks // 2
    data, sharded = up.Plan(data=ranks), up.Plan(data=ranks, zero=1)
    again = up.Plan(data=ranks, recompute=True)
    units = up.Plan(data=ranks, zero=1, precision="bf16")  # each layer is one
    wanted = [_Trained(data, SHORT), _Trained(sharded, SHORT), _Trained(data, LONG), _Trained(again, LONG)]
    wanted += [_Trained(units, SHORT), _Trained(units, LONG)]
    wanted += [_Trained(data, name) for name in names]
    if even:
        cut, context = up.Plan(data=half, tensor=2), up.Plan(data=half, context=2)
        few, many = (up.Plan(data=half, pipeline=2, micro_batches=each) for each in (FEW, MANY))
        split = up.Plan(data=half, pipeline=2, micro_batches=FEW, schedule="zb-h1")
        wanted += [_Trained(few, SHORT), _Trained(many, SHORT), _Trained(few, LONG), _Trained(split, LONG)]
        wanted += [_Trained(context, LONG), _Trained(cut, LONG)]
        wanted += [*(_Trained(few, name) for name in names), *(_Trained(cut, name) for name in CUT)]
    taken = _steps(wanted)
    if dist.get_rank():
        return None
    fit = _Fit(so_far, ranks, taken)
    fit.set(step_s=max(0.0, fit.missing(data)), sharded_s=fit.missing(sharded))
    fit.charge("again_s", (again, LONG), beside=(data, LONG))
    if even:
        fit.charge("message_s", (many, SHORT), beside=(few, SHORT))
        fit.charge("split_s", (split, LONG), beside=(few, LONG))
        fit.set(alone_s=fit.missing(few) if half == 1 else fit.found.step_s)
        fit.charge("turn_s", (cut, LONG))
        fit.charge("replay_s", (context, LONG))
    fit.charge("low_parameter_s", (units, LONG), beside=(units, SHORT), least=-1.0)
    together = fit.scale(data, names)
    fit.set(
        scale=together,
        cut_scale=fit.scale(cut, CUT) if even else together,
        stage_scale=fit.scale(few, names) if even else together,
    )
    return fit.found


class _Fit:
    """Steps of models beside what is said of them.

    Attributes:
        found: so far.
    """

    def __init__(self, compute: ComputeCalibration, ranks: int, taken: dict[_Trained, float]) -> None:
        self.found = SharedSteps(ranks)
        self._compute, self._taken = compute, taken
        self._models: dict[int | str, Reference] = {}
        self._traces: dict[int | str, TracedRows] = defaultdict(TracedRows)

    def set(self, **found: float) -> None:
        self.found = msgspec.structs.replace(self.found, **found)

    def missing(self, plan: up.Plan, layers: int = SHORT) -> float:
        """Seconds of a step of a tiny model that the forecast has not."""
        trained = _Trained(plan, layers)
        return self._taken[trained] - self._said(trained, self.found)

    def charge(
        self,
        name: str,
        step: tuple[up.Plan, int],
        beside: tuple[up.Plan, int] | None = None,
        least: float = 0.0,
    ) -> None:
        """Charge what is missing of a step to its calls; `beside`: what it has more than another one."""
        probe = msgspec.structs.replace(self.found, **{name: PROBE})
        calls = missing = 0.0
        for each, sign in ((step, 1.0), (beside, -1.0)):
            if each is not None:
                trained = _Trained(*each)
                calls += sign * (self._said(trained, probe) - self._said(trained, self.found)) / PROBE
                missing += sign * self.missing(*each)
        self.set(**{name: max(least, missing / calls)})

    def scale(self, plan: up.Plan, names: Sequence[str]) -> float:
        """Of operators: the geometric mean of the ratios of larger models."""
        ratios = []
        for trained in (_Trained(plan, name) for name in names):
            one, other = (self._said(trained, _scaled(self.found, each)) for each in (1.0, 2.0))
            ratios.append(1.0 + (self._taken[trained] - one) / (other - one))
        return statistics.geometric_mean(min(max(each, LEAST_SCALE), MOST_SCALE) for each in ratios)

    def _said(self, trained: _Trained, found: SharedSteps) -> float:
        """The forecast, of a batch of all data ranks."""
        plan, compute = trained.plan, msgspec.structs.replace(self._compute, shared=(found,))
        model, batch, loss = self._models.setdefault(trained.model, trained.reference())[1:]
        task = TrainingTask(
            model, batch, len(batch[0]) * _copies(plan) * plan.data, adamw, loss,
            traces=self._traces[trained.model],
        )  # fmt: skip
        predictor = up.StepPredictor.of(task, compute=compute, hosts=(0,) * plan.ranks)
        return predictor.forecast(plan).total


def _scaled(found: SharedSteps, scale: float) -> SharedSteps:
    return msgspec.structs.replace(found, scale=scale, cut_scale=scale, stage_scale=scale)


def _copies(plan: up.Plan) -> int:
    """Copies of a reference's batch that a data rank has: ranks of other axes have the rows of all."""
    return max(plan.tensor, plan.context, plan.micro_batches)


def _steps(wanted: Sequence[_Trained]) -> dict[_Trained, float]:
    """The median seconds of a step of each, the mean of all ranks. They take turns."""
    runs = {each: _step_of(each) for each in wanted}
    taken: dict[_Trained, list[float]] = {each: [] for each in wanted}
    for number in range(ROUNDS + 1):
        for each, step in runs.items():
            steps = [timed(step, time.perf_counter) for _ in range(LEAST_STEPS)]
            (more,) = mean_of_ranks([ROUND_SECONDS / steps[-1]])
            count = min(MOST_STEPS, round(more))
            steps += [timed(step, time.perf_counter) for _ in range(LEAST_STEPS, count)]
            if number:
                taken[each].append(statistics.median(steps[1:]))
    return dict(zip(taken, mean_of_ranks(map(statistics.median, taken.values())), strict=True))


def _step_of(trained: _Trained) -> Callable[[], object]:
    plan, reference = trained.plan, trained.reference()
    batch: Any = tuple(torch.cat([part] * _copies(plan)) for part in reference.batch)
    sample = batch[0] if plan.tensor > 1 or plan.context > 1 else None
    model = copy.deepcopy(reference.model)
    run = up.parallelize(model, plan, optimizer=adamw, loss=reference.loss, sample=sample)
    return lambda: run.step(batch)
