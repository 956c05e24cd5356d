"""What the host of a GPU does in a step, counted in starts: the time in which it starts a small operator.

Source: eight models too small for the device to count, under six plans of one rank each, on the host of an
H100: benchmarks/results/2026-11-26-hardware-files.md. Where the model's Python does more, they are too few.
"""

from __future__ import annotations

__all__ = [
    "ADDED", "AGAIN", "LOW_ADDED", "MICRO_BATCH", "MOVED", "PARAMETER_MOVED", "SAVED", "STEP", "UNIT_CALLED",
    "of_operator",
]  # fmt: skip

OPERATORS = {
    "convolution": 2.5, "convolution_backward": 4.0, "batch_norm": 2.0, "batch_norm_backward": 2.0,
    "norm": 1.5, "norm_backward": 3.0, "attention": 2.0, "attention_backward": 2.0, "pool": 1.5,
}  # fmt: skip
"""Of a class: libraries choose among kernels, and an operator may have several."""

IN_STEP = 1.6
"""Of an operator within a step, whose code is not in the host's caches, with the Python of its module."""

STEP, MICRO_BATCH = 230, 325
"""Of a step after its last backward, and of a micro-batch: threads that meet, the loss, its copy."""

AGAIN, SAVED = 160, 6
"""Of a unit that is computed again, and of each of its operators whose inputs recomputation drops."""

UNIT_CALLED, MOVED, PARAMETER_MOVED = 70, 45, 4
"""Of a unit of FSDP2 in a micro-batch; to gather or to reduce it once; of each of its parameters there."""

ADDED, LOW_ADDED = 1, 5
"""Of a parameter's gradient that is added to that of another micro-batch: in f32, and from 16 bits."""


def of_operator(kind: str) -> float:
    """Starts of one operator within a step.

    Example: "light" -> 1.6, "convolution" -> 4.8.
    """
    return IN_STEP * OPERATORS.get(kind, 1.0)
