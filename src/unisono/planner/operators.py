"""What one layer computes on one rank, and how long: a roofline, with an efficiency for each class.

A matrix product takes the longer of its FLOPs and its bytes. The other operators take their bytes. Each
kernel takes a constant beside that.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.hardware import Hardware
from unisono.planner.shape import TransformerShape
from unisono.planner.stages import expert_rows, sequence_part
from unisono.planner.training_plan import TrainingJob, TrainingPlan

__all__ = ["ComputeTime", "LayerCompute", "layer_compute", "output_compute", "update_s"]

OTHER_KERNELS = 12
"""Of a layer, forward and backward each: norms, dropout with addition, activation, transposes, softmax."""

CAUSAL = 0.5
"""The share of the scores that a fused causal kernel computes."""

FUSED_BACKWARD = 2.5
"""Its products backward, of those forward: it computes the scores again. Dao, 2023 (arXiv:2307.08691)."""

EXPERT_KERNELS = 6
"""More of a layer with experts: choices, counts, rows sorted by expert, and back, weighed."""

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
    """A layer and a micro-batch: forward, backward, the scores alone, and the gradients of weights."""

    forward: ComputeTime
    backward: ComputeTime
    core: ComputeTime
    core_backward: ComputeTime
    weights_s: float

    def again(self, recompute: str) -> ComputeTime:
        """What backward computes again."""
        return {"none": ComputeTime(), "selective": self.core, "full": self.forward}[recompute]


class Roofline(NamedTuple):
    """What an accelerator gets done; `width` is of a value, `inputs` of one that a matrix product reads."""

    flops: float
    bytes_per_s: float
    kernel_s: float
    width: int
    inputs: int
    attention_flops: float

    @classmethod
    def of(cls, job: TrainingJob) -> Roofline:
        """That of matrix products with weights of layers, with the hardware's efficiencies."""
        hardware, efficiency = job.hardware, job.hardware.efficiency
        peak = hardware.flops[job.compute]
        return cls(
            peak * efficiency.matrix,
            memory_rate(hardware),
            efficiency.kernel_s,
            job.width,
            job.product_width,
            peak * (efficiency.attention or efficiency.matrix),
        )

    @classmethod
    def wide(cls, job: TrainingJob) -> Roofline:
        """That of attention and of the output matrix, which fp8 leaves in bf16.

        Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022 (arXiv:2209.05433), section 4;
        DeepSeek-V3, 2024 (arXiv:2412.19437), section 3.3.
        """
        return cls.of(job.typed("bf16") if job.compute == "fp8" else job)

    def product_s(self, m: float, n: float, k: float, count: float = 1, extra_bytes: float = 0) -> float:
        """`count` products of [m, k] by [k, n] in one kernel."""
        moved = count * (self.inputs * (m * k + k * n) + self.width * m * n) + extra_bytes
        return max(2 * m * n * k * count / self.flops, moved / self.bytes_per_s) + self.kernel_s

    def moved_s(self, nbytes: float, kernels: float = 1) -> float:
        """Kernels that move bytes."""
        return nbytes / self.bytes_per_s + kernels * self.kernel_s


def memory_rate(hardware: Hardware) -> float:
    """Bytes per second that operators get."""
    return hardware.memory_bytes_per_s * hardware.efficiency.memory


