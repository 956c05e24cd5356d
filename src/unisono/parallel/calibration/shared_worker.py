"""One of the ranks of a host that train together: what their steps take beside the sum of their costs.

    unisono run -n RANKS -m unisono.parallel.calibration.shared_worker FILE CALIBRATION

CALIBRATION is a file: the `ComputeCalibration` of this machine so far.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import unisono.parallel as up
from unisono.parallel.calibration.reference_models import Reference, reference_models, tiny
from unisono.parallel.calibration.worker import measure_as_rank
from unisono.planner.compute_calibration import ComputeCalibration, SharedSteps

WARM, ROUNDS = 4, 15
SHORT, LONG = 3, 9
"""Layers of tiny models: what they differ in grows with operators and calls, the rest is of a step."""

FEW, MANY = 2, 8
"""Micro-batches of a pipeline, which tell what a message takes."""

PROBE = 1e-3
"""Seconds that count the calls of a forecast."""

DECODE = msgspec.json.Decoder(ComputeCalibration).decode
LEAST_SCALE, MOST_SCALE = 0.5, 5.0


def measure() -> SharedSteps:
    """Tiny models tell what steps, operators and calls pay, larger ones what operators do."""
    ranks = dist.get_world_size()
    fit = _Fit(DECODE(Path(sys.argv[2]).read_bytes()), ranks)
    data = up.Plan(data=ranks)
    fit.grow("operator_s", [(data, SHORT), (data, LONG)])
    fit.found = msgspec.structs.replace(fit.found, step_s=max(0.0, fit.missing(data, SHORT)))
    again = up.Plan(data=ranks, recompute=True)
    fit.grow("again_s", [(data, LONG), (again, LONG)])
    if ranks % 2 == 0:
        half, cut = ranks // 2, up.Plan(data=ranks // 2, tensor=2)
        fit.grow("turn_s", [(cut, SHORT), (cut, LONG)])
        alone = fit.missing(cut, SHORT) + fit.found.alone_s if half == 1 else fit.found.step_s
        fit.found = msgspec.structs.replace(fit.found, alone_s=alone)
        few, many = (up.Plan(data=half, pipeline=2, micro_batches=each) for each in (FEW, MANY))
        fit.grow("message_s", [(few, SHORT), (many, SHORT)])
    together = fit.scale(data)
    apart = together if ranks % 2 else fit.scale(cut)
    return msgspec.structs.replace(fit.found, scale=together, cut_scale=apart)


class _Fit:
    """Steps of models beside what is said of them.

    Attributes:
        found: so far.
    """

    def __init__(self, compute: ComputeCalibration, ranks: int) -> None:
        self.found = SharedSteps(ranks)
        self._compute = compute
        self._taken: dict[tuple[str, int], float] = {}

    def missing(self, plan: up.Plan, layers: int) -> float:
        """Seconds of a step of a tiny model that the forecast has not."""
        key = str(plan), layers
        if key not in self._taken:
            self._taken[key] = _step(tiny(layers), plan)
        return self._taken[key] - self._said(tiny(layers), plan, self.found)

    def grow(self, name: str, steps: Sequence[tuple[up.Plan, int]]) -> None:
        """Charge what is missing of the second step more than of the first to the calls that it has more."""
        probe = msgspec.structs.replace(self.found, **{name: PROBE})
        calls = [
            (self._said(tiny(layers), plan, probe) - self._said(tiny(layers), plan, self.found)) / PROBE
            for plan, layers in steps
        ]
        first, second = (self.missing(*step) for step in steps)
        each = max(0.0, (second - first) / (calls[1] - calls[0]))
        self.found = msgspec.structs.replace(self.found, **{name: each})

    def scale(self, plan: up.Plan) -> float:
        """Of operators: the geometric mean of the ratios of larger models."""
        ratios = []
        for reference in reference_models():
            one, other = (self._said(reference, plan, _scaled(self.found, each)) for each in (1.0, 2.0))
            ratios.append(1.0 + (_step(reference, plan) - one) / (other - one))
        return statistics.geometric_mean(min(max(each, LEAST_SCALE), MOST_SCALE) for each in ratios)

    def _said(self, reference: Reference, plan: up.Plan, found: SharedSteps) -> float:
        """The forecast, of a batch of all data ranks."""
        compute = msgspec.structs.replace(self._compute, shared=(found,))
        batch: Any = tuple(torch.cat([part] * (_copies(plan) * plan.data)) for part in reference.batch)
        predictor = up.StepPredictor(
            reference.model, batch, loss=reference.loss, optimizer=_adamw, compute=compute,
            hosts=(0,) * plan.ranks,
        )  # fmt: skip
        return predictor.forecast(plan).total


def _scaled(found: SharedSteps, scale: float) -> SharedSteps:
    return msgspec.structs.replace(found, scale=scale, cut_scale=scale)


def _copies(plan: up.Plan) -> int:
    """Copies of a reference's batch that a data rank has: tensor ranks have the rows of all."""
    return max(plan.tensor, plan.micro_batches)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _step(reference: Reference, plan: up.Plan) -> float:
    """The median seconds of a step, the mean of all ranks."""
    batch: Any = tuple(torch.cat([part] * _copies(plan)) for part in reference.batch)
    run = up.parallelize(
        copy.deepcopy(reference.model), plan, optimizer=_adamw, loss=reference.loss,
        sample=batch[0] if plan.tensor > 1 else None,
    )  # fmt: skip
    taken = []
    for _ in range(WARM + ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        run.step(batch)
        taken.append(time.perf_counter() - began)
    median = torch.tensor(statistics.median(taken[WARM:]), dtype=torch.float64)
    dist.all_reduce(median)
    return float(median) / dist.get_world_size()


if __name__ == "__main__":
    measure_as_rank(measure)
