"""One of the ranks of a host that train together: what their steps take beside the sum of their costs.

    unisono run -n RANKS -m unisono.parallel.calibration.shared_worker FILE CALIBRATION

CALIBRATION is a file: the `ComputeCalibration` of this machine so far.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
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
PROBE = 1e-3
"""Seconds of a turn that count the collectives of a forecast."""

DECODE = msgspec.json.Decoder(ComputeCalibration).decode
LEAST_SCALE, MOST_SCALE = 0.5, 5.0


def measure() -> SharedSteps:
    """Tiny models tell what a step and a collective pay, larger ones what operators do."""
    ranks = dist.get_world_size()
    compute = DECODE(Path(sys.argv[2]).read_bytes())
    data, cut = up.Plan(data=ranks), up.Plan(data=ranks // 2, tensor=2)

    def beside(plan: up.Plan, found: SharedSteps) -> float:
        return max(0.0, _step(tiny(), plan) - _said(tiny(), plan, compute, found))

    def scale(plan: up.Plan, found: SharedSteps) -> float:
        ratios = []
        for reference in reference_models():
            one, other = (_said(reference, plan, compute, _scaled(found, each)) for each in (1.0, 2.0))
            ratios.append(1.0 + (_step(reference, plan) - one) / (other - one))
        return statistics.geometric_mean(min(max(each, LEAST_SCALE), MOST_SCALE) for each in ratios)

    alone = SharedSteps(ranks)
    found = msgspec.structs.replace(alone, step_s=beside(data, alone))
    if ranks % 2 == 0:
        probe = msgspec.structs.replace(alone, turn_s=PROBE)
        calls = (_said(tiny(), cut, compute, probe) - _said(tiny(), cut, compute, alone)) / PROBE
        found = msgspec.structs.replace(found, turn_s=beside(cut, found) / calls)
    together = scale(data, found)
    apart = together if ranks % 2 else scale(cut, found)
    return msgspec.structs.replace(found, scale=together, cut_scale=apart)


def _scaled(found: SharedSteps, scale: float) -> SharedSteps:
    return msgspec.structs.replace(found, scale=scale, cut_scale=scale)


def _said(reference: Reference, plan: up.Plan, compute: ComputeCalibration, found: SharedSteps) -> float:
    """The forecast, of a batch of all data ranks."""
    compute = msgspec.structs.replace(compute, shared=(found,))
    ranks = dist.get_world_size()
    batch: Any = tuple(torch.cat([part] * ranks) for part in reference.batch)
    predictor = up.StepPredictor(
        reference.model, batch, loss=reference.loss, optimizer=_adamw, compute=compute, hosts=(0,) * ranks
    )
    return predictor.forecast(plan).total


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _step(reference: Reference, plan: up.Plan) -> float:
    """The median seconds of a step, the mean of all ranks. Ranks of the tensor axis have the rows of all."""
    batch: Any = tuple(torch.cat([part] * plan.tensor) for part in reference.batch)
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
