"""What operators take on the accelerator of a hardware file: the longer of their FLOPs and their bytes.

The shares of the rates and the seconds of a kernel are those of the file. A kernel starts when the one before
it has ended, so the host's seconds for starting it are part of its own.
"""

from __future__ import annotations

from collections.abc import Collection

from unisono.planner.hardware import Hardware
from unisono.planner.operator_costs import POINTS, OperatorCosts, roofline_of

__all__ = ["operator_costs_of"]

BY_BYTES = ("light", "strided", "sums")
SIDES = (64, 256, 1024, 4096, 16384)
BYTES = ELEMENTS = (1e4, 1e6, 1e7, 1e8, 1e9)
WORK = (1e7, 1e9, 1e10, 1e11, 1e13)
AXES = {
    **dict.fromkeys(POINTS, (ELEMENTS,)),
    **dict.fromkeys(BY_BYTES, (BYTES,)),
    "product": (SIDES, SIDES, SIDES),
    **{kind: (axes[0], WORK) for kind, axes in POINTS.items() if len(axes) == 2},
}
"""Points are closer, and go on to larger sizes, than where a machine is measured: they cost nothing."""


def operator_costs_of(hardware: Hardware, types: Collection[str] = ()) -> OperatorCosts:
    """The costs of operators on one accelerator.

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
    share = hardware.efficiency
    low = [hardware.flops[name] for name in types if name in ("bf16", "fp16")] or [hardware.flops["f32"]]
    rate = hardware.memory_bytes_per_s * share.memory / 2  # of a copy, which reads and writes
    whole, half = (
        roofline_of(
            flops * share.matrix,
            rate * elements,
            share.kernel_s,
            grouped=1.0,
            attention=(share.attention or share.matrix) / share.matrix,
            points=AXES,
        ).tables
        for flops, elements in ((hardware.flops["f32"], 1), (min(low), 2))
    )
    lower = {f"{kind}_low": table for kind, table in half.items() if kind in POINTS and kind not in BY_BYTES}
    return OperatorCosts(1, 1, {**whole, **lower}, forward_s=0.0, backward_s=0.0, view_s=0.0, launch_s=0.0)
