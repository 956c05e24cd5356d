"""What the host of a GPU does in a step, counted in starts: the time in which it starts a small operator.

Source: eight models too small for the device to count, under six plans of one rank each, on the host of an
H100, in a process that had run no profiler: benchmarks/results/2026-11-26-hardware-files-again.md. Where the
model's Python does more, they are too few.
"""

from __future__ import annotations

__all__ = [
    "ADDED", "AGAIN", "BEFORE", "LOW_ADDED", "MICRO_BATCH", "MOVED", "PARAMETER_MOVED", "SAVED", "STEP",
    "UNIT_CALLED", "of_operator",
]  # fmt: skip

OPERATORS = {
    "convolution": 1.5, "convolution_backward": 2.4, "batch_norm": 1.6, "batch_norm_backward": 1.6,
    "norm": 1.5, "norm_backward": 3.0, "attention": 2.0, "attention_backward": 2.0, "pool": 1.5,
}  # fmt: skip
"""Of a class: libraries choose among kernels, and an operator may have several."""

IN_STEP = 1.5
"""Of an operator within a step, whose code is not in the host's caches, with the Python of its module."""

STEP, BEFORE, MICRO_BATCH = 200, 150, 160
"""Of a step after its last backward; and of a micro-batch before its first operator, and with its backward:
threads that meet, the loss, its copy."""

AGAIN, SAVED = 120, 5.5
"""Of a unit that is computed again, and of each of its operators whose inputs recomputation drops."""

UNIT_CALLED, MOVED, PARAMETER_MOVED = 60, 45, 4
"""Of a unit of FSDP2 in a micro-batch; to gather or to reduce it once; of each of its parameters there."""

ADDED, LOW_ADDED = 1, 5
"""Of a parameter's gradient that is added to that of another micro-batch: in f32, and from 16 bits."""


def of_operator(kind: str) -> float:
    """Starts of one operator within a step.

    Example: "light" -> 1.5, "batch_norm" -> 2.4.
    """
    return IN_STEP * OPERATORS.get(kind, 1.0)
