"""What one layer computes on one rank, and how long: a roofline, with an efficiency for each class.

A matrix product takes the longer of its FLOPs and its bytes. The other operators take their bytes. Each
kernel takes a constant beside that.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.hardware import Hardware
from unisono.planner.shape import TransformerShape
from unisono.planner.training_plan import TrainingJob

__all__ = ["ComputeTime", "LayerCompute", "layer_compute", "output_compute", "update_s"]

OTHER_KERNELS = 12
"""Of a layer, forward and backward each: norms, dropout with addition, activation, transposes, softmax."""

CAUSAL = 0.5
"""The share of the scores that a fused causal kernel computes."""

FUSED_BACKWARD = 2.5
"""Its products backward, of those forward: it computes the scores again. Dao, 2023 (arXiv:2307.08691)."""

LOSS_BYTES = 20
"""Per logit: written in 16 bits, read for the f32 loss, kept, and the same for the gradient."""


class ComputeTime(NamedTuple):
    """Seconds of matrix products and of the other operators."""

    matrix_s: float = 0.0
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Both."""
        return self.matrix_s + self.other_s

    def plus(self, other: ComputeTime) -> ComputeTime:
        """One after the other."""
        return ComputeTime(self.matrix_s + other.matrix_s, self.other_s + other.other_s)


class LayerCompute(NamedTuple):
    """A layer and a micro-batch: forward, backward, and the scores of unfused attention alone."""

    forward: ComputeTime
    backward: ComputeTime
    core: ComputeTime

    def again(self, recompute: str) -> ComputeTime:
        """What backward computes again."""
        return {"none": ComputeTime(), "selective": self.core, "full": self.forward}[recompute]


class Roofline(NamedTuple):
    """What an accelerator gets done."""

    flops: float
    bytes_per_s: float
    kernel_s: float
    width: int

    @classmethod
    def of(cls, job: TrainingJob) -> Roofline:
        """That of a job's hardware, with its efficiencies."""
        hardware, efficiency = job.hardware, job.hardware.efficiency
        flops = hardware.flops[job.compute] * efficiency.matrix
        return cls(flops, memory_rate(hardware), efficiency.kernel_s, job.width)

    def product_s(self, m: float, n: float, k: float, count: float = 1, extra_bytes: float = 0) -> float:
        """`count` products of [m, k] by [k, n] in one kernel."""
        moved = self.width * count * (m * k + k * n + m * n) + extra_bytes
        return max(2 * m * n * k * count / self.flops, moved / self.bytes_per_s) + self.kernel_s

    def moved_s(self, nbytes: float, kernels: float = 1) -> float:
        """Kernels that move bytes."""
        return nbytes / self.bytes_per_s + kernels * self.kernel_s


def memory_rate(hardware: Hardware) -> float:
    """Bytes per second that operators get."""
    return hardware.memory_bytes_per_s * hardware.efficiency.memory


def layer_compute(job: TrainingJob, tensor: int, micro_batch: int, *, sequence: bool) -> LayerCompute:
    """A layer and a micro-batch on one of `tensor` ranks."""
    shape, roof = job.shape, Roofline.of(job)
    tokens = micro_batch * shape.sequence
    forward = backward = 0.0
    for n, k in _matrices(shape, tensor):
        forward += roof.product_s(tokens, n, k)
        backward += roof.product_s(tokens, k, n)  # of the input
        backward += roof.product_s(k, n, tokens, extra_bytes=2 * job.gradient_bytes * k * n)  # added to it
    core, core_backward = _core(shape, roof, tensor, micro_batch)
    width = roof.width
    cut = tokens * shape.hidden / (tensor if sequence else 1)
    mlp = tokens * shape.mlp * (1.5 if shape.gated else 1) / tensor
    masks = 2 if shape.dropout else 0
    heads = 2 * width * tokens * shape.query / tensor  # transposed
    # Two norms read and write, two additions read two and write one; backward has sums of gradients beside.
    other = roof.moved_s((10 * width + masks) * cut + 2 * width * mlp + heads, OTHER_KERNELS)
    other_backward = roof.moved_s((16 * width + masks) * cut + 4 * width * mlp + 2 * heads, OTHER_KERNELS)
    return LayerCompute(
        ComputeTime(forward, other).plus(core),
        ComputeTime(backward, other_backward).plus(core_backward),
        core,
    )


def _matrices(shape: TransformerShape, tensor: int) -> list[tuple[float, float]]:
    """Outputs and inputs of the matrices of a layer on one rank: heads, their sum, the MLP's two ends."""
    mlp = shape.mlp / tensor
    return [
        (shape.query / tensor + 2 * shape.keys(tensor), shape.hidden),
        (shape.hidden, shape.query / tensor),
        ((2 if shape.gated else 1) * mlp, shape.hidden),
        (shape.hidden, mlp),
    ]


def _core(
    shape: TransformerShape, roof: Roofline, tensor: int, micro_batch: int
) -> tuple[ComputeTime, ComputeTime]:
    """The products with the scores, softmax and its dropout: forward and backward."""
    length, count = shape.sequence, micro_batch * shape.heads / tensor
    if shape.attention == "fused":
        flops_s = 4 * count * length * length * shape.head * CAUSAL / roof.flops
        moved = roof.width * count * length * shape.head * 4 / roof.bytes_per_s
        busy = max(flops_s, moved)
        return ComputeTime(busy + roof.kernel_s), ComputeTime(FUSED_BACKWARD * busy + 2 * roof.kernel_s)
    scores, width = count * length * length, roof.width
    products = roof.product_s(length, length, shape.head, count)
    products += roof.product_s(length, shape.head, length, count)
    dropout = 2 * width + 1 if shape.dropout else 0
    forward = ComputeTime(products, roof.moved_s((2 * width + dropout) * scores, 0))
    return forward, ComputeTime(2 * products, roof.moved_s((3 * width + dropout) * scores, 0))


def output_compute(job: TrainingJob, tensor: int, micro_batch: int) -> tuple[ComputeTime, ComputeTime]:
    """The output matrix and the loss of a micro-batch on one rank: forward and backward."""
    shape, roof = job.shape, Roofline.of(job)
    tokens, rows = micro_batch * shape.sequence, shape.table(tensor) / shape.hidden
    product = roof.product_s(tokens, rows, shape.hidden)
    loss = roof.moved_s(LOSS_BYTES / 2 * tokens * rows)
    return ComputeTime(product, loss), ComputeTime(2 * product, loss)


def update_s(elements: float, job: TrainingJob) -> float:
    """Adam's update of so many elements: unscale and check 8 bytes, norm 4, clip 8, Adam 28, the copy in low
    precision 6, and zeroed gradients 4. f32 without a copy or a scale: 44.
    """
    return elements * (44 if job.compute == "f32" else 58) / memory_rate(job.hardware)
