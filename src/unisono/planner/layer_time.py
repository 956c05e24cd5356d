"""Seconds of one layer and a micro-batch on one rank: its operators, then with its collectives.

Operators are a roofline, with an efficiency for each class. A matrix product takes the longer of its FLOPs
and its bytes. The other operators take their bytes. Each kernel takes a constant beside that.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.choice_page import PricedCollective
from unisono.planner.collectives import (
    ContextExchange,
    GroupPrices,
    context_exchange,
    expert_exchange,
)
from unisono.planner.hardware import Hardware
from unisono.planner.shape import TransformerShape
from unisono.planner.stages import RankLayers, expert_rows, sequence_part
from unisono.planner.training_plan import TrainingJob, TrainingPlan

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
    inner = rows * shape.mixed.ffn + tokens * shape.mixed.shared_ffn if experts else tokens * shape.mlp
    mlp = inner * (1.5 if shape.gated else 1) / tensor  # values in the middle of an MLP, or of all experts
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


class LayerTime(NamedTuple):
    """Seconds of some layers and a micro-batch, by cause and by pass."""

    matrix: float = 0.0  # matrix products, forward and backward
    other: float = 0.0  # other operators, likewise
    tensor: float = 0.0  # collectives that are waited for, likewise
    context: float = 0.0  # of the context axis
    experts: float = 0.0  # of rows of experts
    again: float = 0.0  # what backward computes again, with its collectives
    forward: float = 0.0  # the pass
    backward: float = 0.0  # the pass, without `again`
    weights: float = 0.0  # of backward, the gradients of weights

    @property
    def total(self) -> float:
        """Both passes, and what is computed again."""
        return self.forward + self.backward + self.again


class _LayerExchange(NamedTuple):
    """Calls of one kind of a layer. `again`: backward computes again what has those of forward."""

    forward: PricedCollective
    backward: PricedCollective
    again: bool


class LayerPrices:
    """Prices layers of plans of one job. It keeps what plans have in common."""

    def __init__(self, job: TrainingJob, prices: GroupPrices) -> None:
        self.job, self.prices = job, prices
        self._kept: dict[tuple[object, ...], LayerTime] = {}
        self._sums: dict[tuple[tuple[int, int], ...], LayerTime] = {}  # by the layers that are kept

    def layers(self, plan: TrainingPlan, layers: RankLayers) -> LayerTime:
        """Some layers of both kinds, one after the other."""
        parts = [(self.layer(plan, experts=experts), count) for count, experts in layers.kinds]
        key = tuple((id(each), count) for each, count in parts)
        if key not in self._sums:
            each = [[count * value for value in time] for time, count in parts]
            self._sums[key] = LayerTime(*map(sum, zip(*each, strict=True)))
        return self._sums[key]

    def layer(self, plan: TrainingPlan, *, experts: bool) -> LayerTime:
        """One layer, with experts or without."""
        key = (
            plan.tensor, plan.micro_batch, plan.sequence, plan.context, plan.expert, plan.recompute,
            plan.schedule, experts, self._hidden(plan, experts=experts),
        )  # fmt: skip
        if key not in self._kept:
            self._kept[key] = self._priced(plan, experts=experts)
        return self._kept[key]

    def collectives(self, plan: TrainingPlan, layers: RankLayers) -> list[PricedCollective]:
        """Those of a step in these layers, except of the data axis and the pipeline."""
        found = []
        for number, experts in layers.kinds:
            count = plan.micro_batches(self.job.batch) * number
            for there, back, again in self._exchanges(plan, experts=experts)[1]:
                forward = there.plus(there) if again else there
                found.append(forward.plus(back, times=count))
        return found

    # ---- parts -------------------------------------------------------------------------------------------

    def _priced(self, plan: TrainingPlan, *, experts: bool) -> LayerTime:
        compute, exchanges = self._exchanges(plan, experts=experts)
        waited = {axis: [0.0, 0.0] for axis in ("tensor", "context", "expert")}
        for there, back, _ in exchanges:
            waited[there.axis][0] += there.exposed or 0.0
            waited[there.axis][1] += back.exposed or 0.0
        (tensor, tensor_back), (context, context_back), (rows, rows_back) = waited.values()
        forward = compute.forward.total_s + tensor + context + rows
        again = {"none": 0.0, "selective": compute.core.total_s + context, "full": forward}[plan.recompute]
        return LayerTime(
            matrix=compute.forward.matrix_s + compute.backward.matrix_s,
            other=compute.forward.other_s + compute.backward.other_s,
            tensor=tensor + tensor_back,
            context=context + context_back,
            experts=rows + rows_back,
            again=again,
            forward=forward,
            backward=compute.backward.total_s + tensor_back + context_back + rows_back,
            weights=compute.weights_s,
        )

    def _exchanges(self, plan: TrainingPlan, *, experts: bool) -> tuple[LayerCompute, list[_LayerExchange]]:
        """What a layer computes, and what it sends: of the tensor axis, of experts, of a context axis.

        Attention and MLP end forward with a sum, and backward with that of the gradients, which hides behind
        those of the weights. With sequence=yes sums are scattered, and inputs are gathered; backward gathers
        them once more. Rows of experts go to their ranks and back, a part over each tensor rank, which gather
        them there.
        """
        job, found = self.job, list[_LayerExchange]()
        context = context_exchange(plan, job, self.prices)
        compute = layer_compute(job, plan, experts=experts, hops=context.hops)
        values = job.width * sequence_part(plan, job) * job.shape.hidden
        sums = [(values, 2)]
        if experts and plan.expert > 1:
            rows = job.width * expert_rows(plan, job) * job.shape.hidden
            sums = [(values, 2 if job.shape.mixed.shared_ffn else 1), (rows, 1)]
            nbytes, once = expert_exchange(plan, job, self.prices)
            share = 1.0
            if self._hidden(plan, experts=True):  # beside the compute of another micro-batch
                busy = compute.forward.total_s + compute.backward.total_s
                share = max(0.0, 1 - busy / (4 * once)) if once else 0.0
            calls_s = 2 * once
            each = PricedCollective("all_to_all", "expert", plan.expert, nbytes, 2, calls_s, share * calls_s)
            found.append(_LayerExchange(each, each, plan.recompute == "full"))
        for nbytes, count in sums if plan.tensor > 1 else ():
            if plan.sequence:
                found.append(self._of_tensor("reduce_scatter", plan, nbytes, count, count, count))
                found.append(self._of_tensor("all_gather", plan, nbytes, count, 2 * count, count))
            else:
                waited = count if plan.schedule == "zb-h1" else 0
                found.append(self._of_tensor("all_reduce", plan, nbytes, count, count, waited))
        if plan.context > 1:
            found.append(_of_context(plan, context, compute))
        return compute, found

    def _of_tensor(
        self, name: str, plan: TrainingPlan, nbytes: float, forward: int, backward: int, waited: int
    ) -> _LayerExchange:
        once = self.prices.collective_s(name, plan.tensor, 1, nbytes)
        there, back = (
            PricedCollective(name, "tensor", plan.tensor, nbytes, calls, calls * once, exposed * once)
            for calls, exposed in ((forward, forward), (backward, waited))
        )
        return _LayerExchange(there, back, plan.recompute == "full")

    def _hidden(self, plan: TrainingPlan, *, experts: bool) -> bool:
        """Whether rows of experts travel during compute: that of another micro-batch."""
        job = self.job
        return job.expert_overlap and experts and plan.expert > 1 and plan.micro_batches(job.batch) > 1


def _of_context(plan: TrainingPlan, exchange: ContextExchange, compute: LayerCompute) -> _LayerExchange:
    """Of a ring, or an exchange of heads in four calls."""
    hops, once, gradient_s = exchange.hops, exchange.pass_s, exchange.gradient_s
    forward_s = exchange.waited_s(compute.core.total_s)
    backward_s = exchange.waited_s(compute.core_backward.total_s, gradient_s)
    name, nbytes = ("send", exchange.nbytes) if hops else ("all_to_all", exchange.nbytes / 4)
    there = PricedCollective(name, "context", plan.context, nbytes, hops or 4, (hops or 1) * once, forward_s)
    back = there._replace(exposed=backward_s)
    if hops:
        back = back._replace(calls=2 * hops + 1, seconds=hops * once + (hops + 1) * gradient_s)
    return _LayerExchange(there, back, plan.recompute != "none")
