"""What PyTorch's operators take on the accelerator of a hardware file: the longer of their FLOPs and bytes.

A file says what whole steps get of its rates. PyTorch runs operators one by one, and each class gets another
share: those of an H100 are here, beside the shares of its file. A device runs what its host starts, and the
host takes the file's seconds of a kernel for each operator; a kernel that waits in the queue costs less.
Source: profiles of eight models and of single operators, benchmarks/results/2026-11-26-hardware-files.md and
2026-11-26-hardware-files-again.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from unisono.planner.hardware import Hardware
from unisono.planner.operator_costs import POINTS, OperatorCosts, tables

__all__ = ["operator_costs_of"]

BY_BYTES = ("light", "strided", "sums")
SIDES = tuple(float(64 << power) for power in range(11))
BYTES = ELEMENTS = (1e4, 1e6, 1e7, 3e7, 1e8, 3e8, 1e9)
WORK = (1e7, 1e8, 1e9, 1e10, 1e11, 1e13)
WIDTHS = (1.0, 16.0, 64.0, 256.0, 1024.0)
KEYS = (1.0, 128.0, 129.0, 256.0, 257.0, 384.0, 385.0, 512.0, 4096.0)
AXES = {
    **dict.fromkeys(POINTS, (ELEMENTS,)),
    **dict.fromkeys(BY_BYTES, (BYTES,)),
    "product": (SIDES, SIDES, SIDES),
    **{kind: (WIDTHS, WORK) for kind, axes in POINTS.items() if len(axes) == 2},
    **dict.fromkeys(("attention", "attention_backward"), (KEYS, WORK)),
}
"""Points are closer, and go on to larger sizes, than where a machine is measured: they cost nothing."""

STREAM = 1.25
"""The rate of an operator that only moves bytes, beside the share of `memory` that a step gets."""

QUEUED = 0.3
"""What the device takes for a kernel beside its work, beside the host's seconds for starting it."""

KERNELS = {
    "product": 2, "convolution": 5, "convolution_backward": 12, "attention": 2,
    "attention_backward": 4, "norm_backward": 2, "sums": 2, "embedding_backward": 6,
}  # fmt: skip
"""Kernels of one operator, where it has more than one."""

FOLLOWED, VIEWED = 0.8, 0.25
"""The host's seconds for what autograd adds to an operator, and for a view, beside those of a kernel."""

PASSES = {
    "light": 0.5, "strided": 0.65, "sums": 1.0, "heavy": 1.25, "softmax": 1.0, "softmax_backward": 2.6,
    "norm": 1.8, "norm_backward": 3.6, "batch_norm": 1.8, "batch_norm_backward": 3.9, "pool": 1.3,
    "pool_backward": 3.6, "embedding": 0.9, "embedding_backward": 6.0, "index": 2.0, "random": 1.3,
}  # fmt: skip
"""How often a class reads and writes its bytes. Those by bytes have what is read and what is written."""

LOW_PASSES = {
    "norm": 2.2, "norm_backward": 5.0, "batch_norm": 3.3, "batch_norm_backward": 7.6, "pool": 2.4,
    "pool_backward": 7.2, "embedding_backward": 10.0,
}  # fmt: skip
"""The same in 16 bits, where it is not as in f32: these kernels take about as long."""

LARGE, LARGE_PASSES = 1.5e8, {"softmax": 1.85, "softmax_backward": 2.0}
"""Elements from which on a softmax is of a vocabulary, whose rows do not stay in a kernel's memory."""

MATRIX, LOW_MATRIX = 0.77, 1.1
"""The rate of products, beside the share of `matrix` that a step gets; in f32 by TF32."""

ATTENTION = {"attention": 0.24, "attention_backward": 0.24}
LOW_ATTENTION = {"attention": 0.85, "attention_backward": 0.65}
"""The rate of fused attention, beside `attention`. In f32 it does not run on the units for products."""

TILE, TILED = 128.0, 512.0
"""Queries and keys are computed in tiles of so many; up to so many keys, what a tile lacks counts."""

CHANNELS = {16.0: 0.03, 64.0: 0.175, 256.0: 0.34, 1024.0: 0.42}
BACKWARD = 0.8
"""The share of the file's rate that a convolution of so many channels gets, and its backward's beside it."""

