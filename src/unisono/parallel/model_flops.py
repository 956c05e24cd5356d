"""Model FLOPs utilization: what a training computes, as a share of what its ranks could.

MFU = FLOPs of forward and backward of all rows / seconds / (ranks * peak of a rank). What is computed again
in backward does not count. Source: Chowdhery et al., PaLM, 2022 (arXiv:2204.02311), appendix B.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .batches import rows_of
from .graph.capture import CaptureError, capture
from .sharded_parameters import TYPES

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Utilization"]

BACKWARD = 3.0  # forward once, backward twice: gradients of inputs and of weights
SIDE = 1024  # of the matrices whose product is timed
ROUNDS = 5


class Utilization:
    """The MFU of a run.

    Args:
        flops: of forward and backward of one row. None: three times those of forward, from the recorded
            model.
        peak: FLOP/s of one rank; "measured": that of a matrix product, on all ranks at once.
    Raises:
        TypeError, ValueError: wrong arguments; or `flops` is needed, because the plan has changed the model.
    """

    def __init__(self, run: Run, flops: float | None, peak: float | str) -> None:
        if isinstance(peak, str) and peak != "measured":
            raise ValueError(f"Progress: peak is {peak!r}, expected FLOP/s of a rank or 'measured'")
        for name, value in (("flops", flops), ("peak", peak)):
            _check_number(name, value)
        plan = run.plan
        plain = plan.tensor == plan.pipeline == 1 and plan.zero == 0 and not plan.low
        if flops is None and (not plain or plan.swap is not None):
            raise ValueError(
                f"Progress: under {plan} the model cannot be recorded any more. Before parallelize, write "
                "graph = up.capture(model, inputs), and here flops=3 * graph.flops / rows of the inputs"
            )
        self._run, self._flops, self._peak, self._measured = run, flops, peak, ""

    def begin(self, inputs: Any) -> None:
        """Count the FLOPs of a row, and measure, where that is asked for. All ranks call this.

        Raises:
            ValueError: the model cannot be recorded; the text says why.
        """
        if self._flops is None:
            try:
                self._flops = BACKWARD * capture(self._run.model, inputs).flops / rows_of(inputs)
            except CaptureError as error:
                raise ValueError(f"Progress: write flops=, the FLOPs of a row: {error}") from error
        if self._peak == "measured":
            dist.barrier(group=self._run.mesh.everyone.world)
            self._peak, self._measured = measured_peak(self._run), " (measured)"

    def text(self, rows: float, seconds: float) -> str:
        """Example: MFU 38.1% of 41.2 GFLOP/s per rank (measured)."""
        assert self._flops is not None
        assert not isinstance(self._peak, str)
        share = self._flops * rows / seconds / (self._peak * self._run.plan.ranks)
        unit, name = (1e12, "TFLOP/s") if self._peak >= 1e12 else (1e9, "GFLOP/s")
        return f"MFU {share:.1%} of {self._peak / unit:.1f} {name} per rank{self._measured}"


def measured_peak(run: Run) -> float:
    """FLOP/s of a product of two matrices in the type of compute, the best of some rounds."""
    kind = TYPES.get(run.plan.precision, torch.bfloat16)  # autocast
    left, right = (torch.ones(SIDE, SIDE, dtype=kind, device=run.mesh.axes.device_type) for _ in range(2))
    best = math.inf
    for _ in range(ROUNDS):
        _finish(left)
        began = time.perf_counter()
        _finish(left @ right)
        best = min(best, time.perf_counter() - began)
    return 2.0 * SIDE**3 / best


def _finish(tensor: torch.Tensor) -> None:
    """Wait for the device."""
    float(tensor[0, 0])


def _check_number(name: str, value: object) -> None:
    if value is None or isinstance(value, str):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"Progress: {name} is {value!r}, expected a number")
    if not 0 < value < math.inf:
        raise ValueError(f"Progress: {name} is {value}; it must be positive")
