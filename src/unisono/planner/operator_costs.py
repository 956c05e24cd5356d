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
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import msgspec

from unisono.engine.costs.machine import MachineCalibration

__all__ = ["POINTS", "POINTS_OF_LOW", "CostTable", "OperatorCosts", "roofline", "roofline_of"]

ELEMENTS = (1e3, 1.6e4, 2.5e5, 2e6, 1.2e7)
BYTES = (1e4, 2e5, 3e6, 2.5e7, 1.2e8)

POINTS: dict[str, tuple[tuple[float, ...], ...]] = {
    "product": ((8, 64, 512, 2048),) * 3,
    "batched": ((16, 64, 256), (1e5, 1e7, 1e9)),
    "convolution": ((4, 32, 128), (1e6, 3e7, 1e9)),
    "convolution_backward": ((4, 32, 128), (1e6, 3e7, 1e9)),
    "attention": ((32, 256, 1024), (1e6, 3e7, 1e9)),
    "attention_backward": ((32, 256, 1024), (1e6, 3e7, 1e9)),
    **dict.fromkeys(("light", "strided", "sums"), (BYTES,)),
    **dict.fromkeys(
        (
            "heavy", "softmax", "softmax_backward", "norm", "norm_backward", "batch_norm",
            "batch_norm_backward", "pool", "pool_backward", "embedding", "embedding_backward", "index",
            "random",
        ),
        (ELEMENTS,),
    ),
}  # fmt: skip
"""Where each class is measured: the values of each axis of its point."""

LOW_TYPES = ("bf16", "fp16")
POINTS_OF_LOW: dict[str, tuple[tuple[float, ...], ...]] = {
    f"{kind}_{low}": axes
    for low in LOW_TYPES
    for kind, axes in {
        "product": ((16, 64, 512), (32, 128, 1024), (32, 128, 1024)),
        "batched": ((16, 64), (1e5, 1e7)),
        **dict.fromkeys(("convolution", "convolution_backward"), ((4, 32, 128), (1e6, 3e7))),
        **dict.fromkeys(("attention", "attention_backward"), ((16, 256), (1e5, 3e6, 3e7))),
    }.items()
}
"""The same on a CPU for types of 16 bits: of classes that multiply, which may lack fast kernels there."""

KEPT_RATE = {"batched": (0,), "convolution": (0,), "convolution_backward": (0,), "attention": (0,)}
KEPT_RATE["attention_backward"] = (0,)
KEPT_RATE |= {f"{kind}_{low}": kept for kind, kept in KEPT_RATE.items() for low in (*LOW_TYPES, "low")}
"""Axes beyond whose largest value the seconds stay; along the others they grow in proportion."""


class CostTable(msgspec.Struct, frozen=True):
    """Seconds on a grid.

    Attributes:
        axes: growing values of each axis.  seconds: of each point, the last axis first.
        kept: axes along which a larger value takes no longer.
    Example: CostTable(((1.0, 100.0),), (1e-6, 1e-4)).at(10.0) == 1e-5.
    """

    axes: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]
    kept: tuple[int, ...] = ()

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
    """What operators take on one rank, while as many ranks as share the cores compute.

    Attributes:
        ranks: that computed at once, each with its share of the cores.  threads: of a rank.
        tables: of each class.
        forward_s, backward_s: what autograd adds to an operator that it follows, and PyTorch's modules.
        view_s: an operator that moves nothing.
        launch_s: of the host for an operator that a device runs, beside its seconds there. Then forward_s,
            backward_s and view_s are of the host. None: the host itself computes.
        scale: phase ("forward", "backward", "update") -> a training step over the sum of its operators, as
            reference models show it: caches, memory that is new.
    """

    ranks: int
    threads: int
    tables: dict[str, CostTable]
    forward_s: float = 2e-6
    backward_s: float = 6e-6
    view_s: float = 1.5e-6
    scale: dict[str, float] = {}
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
    rate = machine.copy.memory * math.sqrt(threads)
    if ranks > 1:
        rate = machine.copy.all_memory * threads
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

    smaller = SMALLER * flops
    formulas: dict[str, Callable[..., float]] = {
        "product": product,
        "product_low": lambda *sizes: product(*sizes) / low,
        "batched": lambda _, work: work / smaller,
        "convolution": lambda _, work: work / smaller,
        "convolution_backward": lambda _, work: 2 * work / smaller,
        "attention": lambda _, work: work / smaller,
        "attention_backward": lambda _, work: 2.5 * work / smaller,
        "light": lambda nbytes: nbytes / 2 / rate,
        "sums": lambda nbytes: nbytes / 2 / rate,
        "strided": lambda nbytes: nbytes / rate,
    }
    return OperatorCosts(
        ranks, threads,
        tables(
            lambda kind, *point: kernel_s + _formula(formulas, kind, rate)(*point),
            {**POINTS, "product_low": POINTS["product"]},
        ),
    )  # fmt: skip


def _formula(formulas: Mapping[str, Callable[..., float]], kind: str, rate: float) -> Callable[..., float]:
    return formulas.get(kind) or (lambda elements: PASSES[kind] * 4 * elements / rate)


def tables(
    seconds: Callable[..., float], points: Mapping[str, tuple[tuple[float, ...], ...]] = POINTS
) -> dict[str, CostTable]:
    """The tables of all classes: `seconds(kind, *point)` is called for each point, in order."""
    return {
        kind: CostTable(
            axes,
            tuple(seconds(kind, *point) for point in itertools.product(*axes)),
            KEPT_RATE.get(kind, ()),
        )
        for kind, axes in points.items()
    }
