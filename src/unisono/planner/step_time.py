"""The time of a step of one plan, by cause, and the collectives in it.

Copies of a model reduce gradients and gather parameters layer by layer. Under hybrid sharding a group reduces
to shares, whose gradients the replicas sum once in a step. Copies of an expert are fewer: they exchange their
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from unisono.planner.choice_page import PricedCollective
from unisono.planner.collectives import GroupPrices
from unisono.planner.layer_time import (
    ComputeTime,
    LayerPrices,
    LayerTime,
    memory_rate,
    output_compute,
    update_s,
)
from unisono.planner.memory import MemoryModel, RankElements
from unisono.planner.stages import RankLayers, layers_of_rank, sequence_part
from unisono.planner.training_plan import TrainingJob, TrainingPlan, codec_rank


class _DataPhase(NamedTuple):
    """Calls that travel together, `times` in a step, beside `window_s` of compute; `width`: of an element."""

    name: str
    who: str
    width: float
    times: int
    window_s: float


def _data_collectives(
    job: TrainingJob, plan: TrainingPlan, elements: RankElements, rank: _RankTime, prices: GroupPrices
) -> list[PricedCollective]:
    """Gradients and gathered parameters of a step; buffers are cut into layers."""
    if plan.copies == 1:
        return []
    found, units, groups = [], rank.layers.total, [*_groups(plan, elements)]
    for phase in _phases(job, plan, rank):
        calls = [
            (size, stride, count * phase.width / units)
            for size, stride, count in (each[phase.who] for each in groups)
            if size > 1
        ]
        once = [units * prices.collective_s(phase.name, *call) for call in calls]
        total = sum(once)
        exposed = max(total / units, total - phase.window_s) if job.overlap else total
        axis = "replica" if phase.who == "replicas" else "data"
        for (size, _, nbytes), seconds in zip(calls, once, strict=True):
            waited = phase.times * (exposed * seconds / total if total else 0.0)
            calls_s = phase.times * seconds
            found.append(
                PricedCollective(phase.name, axis, size, nbytes, phase.times * units, calls_s, waited)
            )
    return found


def _groups(plan: TrainingPlan, elements: RankElements) -> Iterator[dict[str, tuple[int, int, float]]]:
    """Ranks that share elements under ZeRO, and replicas of these: size, stride and elements of a group."""
    copies = [(elements.common, plan.sharers, plan.tensor, plan.copies // plan.sharers)]
    if elements.experts and plan.expert < plan.copies:
        replicas = plan.copies // plan.expert // plan.expert_sharers
        copies.append((elements.experts, plan.expert_sharers, plan.tensor * plan.expert, replicas))
    for count, sharers, stride, replicas in copies:
        yield {
            "sharers": (sharers, stride, count),
            "replicas": (replicas, stride * sharers, count / sharers),
            "all": (sharers * replicas, stride, count),
        }


def _phases(job: TrainingJob, plan: TrainingPlan, rank: _RankTime) -> Iterator[_DataPhase]:
    if plan.zero == 0:
        yield _DataPhase("all_reduce", "all", _gradient_bytes(job, plan), 1, rank.backward_s)
        return
    rounds = plan.micro_batches(job.batch) if plan.zero >= 2 else 1
    window = rank.backward_s / (2 if plan.zero == 3 else 1)
    gathers = rounds if plan.zero == 3 else 1
    if plan.codec == "none" or plan.has_replicas:
        reduced = rounds if plan.codec == "none" else 1  # once for each update
        yield _DataPhase("reduce_scatter", "sharers", job.gradient_bytes, reduced, window)
        yield _DataPhase("all_reduce", "replicas", _gradient_bytes(job, plan), 1, 0.0)
    else:  # whole gradients, of which a rank keeps its part; compute waits for them
        yield _DataPhase("all_reduce", "sharers", _gradient_bytes(job, plan), 1, 0.0)
    yield _DataPhase("all_gather", "sharers", job.width, gathers, rank.time.forward)
    if plan.zero == 3:
        yield _DataPhase("all_gather", "sharers", job.width, rounds, window)


def _gradient_bytes(job: TrainingJob, plan: TrainingPlan) -> float:
    """Bytes of a gradient as it travels. Scales of int8 are f32, one for 64 values; factors are bf16."""
    if rank := codec_rank(plan.codec):
        shape = job.shape
        rows = plan.sharers if plan.has_replicas else 1  # replicas exchange the rows of a rank
        layer = shape.layer_matrices(plan.tensor, experts=not shape.dense_layers)
        matrices = [(n / rows, k) for n, k in layer]
        factors = sum(min(2 * rank * (n + k), 4 * n * k) for n, k in matrices)
        return factors / sum(n * k for n, k in matrices)
    return {"none": job.gradient_bytes, "bf16": 2.0, "int8": 1 + 4 / 64}[plan.codec]


def _codec_s(job: TrainingJob, plan: TrainingPlan, elements: RankElements) -> float:
    """What coding of a step's gradients takes, at the memory's rate.

    Codes: gradients and errors are read, codes and errors written, and sums decoded: 16 bytes and two codes.
    Low rank: the matrix and its errors are read for both products and the new errors, which are written.
    """
    if plan.codec == "none":
        return 0.0
    width = 4 * 5 if codec_rank(plan.codec) else 4 * 4 + 2 * _gradient_bytes(job, plan)
    coded = elements.shared(plan) if plan.has_replicas else elements.total
    return coded * width / memory_rate(job.hardware)


def _swap_s(
    job: TrainingJob, plan: TrainingPlan, elements: RankElements, rank: _RankTime, updating_s: float
) -> float:
    """Seconds of a step in which a rank waits for the host's memory.

    "moments" come in while others go out, beside the update. "states": parameters come before forward and
    again before backward, gradients go (and come, where they add up over micro-batches, and to be averaged),
    and the update has all three in and writes parameters and moments. The link works both ways at once.
    Source: Ren et al., ZeRO-Offload, 2021 (arXiv:2101.06840); as `unisono.parallel` swaps.
    """
    if plan.swap == "none" or job.hardware.host is None:
        return 0.0
    rate = job.hardware.host.bytes_per_s * job.hardware.efficiency.links
    count = elements.shared(plan) if plan.zero else elements.total
    moments = count * job.moment_bytes / rate
    if plan.swap == "moments":
        return max(0.0, moments - updating_s)
    micro_batches = plan.micro_batches(job.batch)
    parameters, gradients = count * job.width / rate, count * job.gradient_bytes / rate
    read_back = gradients if micro_batches > 1 else 0.0
    forward = max(parameters / rank.layers.total, parameters - rank.time.forward)
    backward = max(parameters / rank.layers.total, max(parameters + read_back, gradients) - rank.backward_s)
    averaged = gradients if plan.copies > 1 else 0.0
    return (
        micro_batches * (forward + backward)
        + averaged
        + max(0.0, parameters + gradients + moments - updating_s)
    )


class StepTime(NamedTuple):
    """Seconds of a step, by cause; the sum is the step."""

    matrix: float  # matrix products of forward and backward on the slowest rank
    other: float  # all other operators there
    recompute: float  # what backward computes again, with its collectives
    tensor: float  # collectives of the tensor axis that compute does not hide
    context: float  # the same of ranks that share sequences
    experts: float  # the same of ranks that spread experts
    messages: float  # between stages, and the sum of a shared table's gradients at the two ends
    bubble: float  # waiting for the pipeline to fill and to drain
    data: float  # collectives of the data axis that compute does not hide
    codec: float  # coding and decoding of gradients
    swap: float  # to and from the host's memory, where compute does not hide it
    update: float  # the optimizer

    @property
    def total(self) -> float:
        """The step."""
        return sum(self)


class _RankTime(NamedTuple):
    """A micro-batch on one rank of the pipeline: its layers, and the output matrix where it has it."""

    layers: RankLayers
    time: LayerTime
    output: ComputeTime

    @property
    def backward_s(self) -> float:
        return self.time.backward + self.time.again


class RankPace(NamedTuple):
    """A micro-batch on one rank of the pipeline, with messages; and what it adds to the filling of that."""

    micro_batch_s: float
    fill_s: float


class HostModel:
    """Prices single ranks of plans on equal hosts. It keeps what plans have in common."""

    def __init__(self, job: TrainingJob, prices: GroupPrices) -> None:
        self.job, self.prices = job, prices
        self.memory = MemoryModel(job, prices)
        self._layers = LayerPrices(job, prices)
        self._outputs: dict[tuple[int, int, int], ComputeTime] = {}

    def step(self, plan: TrainingPlan, rank: int, elements: RankElements) -> StepTime:
        """The step of one rank of the pipeline, which has these elements and waits for no other."""
        job, count = self.job, plan.micro_batches(self.job.batch)
        found = self._rank_time(plan, rank)
        layers, output = found.time, found.output
        update = update_s(elements.shared(plan) if plan.zero else elements.total, job)
        return StepTime(
            matrix=count * (layers.matrix + output.matrix_s),
            other=count * (layers.other + output.other_s),
            recompute=count * layers.again,
            tensor=count * layers.tensor,
            context=count * layers.context,
            experts=count * layers.experts,
            messages=sum((each.seconds for each in self._message_list(plan)), 0.0),
            bubble=0.0,
            data=sum(
                each.exposed or 0.0 for each in _data_collectives(job, plan, elements, found, self.prices)
            ),
            codec=_codec_s(job, plan, elements),
            swap=_swap_s(job, plan, elements, found, update),
            update=update,
        )

    def collectives(self, plan: TrainingPlan, rank: int, elements: RankElements) -> list[PricedCollective]:
        """The collectives of a step of one rank, those that take longest first; equal calls are one entry."""
        time = self._rank_time(plan, rank)
        found = [
            *self._layers.collectives(plan, time.layers),
            *self._message_list(plan),
            *_data_collectives(self.job, plan, elements, time, self.prices),
        ]
        equal: dict[tuple[str, str, float], PricedCollective] = {}
        for each in found:
            key = each.collective, each.axis, each.nbytes
            equal[key] = equal[key].plus(each) if key in equal else each
        return sorted(equal.values(), key=lambda each: -each.seconds)

    def pace(self, plan: TrainingPlan, rank: int) -> RankPace:
        """What a micro-batch takes on one rank of the pipeline.

        The others fill and drain it: (p-1)/v stages in all, Narayanan et al., 2021, section 2.2. ZB-H1 fills
        the time of the weights' gradients: Qi et al., 2023 (arXiv:2401.10241), table 2.
        """
        layers, messages = layers_of_rank(self.job.shape, plan, rank), self._messages_s(plan)
        time, message = self._layers.layers(plan, layers), messages / 2
        one = time.total + messages
        if rank == plan.pipeline - 1:
            one += self._output(plan).total_s
        if plan.schedule != "zb-h1":
            return RankPace(one, one / plan.interleave)
        return RankPace(one, time.forward + message + max(0.0, time.backward + message - 2 * time.weights))

    def least_layer_s(self, plan: TrainingPlan) -> float:
        """The least that a layer and a micro-batch take."""
        shape = self.job.shape
        kinds = RankLayers(shape.dense_layers, shape.layers - shape.dense_layers).kinds
        return min(self._layers.layer(plan, experts=experts).total for _, experts in kinds)

    # ---- parts -------------------------------------------------------------------------------------------

    def _rank_time(self, plan: TrainingPlan, rank: int) -> _RankTime:
        layers = layers_of_rank(self.job.shape, plan, rank)
        output = self._output(plan) if rank == plan.pipeline - 1 else ComputeTime()
        return _RankTime(layers, self._layers.layers(plan, layers), output)

    def _output(self, plan: TrainingPlan) -> ComputeTime:
        key = plan.tensor, plan.micro_batch, plan.context
        if key not in self._outputs:
            forward, backward = output_compute(self.job, plan)
            self._outputs[key] = forward.plus(backward)
        return self._outputs[key]

    # ---- the pipeline ------------------------------------------------------------------------------------

    def _activation_bytes(self, plan: TrainingPlan) -> float:
        return self.job.width * sequence_part(plan, self.job) * self.job.shape.hidden

    def _message_s(self, plan: TrainingPlan) -> float:
        """One message: each tensor rank sends its part; the receivers gather it where tokens are not cut."""
        nbytes = self._activation_bytes(plan)
        seconds = self.prices.stage_s(plan.ranks, nbytes / plan.tensor)
        if not plan.sequence:
            seconds += self.prices.collective_s("all_gather", plan.tensor, 1, nbytes)
        return seconds

    def _messages_s(self, plan: TrainingPlan) -> float:
        """Of a micro-batch on one rank: forward and backward, for each of its stages."""
        return 2 * plan.interleave * self._message_s(plan) if plan.pipeline > 1 else 0.0

    def _message_list(self, plan: TrainingPlan) -> list[PricedCollective]:
        """Messages of a step; and the sum of the gradients that both ends have of a shared table.

        It is after the last backward. Source: Narayanan et al., 2021 (arXiv:2104.04473), whose Megatron-LM
        has a group for it.
        """
        if plan.pipeline == 1:
            return []
        count, shape = plan.micro_batches(self.job.batch), self.job.shape
        seconds = count * self._messages_s(plan)
        nbytes = self._activation_bytes(plan) / plan.tensor
        found = [
            PricedCollective("send", "pipeline", 2, nbytes, 2 * plan.interleave * count, seconds, seconds)
        ]
        if shape.tied:
            nbytes = shape.table(plan.tensor) * self.job.gradient_bytes
            nbytes /= plan.sharers if plan.zero >= 2 else 1
            stride = plan.copies * plan.tensor * (plan.pipeline - 1)
            seconds = self.prices.collective_s("all_reduce", 2, stride, nbytes)
            found.append(PricedCollective("all_reduce", "pipeline", 2, nbytes, 1, seconds, seconds))
        return found
