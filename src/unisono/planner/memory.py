"""Memory of the fullest rank, by cause. All figures are bytes.

Sources: Korthikanti et al., 2022 (arXiv:2205.05198), equations 1 to 6, for activations; Rajbhandari et al.,
2020 (arXiv:1910.02054), table 1, for what ZeRO shares.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import msgspec

from unisono.planner.collectives import GroupPrices, context_exchange
from unisono.planner.shape import TransformerShape
from unisono.planner.stages import RankLayers, in_flight, layers_of_rank, sequence_part
from unisono.planner.training_plan import TrainingJob, TrainingPlan


def layer_activations(
    shape: TransformerShape,
    plan: TrainingPlan,
    width: int,
    *,
    experts: bool = False,
    imbalance: float = 1.0,
    inputs: int = 0,
    residual: int = 0,
) -> float:
    """Bytes that a layer keeps of one micro-batch on one rank.

    Of these, the inputs of matrix products that no other operator keeps have `inputs` bytes a value (fp8),
    and those of norms `residual` bytes (f32 under autocast).

    Example: s b h (10 + 24/t + 5 a s / (h t)) for GPT in 16 bits; with sequence and selective recomputation
    34 s b h / t.
    """
    tokens = plan.micro_batch * shape.sequence // plan.context
    values, cut = tokens * shape.hidden, plan.tensor if plan.sequence else 1
    if plan.recompute == "full":
        return (residual or width) * values / cut
    inputs, residual = inputs or width, residual or width
    # Inputs of norms and matrices; two masks.
    whole = 2 * (residual + inputs) * values + (2 * values if shape.dropout else 0)
    tensor, latent = plan.tensor, shape.latent
    heads = (shape.heads // tensor) * (shape.head + shape.value_head)
    heads += shape.keys(tensor) + shape.values(tensor)
    if latent is not None:  # inputs of their norms and of the next matrices
        heads += 2 * (latent.query_rank + latent.key_rank)
    inner = (2 if shape.gated else 1) + inputs / width
    if not experts:
        mlp = inner * shape.mlp / tensor
    else:
        rows = shape.mixed.top_k * (imbalance if plan.expert > 1 else 1.0)
        # Inputs and outputs of the experts' rows, and what the router makes of a token, in f32.
        mlp = rows * (2 * shape.hidden + inner * shape.mixed.ffn / tensor)
        mlp += inner * shape.mixed.shared_ffn / tensor + 2 * shape.mixed.count
    return whole / cut + width * tokens * (heads + mlp) + _scores(shape, plan, width)


def _scores(shape: TransformerShape, plan: TrainingPlan, width: int) -> float:
    """Softmax, its mask, and what dropout leaves of it; of fused attention one f32 per token and head."""
    rows = plan.micro_batch * (shape.sequence / plan.context) * shape.heads / plan.tensor
    if shape.attention == "fused":
        return 4 * rows
    if plan.recompute == "selective":
        return 0.0
    return rows * shape.sequence * (2 * width + 1 if shape.dropout else width)


LOGIT_BYTES = 4
"""Of a logit that a fused loss keeps: f32."""


class MemoryUse(NamedTuple):
    """Bytes of one rank, by cause."""

    parameters: float  # of its layers and tables
    gradients: float  # of the only micro-batch those at the peak: none at the loss
    moments: float  # with the f32 copy of parameters
    activations: float  # what its layers keep for backward, of all micro-batches in flight
    recomputed: float  # one layer's activations while they are computed again
    ends: float  # activations of the embedding, the output matrix and the loss
    buffers: float  # of ZeRO, swapping, codecs; messages of stages, of a context axis, and of experts

    @property
    def total(self) -> int:
        """All of it."""
        return ceil(sum(self))


class RankElements(NamedTuple):
    """Elements of a rank without ZeRO: those that all copies have, and those of its experts."""

    common: float
    experts: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.common + self.experts

    def shared(self, plan: TrainingPlan) -> float:
        """Those of one rank where its copies share them."""
        return self.common / plan.sharers + self.experts / plan.expert_sharers


class LayerElements(NamedTuple):
    """Elements of a layer of a rank: one without experts; one with them, beside its experts; these."""

    dense: int
    mixed: int
    experts: float

    @classmethod
    def of(cls, shape: TransformerShape, tensor: int, expert: int) -> LayerElements:
        """Those of one of `tensor` ranks, where `expert` ranks spread the experts."""
        dense = mixed = 0
        if shape.dense_layers:
            dense = shape.matrices(tensor) + shape.vectors(tensor)
        if shape.experts is not None:
            mixed = shape.matrices(tensor, experts=True) + shape.vectors(tensor, experts=True)
        return cls(dense, mixed, shape.expert_elements(tensor) / expert)

    @property
    def largest(self) -> float:
        """Of the larger kind."""
        return max(self.dense, self.mixed + self.experts)


def model_states(elements: RankElements, plan: TrainingPlan, job: TrainingJob) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and moments, of so many elements of a rank without ZeRO.

    Example (bf16, reduce="low"): 7.5e9 elements and 64 data ranks take 120, 31.4, 16.6 and 1.88 GB under
    ZeRO 0 to 3.
    """
    whole, part, zero = elements.total, elements.shared(plan), plan.zero
    return (
        job.width * (part if zero == 3 else whole),
        job.gradient_bytes * (part if zero >= 2 else whole),
        job.moment_bytes * (part if zero else whole),
    )


