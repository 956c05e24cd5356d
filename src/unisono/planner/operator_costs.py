"""Seconds of operators on a machine, by their class and size, as data; a roofline where nothing was measured.

| class | its point | |
|---|---|---|
| product | rows, inner size, columns | a bias is free |
| batched | the harmonic mean of the three, FLOPs | products of many small matrices; the mean says bytes |
| convolution, convolution_backward | channels of a group, FLOPs of forward | |
| attention, attention_backward | keys, FLOPs of forward | fused and causal; another one counts twice |
| light, heavy | bytes moved, elements | additions and copies; functions such as exp and GELU |
| strided, sums | bytes moved | copies that reorder, sums over a dimension |
| softmax, norm, batch_norm, pool and each with _backward | elements | |
| embedding, embedding_backward, index, random | elements | |

A class may have tables for types of 16 bits: "product_bf16" and "product_fp16" of one type, "norm_low" of
both. Where it has none, that of f32 counts.

Between measured points, log seconds are interpolated in log sizes. No PyTorch: `unisono calibrate --compute`
measures, and `unisono.parallel.costs` asks.

On the accelerator of a hardware file an operator takes the longer of its FLOPs and bytes. A file says what
whole steps get of its rates. PyTorch runs operators one by one, and each class gets another share: those of
an H100 are here, beside the shares of its file. A device runs what its host starts, and the host takes the
file's seconds of a kernel for each operator; a kernel that waits in the queue costs less.
Source: profiles of eight models and of single operators, benchmarks/results/2026-11-26-hardware-files.md and
2026-11-26-hardware-files-again.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping

import msgspec

from unisono.engine.costs.machine import MachineCalibration
from unisono.planner.hardware import Hardware

BY_BYTES = ("light", "strided", "sums")
BY_ELEMENTS = (
    "heavy", "softmax", "softmax_backward", "norm", "norm_backward", "batch_norm", "batch_norm_backward",
    "pool", "pool_backward", "embedding", "embedding_backward", "index", "random",
)  # fmt: skip
"""Classes by what their size is; bytes depend on the type."""

ELEMENTS = (1e3, 1.6e4, 2.5e5, 2e6, 1.2e7)
BYTES = (1e4, 2e5, 3e6, 2.5e7, 1.2e8)

POINTS: dict[str, tuple[tuple[float, ...], ...]] = {
    "product": ((8, 64, 512, 2048),) * 3,
    "batched": ((16, 64, 256), (1e5, 1e7, 1e9)),
    "convolution": ((4, 32, 128), (1e6, 3e7, 1e9)),
    "convolution_backward": ((4, 32, 128), (1e6, 3e7, 1e9)),
    "attention": ((32, 256, 1024), (1e6, 3e7, 1e9)),
    "attention_backward": ((32, 256, 1024), (1e6, 3e7, 1e9)),
    **dict.fromkeys(BY_BYTES, (BYTES,)),
    **dict.fromkeys(BY_ELEMENTS, (ELEMENTS,)),
}  # fmt: skip
"""Where each class is measured: the values of each axis of its point."""

POINTS_OF_LOW: dict[str, tuple[tuple[float, ...], ...]] = {
    f"{kind}_{low}": axes
    for low in ("bf16", "fp16")
    for kind, axes in {
        "product": ((16, 64, 512), (32, 128, 1024), (32, 128, 1024)),
        "batched": ((16, 64), (1e5, 1e7)),
        **dict.fromkeys(("convolution", "convolution_backward"), ((4, 32, 128), (1e6, 3e7))),
        **dict.fromkeys(("attention", "attention_backward"), ((16, 256), (1e5, 3e6, 3e7))),
    }.items()
}
"""The same on a CPU for types of 16 bits: of classes that multiply, which may lack fast kernels there."""


class CostTable(msgspec.Struct, frozen=True):
    """Seconds on a grid.

    Example: CostTable(((1.0, 100.0),), (1e-6, 1e-4)).at(10.0) == 1e-5.
    """

    axes: tuple[tuple[float, ...], ...]  # growing values of each axis
    seconds: tuple[float, ...]  # of each point, the last axis first
    kept: tuple[int, ...] = ()  # axes along which a larger value takes no longer

    def at(self, *point: float) -> float:
        """Seconds of a point: interpolated; beyond the largest value in proportion; below the least as there.

        Raises:
            ValueError: the point has another number of axes.
        """
        if len(point) != len(self.axes):
            raise ValueError(f"a point of {len(point)} axes, expected {len(self.axes)}")
        corners: list[list[tuple[int, float]]] = []
        factor = 1.0
        for number, (axis, value) in enumerate(zip(self.axes, point, strict=True)):
            if value > axis[-1] and number not in self.kept:
                factor *= value / axis[-1]
            corners.append(_between(axis, value))
        total = 0.0
        for corner in itertools.product(*corners):
            place, weight = 0, 1.0
            for axis, (at, share) in zip(self.axes, corner, strict=True):
                place, weight = place * len(axis) + at, weight * share
            if weight:
                total += weight * math.log(self.seconds[place])
        return math.exp(total) * factor

    @property
    def sane(self) -> bool:
        """Whether it has a positive number for each point."""
        return (
            len(self.seconds) == math.prod(map(len, self.axes))
            and all(axis and all(a < b for a, b in itertools.pairwise((0.0, *axis))) for axis in self.axes)
            and all(1e-9 <= each <= 1e4 for each in self.seconds)
        )


def _between(axis: tuple[float, ...], value: float) -> list[tuple[int, float]]:
    """The places around a value, and their shares."""
    if value <= axis[0] or len(axis) == 1:
        return [(0, 1.0)]
    if value >= axis[-1]:
        return [(len(axis) - 1, 1.0)]
    above = next(place for place, each in enumerate(axis) if each > value)
    share = math.log(value / axis[above - 1]) / math.log(axis[above] / axis[above - 1])
    return [(above - 1, 1.0 - share), (above, share)]


class OperatorCosts(msgspec.Struct, frozen=True):
    """What operators take on one rank, while as many ranks as share the cores compute."""

    ranks: int  # that computed at once, each with its share of the cores
    threads: int  # of a rank
    tables: dict[str, CostTable]  # of each class
    forward_s: float = 2e-6  # what autograd adds to an operator that it follows, and PyTorch's modules
    backward_s: float = 6e-6  # the same in backward
    view_s: float = 1.5e-6  # an operator that moves nothing
    # Phase ("forward", "backward", "update") -> a step over the sum of its operators: caches, new memory.
    scale: dict[str, float] = {}
    # Of the host for an operator that a device runs, beside its seconds there. Then forward_s, backward_s
    # and view_s are of the host. None: the host itself computes.
    launch_s: float | None = None

    def at(self, kind: str, *point: float, low: str = "") -> float:
        """Seconds of an operator.

        Args:
            low: "bf16" or "fp16" where it is of 16 bits.
        Raises:
            ValueError: there is no such class, or its points are others.
        """
        names = (f"{kind}_{low}", f"{kind}_low", kind) if low else (kind,)
        table = next((self.tables[name] for name in names if name in self.tables), None)
        if table is None:
            raise ValueError(f"no class of operators {kind!r}, expected one of {', '.join(self.tables)}")
        return table.at(*point)

    @property
    def sane(self) -> bool:
        """Whether its numbers are those of some machine."""
        times = (self.forward_s, self.backward_s, self.view_s)
        return (
            POINTS.keys() <= self.tables.keys() <= {*POINTS, *POINTS_OF_LOW, "product_low"}
            and all(
                table.sane and len(table.axes) == len(POINTS.get(kind) or POINTS[kind.rpartition("_")[0]])
                for kind, table in self.tables.items()
            )
            and all(0 <= each < 1 for each in times)
            and all(0.1 < each < 10 for each in self.scale.values())
            and min(self.ranks, self.threads) >= 1
        )


CORE_FLOPS = 4e10
"""FLOP/s of a core in f32, where nothing was measured: 16 a cycle at 2.5 GHz."""

WORK_OF = {"convolution_backward": 2.0, "attention_backward": 2.5}
"""FLOPs of a class, beside those of forward."""

SMALLER = 0.5
"""FLOP/s of batched products, convolutions and attention, beside those of one product."""

KERNEL_SECONDS = 3e-6
"""An operator that does nothing."""

PASSES = {
    "strided": 2.0, "softmax": 3.0, "softmax_backward": 3.0, "norm": 3.0, "norm_backward": 4.0,
    "batch_norm": 3.0, "batch_norm_backward": 4.0, "embedding": 2.0, "embedding_backward": 3.0, "index": 3.0,
    "heavy": 4.0, "random": 8.0, "pool": 4.0, "pool_backward": 4.0,
}  # fmt: skip
"""How often a class moves its bytes, of light operators once."""


def roofline(machine: MachineCalibration, ranks: int = 1) -> OperatorCosts:
    """What operators take where nothing was measured: the longer of their FLOPs and their bytes.

    Args:
        machine: its cores, and the bandwidth of memory.  ranks: that share the cores.
    """
    threads = max(1, machine.cores // ranks)
    rate = machine.copy.all_memory * threads if ranks > 1 else machine.copy.memory * math.sqrt(threads)
    return roofline_of(CORE_FLOPS * threads, rate, KERNEL_SECONDS, ranks=ranks, threads=threads)


def roofline_of(
    flops: float,
    rate: float,
    kernel_s: float,
    *,
    low: float = 0.5,
    ranks: int = 1,
    threads: int = 1,
) -> OperatorCosts:
    """The roofline of a rank with so many FLOP/s and bytes per second.

    Args:
        rate: bytes that are copied in a second.  kernel_s: an operator that does nothing.
        low: FLOP/s in 16 bits, beside those in f32.
    """

    def product(rows: float, inner: float, columns: float) -> float:
        nbytes = 4 * (rows * inner + inner * columns + rows * columns)
        return max(2 * rows * inner * columns / flops, nbytes / rate)

    def seconds(kind: str, *point: float) -> float:
        kind, whole = kind.removesuffix("_low"), kind
        if kind == "product":
            return product(*point) / (1 if kind == whole else low)
        if len(point) == 2:
            return WORK_OF.get(kind, 1.0) * point[1] / (SMALLER * flops)
        width = 0.5 if kind in BY_BYTES else 4  # of what is read, and written
        return PASSES.get(kind, 1.0) * width * point[0] / rate

    points = {**POINTS, "product_low": POINTS["product"]}
    found = tables(lambda kind, *point: kernel_s + seconds(kind, *point), points)
    return OperatorCosts(ranks, threads, found)


def tables(
    seconds: Callable[..., float], points: Mapping[str, tuple[tuple[float, ...], ...]] = POINTS
) -> dict[str, CostTable]:
    """The tables of all classes: `seconds(kind, *point)` is called for each point, in order.

    Beyond the largest value of a class's size the seconds of its FLOPs stay; others grow in proportion.
    """
    return {
        kind: CostTable(
            axes,
            tuple(seconds(kind, *point) for point in itertools.product(*axes)),
            (0,) if len(axes) == 2 else (),
        )
        for kind, axes in points.items()
    }


# ---- of a hardware file ----------------------------------------------------------------------------------

SIDES = tuple(float(64 << power) for power in range(11))
SIZES = (1e4, 1e6, 1e7, 3e7, 1e8, 3e8, 1e9)
WORK = (1e7, 1e8, 1e9, 1e10, 1e11, 1e13)
WIDTHS = (1.0, 16.0, 64.0, 256.0, 1024.0)
KEYS = (1.0, 128.0, 129.0, 256.0, 257.0, 384.0, 385.0, 512.0, 4096.0)
AXES = {
    **dict.fromkeys(POINTS, (SIZES,)),
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

DEVICE_PASSES = {
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
            return WORK_OF.get(kind, 1.0) * work / (self._shares[kind](size) * self._flops)
        (size,) = point
        nbytes = 2 * size * (1 if kind in BY_BYTES else self._width)
        return self._passes(kind, size) * nbytes / self._bytes_per_s

    def _product(self, work: float, nbytes: float) -> float:
        share = min(1.0, self._matrix * (LOW_MATRIX if self._low else MATRIX))
        return max(work / (share * self._flops), nbytes / self._bytes_per_s)

    def _passes(self, kind: str, size: float) -> float:
        if size > LARGE and kind in LARGE_PASSES:
            return LARGE_PASSES[kind]
        return LOW_PASSES.get(kind, DEVICE_PASSES[kind]) if self._low else DEVICE_PASSES[kind]