DEPTHWISE = {"convolution": 0.005, "convolution_backward": 0.0024}
"""The share of the rate in f32 where each channel is alone: no units for products, 16 bits take as long."""


def operator_costs_of(hardware: Hardware, types: Collection[str] = ()) -> OperatorCosts:
    """The costs of operators on one accelerator, and of the host that starts them.

    Args:
        types: in which plans compute, such as ("f32", "bf16"). The slowest of those of 16 bits counts.
    Raises:
        ValueError: the hardware has no rate for one of them, or for f32, in which every plan does some work.
    """
    for name in ("f32", *types):
        if name not in hardware.flops:
            raise ValueError(
                f"{hardware.name} has no rate for {name}, only {', '.join(hardware.flops)}: "
                f"add {name} to the [flops] of its file"
            )
    low = [hardware.flops[name] for name in types if name in ("bf16", "fp16")] or [hardware.flops["f32"]]
    whole = tables(_Kernels(hardware, hardware.flops["f32"], 4).seconds, AXES)
    half = tables(_Kernels(hardware, min(low), 2).seconds, AXES)
    lower = {f"{kind}_low": table for kind, table in half.items() if kind not in BY_BYTES}
    start = hardware.efficiency.kernel_s
    return OperatorCosts(
        1, 1, {**whole, **lower}, forward_s=FOLLOWED * start, backward_s=FOLLOWED * start,
        view_s=VIEWED * start, launch_s=start,
    )  # fmt: skip


class _Kernels:
    """Seconds of operators on the device.

    Args:
        flops: of products in the type of compute.  width: bytes of an element.
    """

    def __init__(self, hardware: Hardware, flops: float, width: int) -> None:
        share = hardware.efficiency
        self._flops, self._width, self._matrix = flops, width, share.matrix
        self._attention = share.attention or share.matrix
        self._bytes_per_s = hardware.memory_bytes_per_s * min(1.0, share.memory * STREAM)
        self._kernel_s = QUEUED * share.kernel_s
        self._low = width < 4
        self._shares: dict[str, Callable[[float], float]] = {
            "convolution": self._of_convolution("convolution", 1.0),
            "convolution_backward": self._of_convolution("convolution_backward", BACKWARD),
            "attention": self._of_attention("attention"),
            "attention_backward": self._of_attention("attention_backward"),
        }

    def _of_convolution(self, kind: str, beside: float) -> Callable[[float], float]:
        alone = DEPTHWISE[kind] * self._width / 4
        return lambda channels: beside * CHANNELS[channels] if channels > 1 else alone

    def _of_attention(self, kind: str) -> Callable[[float], float]:
        rate = self._attention * (LOW_ATTENTION if self._low else ATTENTION)[kind]
        return lambda keys: rate * (keys / (TILE * math.ceil(keys / TILE)) if keys < TILED else 1.0) ** 2

    def seconds(self, kind: str, *point: float) -> float:
        """An operator with its kernels."""
        return KERNELS.get(kind, 1) * self._kernel_s + self._work(kind, *point)

    def _work(self, kind: str, *point: float) -> float:
        if kind == "product":
            rows, inner, columns = point
            nbytes = self._width * (rows * inner + inner * columns + rows * columns)
            return self._product(2 * rows * inner * columns, nbytes)
        if kind == "batched":  # the harmonic mean of the sides says how many bytes belong to so much work
            side, work = point
            return self._product(work, 1.5 * self._width * work / side)
        if kind in self._shares:
            size, work = point
            work *= {"convolution_backward": 2.0, "attention_backward": 2.5}.get(kind, 1.0)
            return work / (self._shares[kind](size) * self._flops)
        (size,) = point
        nbytes = 2 * size * (1 if kind in BY_BYTES else self._width)
        return self._passes(kind, size) * nbytes / self._bytes_per_s

    def _product(self, work: float, nbytes: float) -> float:
        share = min(1.0, self._matrix * (LOW_MATRIX if self._low else MATRIX))
        return max(work / (share * self._flops), nbytes / self._bytes_per_s)

    def _passes(self, kind: str, size: float) -> float:
        if size > LARGE and kind in LARGE_PASSES:
            return LARGE_PASSES[kind]
        return LOW_PASSES.get(kind, PASSES[kind]) if self._low else PASSES[kind]