class RankParts(NamedTuple):
    """What a rank of the pipeline has, however states are shared, swapped and coded: bytes and elements."""

    elements: RankElements
    kept: float  # activations of its layers
    again: float  # those of a layer that is computed again
    ends: float  # those of the ends
    loss: float  # what an eager loss has beside them while it is computed
    messages: float  # buffers of what it sends and receives
    layer: float  # elements of its largest layer
    largest: float  # those of its largest unit: a table is one, too
    of_layers: float  # elements of all its layers


class MemoryModel:
    """Memory of single ranks of plans of one job. It keeps what plans have in common."""

    def __init__(self, job: TrainingJob, prices: GroupPrices) -> None:
        self.job, self._prices = job, prices
        self._activations: dict[tuple[object, ...], tuple[float, float]] = {}
        self._elements: dict[tuple[int, int], LayerElements] = {}

    def missing_of_host(self, plan: TrainingPlan, elements: RankElements) -> int:
        """What is missing of the host's memory; 0, or less: what the rank swaps has room."""
        host = self.job.hardware.host
        return 0 if host is None else ceil(self.host_bytes(plan, elements)) - host.nbytes

    def host_bytes(self, plan: TrainingPlan, elements: RankElements) -> float:
        """What a rank has in host memory."""
        swapped = {"none": 3, "moments": 2, "states": 0}[plan.swap]
        return sum(model_states(elements, plan, self.job)[swapped:])

    def least_of_part_bytes(self, each: RankParts, plan: TrainingPlan) -> float:
        """A bound: no sharing, swapping or codec of the stages of a rank takes less."""
        again = 0.0 if _alone(plan, self.job) else each.again
        return each.kept + again + each.ends + self._least_states(plan, each.elements)

    def least_of_layers_bytes(self, plan: TrainingPlan, rank: int, count: int) -> float:
        """A bound: what `count` layers of a rank take at least, whatever stages, sharing and codec are.

        Which of them have experts is open.
        """
        shape, each = self.job.shape, self._layer_elements(plan)
        flying = min(plan.pipeline - rank, plan.micro_batches(self.job.batch))

        def layer(elements: RankElements, *, experts: bool) -> float:
            return self._least_states(plan, elements) + flying * self._layer(plan, experts=experts)[0]

        dense = min(count, shape.dense_layers)
        of_dense = dense * layer(RankElements(each.dense), experts=False) if dense else 0.0
        if shape.experts is None:
            return of_dense
        mixed = layer(RankElements(each.mixed, each.experts), experts=True)
        return min(count * mixed, of_dense + (count - dense) * mixed)

    def _least_states(self, plan: TrainingPlan, elements: RankElements) -> float:
        job = self.job
        gradient_bytes = 0 if _alone(plan, job) else job.gradient_bytes
        width = job.width + gradient_bytes + job.moment_bytes
        if job.hardware.host is not None:  # states or moments may be swapped
            only_data = plan.ranks == plan.data and plan.expert == 1
            width = 0 if only_data else job.width + gradient_bytes
        shared = elements.common + elements.experts * min(plan.expert, plan.copies)
        return width * shared / plan.copies

    # ---- parts -------------------------------------------------------------------------------------------

    def _layer_elements(self, plan: TrainingPlan) -> LayerElements:
        key = plan.tensor, plan.expert
        if key not in self._elements:
            self._elements[key] = LayerElements.of(self.job.shape, *key)
        return self._elements[key]

    def _layer(self, plan: TrainingPlan, *, experts: bool) -> tuple[float, float]:
        """What a layer keeps, and what more it has while it is computed again."""
        key = (
            plan.tensor, plan.sequence, plan.micro_batch, plan.recompute, plan.context, plan.expert > 1,
            experts,
        )  # fmt: skip
        if key not in self._activations:
            shape, width, imbalance = self.job.shape, self.job.width, self.job.imbalance

            def kept(of: TrainingPlan) -> float:
                return layer_activations(
                    shape, of, width, experts=experts, imbalance=imbalance, inputs=self.job.product_width,
                    residual=self.job.residual_width,
                )  # fmt: skip

            again = 0.0
            if plan.recompute != "none":
                again = kept(msgspec.structs.replace(plan, recompute="none")) - kept(plan)
            self._activations[key] = kept(plan), again
        return self._activations[key]

    def part(self, plan: TrainingPlan, rank: int) -> RankParts:
        """That of one rank of a pipeline."""
        job, first, last = self.job, rank == 0, rank == plan.pipeline - 1
        layers, elements = layers_of_rank(job.shape, plan, rank), self._layer_elements(plan)
        layer = elements.largest if layers.mixed else elements.dense
        largest = max(layer, job.shape.table(plan.tensor)) if first or last else layer
        micro_batches = plan.micro_batches(job.batch)
        flying = in_flight(plan, rank, micro_batches)
        if job.expert_overlap and plan.expert > 1:  # that which is computed meanwhile
            flying = min(flying + 1, micro_batches)
        kept = again = 0.0
        for count, experts in layers.kinds:
            each, more = self._layer(plan, experts=experts)
            kept, again = kept + count * flying * each, max(again, more)
        tokens = sequence_part(plan, job)
        values = tokens * job.shape.hidden / (plan.tensor if plan.sequence else 1)
        ends = values * flying if first and job.shape.dropout else 0.0
        logits = tokens * job.shape.vocab / plan.tensor if last else 0.0
        if last:  # the loss is computed in f32
            ends += (job.residual_width + job.width) * values + LOGIT_BYTES * logits
        common = layers.dense * elements.dense + layers.mixed * elements.mixed
        in_experts = layers.mixed * elements.experts
        ends_elements = job.shape.ends(plan.tensor, first=first, last=last)
        return RankParts(
            RankElements(common + ends_elements, in_experts), kept, again, ends,
            (job.logit_bytes - LOGIT_BYTES) * logits, self._message_bytes(plan, values, layers), layer,
            largest, common + in_experts,
        )  # fmt: skip

    def use(self, plan: TrainingPlan, parts: RankParts) -> MemoryUse:
        """Memory of a rank that has these parts."""
        job, buffers = self.job, parts.messages
        states = model_states(parts.elements, plan, job)
        if job.copy_bytes:
            buffers += job.copy_bytes * (parts.layer if plan.zero == 3 else parts.of_layers)
        if plan.zero >= 2:
            buffers += parts.largest * job.gradient_bytes
        if plan.zero == 3:
            buffers += (parts.layer + parts.largest) * job.width
        if plan.swap != "none":  # the unit at work, and the next one
            states, at_work = _resident(states, plan, job, parts.layer + parts.largest)
            buffers += at_work
        if plan.codec != "none":  # errors that are sent later, in f32
            own = parts.elements.shared(plan) if plan.has_replicas else parts.elements.total
            buffers += 4 * own * (2 if (plan.compute or job.compute) == "fp16" else 1)  # a step may be undone
            if plan.zero >= 2 and plan.micro_batches(job.batch) > 1:  # whole, until the last one
                buffers += parts.elements.total * job.gradient_bytes
        parameters, gradients, moments = states
        ends = parts.ends + parts.loss
        whole = MemoryUse(parameters, gradients, moments, parts.kept, parts.again, ends, buffers)
        if not _alone(plan, job):
            return whole
        # Gradients come as activations go: the peak is at the loss, or where backward begins or ends.
        first = min(gradients, parts.largest * job.gradient_bytes)
        one = parts.kept * parts.layer / max(1.0, parts.of_layers)
        found = (
            whole._replace(gradients=0.0, recomputed=0.0),
            whole._replace(gradients=first, ends=parts.ends),
            whole._replace(activations=one, ends=0.0),
        )
        return max(found, key=lambda use: use.total)

    def _message_bytes(self, plan: TrainingPlan, values: float, layers: RankLayers) -> float:
        """Buffers of messages of so many values to the next stage, of a context axis, and of experts."""
        job = self.job
        found = 4 * job.width * values if plan.pipeline > 1 else 0.0
        found += context_exchange(plan, job, self._prices).buffer_bytes
        if layers.mixed and plan.expert > 1:  # rows sent and received
            rows = sequence_part(plan, job) * job.shape.mixed.top_k * (1 + job.imbalance) / plan.tensor
            found += rows * job.shape.hidden * job.width
        return found


def _alone(plan: TrainingPlan, job: TrainingJob) -> bool:
    """Whether a step has one forward and one backward, so that no gradient is there at its loss."""
    return plan.pipeline == 1 and plan.micro_batches(job.batch) == 1


def _resident(
    states: tuple[float, float, float], plan: TrainingPlan, job: TrainingJob, unit: float
) -> tuple[tuple[float, float, float], float]:
    """What swapping leaves of the states of a rank, and what two units have of the others while at work."""
    parameters, gradients, moments = states
    if plan.swap == "states":
        whole = parameters + gradients + moments
        return (0.0, 0.0, 0.0), min(whole, unit * (job.width + job.gradient_bytes + job.moment_bytes))
    shared = plan.expert_sharers if plan.zero else 1
    return (parameters, gradients, 0.0), min(moments, unit * job.moment_bytes / shared)
