"""What operators take on this GPU, and what its host takes to start them: measured in some seconds.

A GPU runs what the host has queued. So each call is timed on the device while a queue is full, and apart
from it the host's seconds of operators too small for the device to count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unisono.parallel.calibration.operator_cases import call_of
from unisono.planner.operator_costs import BY_BYTES, BY_ELEMENTS, OperatorCosts, tables

__all__ = ["NEEDED_BYTES", "device_costs"]

BYTES = (1e5, 3e6, 3e7, 3e8)
ELEMENTS = (1e5, 1e6, 1e7, 4e7)
POINTS: dict[str, tuple[tuple[float, ...], ...]] = {
    "product": ((64, 1024, 8192), (256, 1024, 4096), (256, 1024, 8192)),
    "batched": ((32, 128, 512), (1e7, 1e9, 3e10)),
    "convolution": ((16, 64, 256), (1e8, 1e9, 1e10)),
    "convolution_backward": ((16, 64, 256), (1e8, 1e9, 1e10)),
    "attention": ((128, 512, 2048), (1e8, 1e9, 1e10)),
    "attention_backward": ((128, 512, 2048), (1e8, 1e9, 1e10)),
    **dict.fromkeys(BY_BYTES, (BYTES,)),
    **dict.fromkeys(BY_ELEMENTS, (ELEMENTS,)),
}
"""Where each class is measured. On a GPU both types have a table of their own."""

LOW = {f"{kind}_low": axes for kind, axes in POINTS.items() if kind not in BY_BYTES}

NEEDED_BYTES = 2 << 30
"""Of free memory, for the largest of these calls."""

ROUNDS, CALLS = 3, 6
AHEAD = 1e-3
"""So long the device is busy before timed calls begin: by then the host has queued all of them."""

LEAST = 1e-7
MANY = 200  # small operators


def device_costs(flops: float) -> OperatorCosts:
    """The costs of operators on this GPU. Its generator of random numbers has its state again after it.

    Args:
        flops: of a product of f32, per second.
    """
    queue = _DeviceQueue(flops)
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        measured = tables(lambda kind, *point: queue.seconds(kind, torch.float32, point), POINTS)
        measured |= tables(
            lambda kind, *point: queue.seconds(kind.removesuffix("_low"), torch.bfloat16, point), LOW
        )
    torch.cuda.empty_cache()
    launch, forward, backward, view = _host_seconds()
    return OperatorCosts(
        1, 1, measured, max(0.0, forward - launch), max(0.0, backward - launch), view, launch_s=launch
    )


class _DeviceQueue:
    """Times calls on the device alone."""

    def __init__(self, flops: float) -> None:
        self._busy = torch.ones(2048, 2048, device="cuda")
        self._ahead = max(1, math.ceil(AHEAD / (2 * 2048**3 / flops)))

    def seconds(self, kind: str, dtype: torch.dtype, point: tuple[float, ...]) -> float:
        """The least seconds of one call, of some rounds."""
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(dtype)  # the cases make their tensors of it
            with torch.device("cuda"):
                call = call_of(kind, point)
                call()
                return max(LEAST, min(self._round(call) for _ in range(ROUNDS)))
        finally:
            torch.set_default_dtype(before)

    def _round(self, call: Callable[[], Any]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(self._ahead):
            torch.mm(self._busy, self._busy)
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / CALLS


def _host_seconds() -> tuple[float, float, float, float]:
    """Of the host: an operator, one of a module that autograd follows, its backward, and a view."""
    small = torch.ones(8, device="cuda")
    model = nn.Sequential(*(nn.Hardtanh() for _ in range(MANY)))
    followed = small.clone().requires_grad_()

    def alone() -> None:
        for _ in range(MANY):
            small.mul(2.0)

    def views() -> None:
        for _ in range(MANY):
            small.view(2, 4)

    def forward() -> None:
        made.append(model(followed).sum())

    def backward() -> None:
        made.pop().backward()

    made: list[torch.Tensor] = []
    found = [math.inf] * 4
    for _ in range(ROUNDS + 1):  # the first is slower
        for place, work in enumerate((alone, forward, backward, views)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            found[place] = min(found[place], (time.perf_counter() - began) / MANY)
    launch, ahead, back, view = found
    return launch, ahead, back, view