def layer_compute(
    job: TrainingJob, plan: TrainingPlan, *, experts: bool = False, hops: int = 0
) -> LayerCompute:
    """A layer and a micro-batch on one rank; attention has a kernel more for each hop of a ring."""
    shape, roof = job.shape, Roofline.of(job)
    tokens, tensor = sequence_part(plan, job), plan.tensor
    products = [(tokens, n, k, 1.0) for n, k in shape.layer_matrices(tensor, experts=experts)]
    rows = expert_rows(plan, job) if experts else 0.0
    if experts:
        local = shape.mixed.count / plan.expert
        products += [(rows / local, n, k, local) for n, k in shape.mlp_matrices(shape.mixed.ffn, tensor)]
    forward = inputs = weights = cast = cast_back = 0.0
    for m, n, k, count in products:
        if job.copy_bytes:  # read in 16 bits, written as it is and transposed
            cast, cast_back = cast + 4 * m * k * count, cast_back + 4 * m * n * count
        forward += roof.product_s(m, n, k, count)
        inputs += roof.product_s(m, k, n, count)
        added = 2 * job.gradient_bytes * k * n * count  # the gradient of a weight adds up
        weights += roof.product_s(k, n, m, count, extra_bytes=added)
    core, core_backward = _core(shape, Roofline.wide(job), plan, hops)
    width = roof.width
    cut = tokens * shape.hidden / (tensor if plan.sequence else 1)
    mlp = _mlp_values(shape, tokens, rows, experts=experts) * (1.5 if shape.gated else 1) / tensor
    masks = 2 if shape.dropout else 0
    heads = 2 * width * tokens * shape.query / tensor  # transposed
    # Two norms read and write, two additions read two and write one; backward has sums of gradients beside.
    # Rows of experts are sorted before the exchange and after it, and back.
    sorted_bytes = (8 if plan.expert > 1 else 4) * width * rows * shape.hidden
    kernels = OTHER_KERNELS + (EXPERT_KERNELS if experts else 0)
    other = roof.moved_s((10 * width + masks) * cut + 2 * width * mlp + heads + sorted_bytes + cast, kernels)
    other_backward = roof.moved_s(
        (16 * width + masks) * cut + 4 * width * mlp + 2 * heads + sorted_bytes + cast_back, kernels
    )
    return LayerCompute(
        ComputeTime(forward, other).plus(core),
        ComputeTime(inputs + weights, other_backward).plus(core_backward),
        core,
        core_backward,
        weights,
    )


def _mlp_values(shape: TransformerShape, tokens: float, rows: float, *, experts: bool) -> float:
    """Values in the middle of an MLP, or of all experts of a rank."""
    if not experts:
        return tokens * shape.mlp
    return rows * shape.mixed.ffn + tokens * shape.mixed.shared_ffn


def _core(
    shape: TransformerShape, roof: Roofline, plan: TrainingPlan, hops: int
) -> tuple[ComputeTime, ComputeTime]:
    """The products with the scores, softmax and its dropout: forward and backward.

    Ranks of a context axis have as much of the causal scores each.
    """
    length, count = shape.sequence, plan.micro_batch * shape.heads / plan.tensor
    queries, widths = length / plan.context, shape.head + shape.value_head
    if shape.attention == "fused":
        flops_s = 2 * count * queries * length * widths * CAUSAL / roof.attention_flops
        moved = roof.width * count * (queries + length) * widths / roof.bytes_per_s
        busy, kernels = max(flops_s, moved), (1 + hops) * roof.kernel_s
        return ComputeTime(busy + kernels), ComputeTime(FUSED_BACKWARD * busy + 2 * kernels)
    scores, width = count * queries * length, roof.width
    products = roof.product_s(queries, length, shape.head, count)
    products += roof.product_s(queries, shape.value_head, length, count)
    dropout = 2 * width + 1 if shape.dropout else 0
    forward = ComputeTime(products, roof.moved_s((2 * width + dropout) * scores, 0))
    return forward, ComputeTime(2 * products, roof.moved_s((3 * width + dropout) * scores, 0))


def output_compute(job: TrainingJob, plan: TrainingPlan) -> tuple[ComputeTime, ComputeTime]:
    """The output matrix and the loss of a micro-batch on one rank: forward and backward."""
    shape, roof = job.shape, Roofline.wide(job)
    tokens, rows = sequence_part(plan, job), shape.table(plan.tensor) / shape.hidden
    product = roof.product_s(tokens, rows, shape.hidden)
    loss = roof.moved_s(LOSS_BYTES / 2 * tokens * rows)
    return ComputeTime(product, loss), ComputeTime(2 * product, loss)


def update_s(elements: float, job: TrainingJob) -> float:
    """Adam's update of so many elements: unscale and check 8 bytes, norm 4, clip 8, Adam 28, the copy in low
    precision 6, and zeroed gradients 4. f32 without a copy or a scale: 44.
    """
    return elements * (44 if job.compute == "f32" else 58) / memory_rate(job.hardware)
