"""One rank of `unisono calibrate --compute`: times operators while all ranks do; rank 0 writes the result.

unisono run -n RANKS -m unisono.parallel.calibration.operator_worker FILE
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from unisono.engine.costs.machine import MachineCalibration
from unisono.parallel.calibration.operator_cases import call_of
from unisono.parallel.calibration.reference_models import (
    PhaseSeconds,
    Reference,
    clock,
    reference_models,
    timed_phases,
    tiny,
)
from unisono.parallel.calibration.worker import measure_as_rank
from unisono.parallel.costs.predictor import StepPredictor
from unisono.parallel.plan import Plan
from unisono.parallel.sharded_parameters import TYPES
from unisono.planner.compute_calibration import ComputeCalibration
from unisono.planner.operator_costs import POINTS_OF_LOW, OperatorCosts, tables

BATCH_SECONDS, BATCHES = 2e-3, 4
LEAST_SECONDS = 1e-7
HELD_BYTES = 48 << 20
"""Of results that stay, as activations do, before they are freed together."""

ROUNDS = 7


def measure() -> OperatorCosts:
    """The costs of operators on this rank; the mean of all ranks."""
    torch.manual_seed(dist.get_rank())
    dist.barrier()
    mine = tables(_cost) | tables(_low_cost, POINTS_OF_LOW)
    found = {name: msgspec.structs.replace(one, seconds=_mean(one.seconds)) for name, one in mine.items()}
    view = torch.zeros(4, 4)
    threads, ranks = torch.get_num_threads(), dist.get_world_size()
    (view_s,) = _mean([_timed(lambda: view.view(16))])
    costs = OperatorCosts(ranks, threads, found, 0.0, 0.0, view_s)
    return _with_scale(_with_overhead(costs))


def _cost(kind: str, *point: float) -> float:
    return _timed(call_of(kind, point))


def _low_cost(kind: str, *point: float) -> float:
    """The same of tensors of the type of 16 bits that the name ends with."""
    kind, _, low = kind.rpartition("_")
    try:
        torch.set_default_dtype(TYPES[low])
        return _cost(kind, *point)
    finally:
        torch.set_default_dtype(torch.float32)


def _timed(call: Callable[[], Any]) -> float:
    """The least mean of some batches of calls, whose results stay until the batch ends."""
    began = clock()
    held = [call()]
    once = clock() - began
    nbytes = sum(t.numel() * t.element_size() for t in _tensors(held[0])) or 1
    count = max(1, min(200, int(BATCH_SECONDS / max(once, 1e-6)), HELD_BYTES // nbytes))
    best = once if once > 0.3 else float("inf")
    for _ in range(BATCHES if once <= 0.3 else 1):
        held.clear()
        began = clock()
        held = [call() for _ in range(count)]
        best = min(best, (clock() - began) / count)
    return max(best, LEAST_SECONDS)


def _tensors(result: Any) -> list[torch.Tensor]:
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _mean(seconds: Sequence[float]) -> tuple[float, ...]:
    """The means over ranks."""
    total = torch.tensor([*seconds], dtype=torch.float64)
    dist.all_reduce(total)
    return tuple((total / dist.get_world_size()).tolist())


def _phases(reference: Reference) -> PhaseSeconds:
    return PhaseSeconds(*_mean(timed_phases(reference, ROUNDS, dist.barrier)))


def _predicted(reference: Reference, costs: OperatorCosts) -> PhaseSeconds:
    calibration = ComputeCalibration("", str(torch.__version__), "", costs.threads, (costs,))
    predictor = StepPredictor(
        reference.model, reference.batch, loss=reference.loss, compute=calibration,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), machine=MachineCalibration(),
    )  # fmt: skip
    seconds = predictor.forecast(Plan()).seconds
    return PhaseSeconds(seconds["forward"], seconds["backward"], seconds["update"])


def _with_overhead(costs: OperatorCosts) -> OperatorCosts:
    """What autograd and modules add to an operator: what a tiny model takes beside its operators."""
    reference = tiny()
    measured, alone = _phases(reference), _predicted(reference, costs)
    more = _predicted(reference, msgspec.structs.replace(costs, forward_s=1e-6, backward_s=1e-6))

    def overhead(phase: int) -> float:
        operators = (more[phase] - alone[phase]) / 1e-6
        return max(0.0, (measured[phase] - alone[phase]) / operators)

    return msgspec.structs.replace(costs, forward_s=overhead(0), backward_s=overhead(1))


def _with_scale(costs: OperatorCosts) -> OperatorCosts:
    """What a step of larger models takes beside the sum: the geometric mean of the ratios."""
    scale = dict.fromkeys(PhaseSeconds._fields, 1.0)
    references = reference_models()
    for reference in references:
        measured, predicted = _phases(reference), _predicted(reference, costs)
        for phase, took, said in zip(scale, measured, predicted, strict=True):
            scale[phase] *= (took / said) ** (1 / len(references))
    return msgspec.structs.replace(costs, scale=scale)


if __name__ == "__main__":
    measure_as_rank(measure)
