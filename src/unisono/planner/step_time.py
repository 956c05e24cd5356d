"""The time of a step of one plan, by cause, and the collectives in it."""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.interconnect import RankLayout, collective_s, message_s
from unisono.planner.memory import ends_elements
from unisono.planner.operators import ComputeTime, layer_compute, output_compute, update_s
from unisono.planner.stages import StageLayers, stage_layers
from unisono.planner.training_plan import TrainingJob, TrainingPlan

__all__ = ["PlannedCollective", "StepTime", "TimeModel"]


class StepTime(NamedTuple):
    """Seconds of a step, by cause; the sum is the step.

    Attributes:
        matrix, other: matrix products, and all other operators, of forward and backward on the slowest rank.
        recompute: what backward computes again, with its collectives.
        tensor: collectives of the tensor axis that no compute hides.
        messages: between stages, and the gradients of a shared table.  bubble: waiting of a pipeline's ranks.
        data: collectives of the data axis that no compute hides.  update: the optimizer.
    """

    matrix: float
    other: float
    recompute: float
    tensor: float
    messages: float
    bubble: float
    data: float
    update: float

    @property
    def total(self) -> float:
        """The step."""
        return sum(self)


class PlannedCollective(NamedTuple):
    """A collective that a rank runs in a step.

    Attributes:
        collective, axis, ranks: what, on which axis, of how many ranks.
        nbytes: of the whole buffer of a call.  calls: in a step.
        seconds: of all calls.  exposed: those that no compute hides.
    """

    collective: str
    axis: str
    ranks: int
    nbytes: float
    calls: int
    seconds: float
    exposed: float

    def plus(self, other: PlannedCollective) -> PlannedCollective:
        """More of the same calls."""
        return self._replace(
            calls=self.calls + other.calls,
            seconds=self.seconds + other.seconds,
            exposed=self.exposed + other.exposed,
        )


class _LayerTime(NamedTuple):
    """A layer and a micro-batch. `pair_s`: a reduce-scatter and an all-gather, or one all-reduce."""

    forward: ComputeTime
    backward: ComputeTime
    core: ComputeTime
    forward_tensor_s: float
    backward_tensor_s: float
    pair_s: float

    def recompute_s(self, recompute: str) -> float:
        if recompute == "full":
            return self.forward.total_s + self.forward_tensor_s
        return self.core.total_s if recompute == "selective" else 0.0


class _PassTime(NamedTuple):
    """Seconds of a rank's layers and a micro-batch, forward and backward."""

    forward_s: float
    backward_s: float
    layers: int


class TimeModel:
    """Prices plans of one job. It keeps what plans have in common."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self._layers: dict[tuple[int, int, bool], _LayerTime] = {}
        self._outputs: dict[tuple[int, int], tuple[ComputeTime, ComputeTime]] = {}

    def step(self, plan: TrainingPlan) -> StepTime:
        """The time of a step, by cause."""
        return self._priced(plan)[0]

    def collectives(self, plan: TrainingPlan) -> list[PlannedCollective]:
        """The collectives of a step, those that take longest first; equal calls are one entry."""
        counts = stage_layers(self.job.shape.layers, plan)
        found = [*self._tensor_collectives(plan, max(counts)), *self._message_list(plan)]
        found += self._priced(plan)[1]
        equal: dict[tuple[str, str, float], PlannedCollective] = {}
        for each in found:
            key = each.collective, each.axis, each.nbytes
            equal[key] = equal[key].plus(each) if key in equal else each
        return sorted(equal.values(), key=lambda each: -each.seconds)

    def least_s(self, plan: TrainingPlan) -> float:
        """A bound: no plan with these axes and micro-batches is faster, whatever its zero and recompute."""
        counts = stage_layers(self.job.shape.layers, plan)
        layer, messages = self._layer(plan), self._messages_s(plan)
        slowest, middle, _, _ = self._stage_times(plan, layer, counts, 0.0, messages)
        update = update_s(self._elements(plan, counts) / plan.data, self.job)
        return plan.micro_batches(self.job.batch) * slowest + _bubble_s(plan, middle) + update

    # ---- parts -------------------------------------------------------------------------------------------

    def _priced(self, plan: TrainingPlan) -> tuple[StepTime, list[PlannedCollective]]:
        job, layer = self.job, self._layer(plan)
        counts = stage_layers(job.shape.layers, plan)
        count = plan.micro_batches(job.batch)
        again, messages = layer.recompute_s(plan.recompute), self._messages_s(plan)
        _, middle, layers, output = self._stage_times(plan, layer, counts, again, messages)
        forward, backward = layer.forward, layer.backward
        passes = _PassTime(
            layers * (forward.total_s + layer.forward_tensor_s),
            layers * (backward.total_s + layer.backward_tensor_s + again),
            layers,
        )
        elements = self._elements(plan, counts)
        data = self._data_collectives(plan, elements, passes)
        time = StepTime(
            matrix=count * (layers * (forward.matrix_s + backward.matrix_s) + output.matrix_s),
            other=count * (layers * (forward.other_s + backward.other_s) + output.other_s),
            recompute=count * layers * again,
            tensor=count * layers * (layer.forward_tensor_s + layer.backward_tensor_s),
            messages=count * messages + self._table_s(plan),
            bubble=_bubble_s(plan, middle),
            data=sum(each.exposed for each in data),
            update=update_s(elements / (plan.data if plan.zero else 1), job),
        )
        return time, data

    def _stage_times(
        self, plan: TrainingPlan, layer: _LayerTime, counts: StageLayers, again_s: float, messages_s: float
    ) -> tuple[float, float, int, ComputeTime]:
        """Seconds of a micro-batch on the slowest rank and in the middle; the slowest's layers and output."""
        each = layer.forward.total_s + layer.backward.total_s + layer.forward_tensor_s
        each += layer.backward_tensor_s + again_s
        output = self._output(plan)
        middle = counts.middle * each + messages_s
        last = counts.last * each + output.total_s + messages_s
        if last >= middle:
            return last, middle, counts.last, output
        return middle, middle, counts.middle, ComputeTime()

    def _layer(self, plan: TrainingPlan) -> _LayerTime:
        key = plan.tensor, plan.micro_batch, plan.sequence
        if key not in self._layers:
            job = self.job
            compute = layer_compute(job, plan.tensor, plan.micro_batch, sequence=plan.sequence)
            pair = self._tensor_pair_s(plan)
            # Forward ends attention and MLP with a sum. Backward has that of the gradients, which hides
            # behind those of the weights; with sequence=yes the inputs are gathered there once more.
            backward = 2 * pair if plan.sequence else 0.0
            self._layers[key] = _LayerTime(*compute, 2 * pair, backward, pair)
        return self._layers[key]

    def _tensor_pair_s(self, plan: TrainingPlan) -> float:
        layout = self._layout(plan.tensor, 1)
        names = ("reduce_scatter", "all_gather") if plan.sequence else ("all_reduce",)
        return sum(self._collective_s(name, layout, self._activation_bytes(plan)) for name in names)

    def _layout(self, size: int, stride: int) -> RankLayout:
        return RankLayout.of(size, stride, self.job.links.ranks, self.job.ranks)

    def _collective_s(self, collective: str, layout: RankLayout, nbytes: float) -> float:
        return collective_s(collective, layout, nbytes, self.job.links, self.job.hardware.efficiency.links)

    def _activation_bytes(self, plan: TrainingPlan) -> float:
        return self.job.width * plan.micro_batch * self.job.shape.sequence * self.job.shape.hidden

    def _output(self, plan: TrainingPlan) -> ComputeTime:
        key = plan.tensor, plan.micro_batch
        if key not in self._outputs:
            self._outputs[key] = output_compute(self.job, *key)
        forward, backward = self._outputs[key]
        return forward.plus(backward)

    def _elements(self, plan: TrainingPlan, counts: StageLayers) -> float:
        """Elements of the fullest rank, without ZeRO."""
        shape = self.job.shape
        layer = shape.matrices(plan.tensor) + shape.vectors(plan.tensor)
        if plan.pipeline == 1:
            return shape.layers * layer + ends_elements(shape, plan, first=True, last=True)
        return max(
            counts.first * layer + ends_elements(shape, plan, first=True, last=False),
            counts.middle * layer,
            counts.last * layer + ends_elements(shape, plan, first=False, last=True),
        )

    # ---- the pipeline ------------------------------------------------------------------------------------

    def _message_s(self, plan: TrainingPlan) -> float:
        """One message: each tensor rank sends its part; the receivers gather it where tokens are not cut."""
        links, share = self.job.links, self.job.hardware.efficiency.links
        inside = plan.pipeline * plan.data * plan.tensor <= links.ranks
        nbytes = self._activation_bytes(plan)
        seconds = message_s(nbytes / plan.tensor, links, share, inside=inside)
        if not plan.sequence:
            seconds += self._collective_s("all_gather", self._layout(plan.tensor, 1), nbytes)
        return seconds

    def _messages_s(self, plan: TrainingPlan) -> float:
        """Of a micro-batch on one rank: forward and backward, for each of its stages."""
        return 2 * plan.interleave * self._message_s(plan) if plan.pipeline > 1 else 0.0

    def _message_list(self, plan: TrainingPlan) -> list[PlannedCollective]:
        if plan.pipeline == 1:
            return []
        count = plan.micro_batches(self.job.batch)
        seconds = count * self._messages_s(plan)
        nbytes = self._activation_bytes(plan) / plan.tensor
        found = [
            PlannedCollective("send", "pipeline", 2, nbytes, 2 * plan.interleave * count, seconds, seconds)
        ]
        if table_s := self._table_s(plan):
            found.append(
                PlannedCollective("all_reduce", "pipeline", 2, self._table_bytes(plan), 1, table_s, table_s)
            )
        return found

    def _table_bytes(self, plan: TrainingPlan) -> float:
        """Of the gradients that the first and the last rank have of a shared table."""
        shared = plan.data if plan.zero >= 2 else 1
        return self.job.shape.table(plan.tensor) * self.job.gradient_bytes / shared

    def _table_s(self, plan: TrainingPlan) -> float:
        """The two ends of a pipeline sum the gradients of a shared table after the last backward.

        Source: Narayanan et al., 2021 (arXiv:2104.04473), whose Megatron-LM has a group for it.
        """
        if plan.pipeline == 1 or not self.job.shape.tied:
            return 0.0
        layout = self._layout(2, plan.data * plan.tensor * (plan.pipeline - 1))
        return self._collective_s("all_reduce", layout, self._table_bytes(plan))

    # ---- tensor and data ---------------------------------------------------------------------------------

    def _tensor_collectives(self, plan: TrainingPlan, layers: int) -> list[PlannedCollective]:
        """Two pairs forward and backward, and again where forward is computed again."""
        if plan.tensor == 1:
            return []
        count = plan.micro_batches(self.job.batch) * layers
        visible = 2 * ((plan.recompute == "full") + 1) + (2 if plan.sequence else 0)
        pairs = 2 * ((plan.recompute == "full") + 2)
        nbytes = self._activation_bytes(plan)
        layout = self._layout(plan.tensor, 1)
        if not plan.sequence:
            found = [("all_reduce", pairs)]
        else:
            found = [("reduce_scatter", pairs), ("all_gather", pairs + 2)]
        result = []
        for name, calls in found:
            each = self._collective_s(name, layout, nbytes)
            result.append(
                PlannedCollective(
                    name,
                    "tensor",
                    plan.tensor,
                    nbytes,
                    calls * count,
                    calls * count * each,
                    visible * count * each,
                )
            )
        return result

    def _data_collectives(
        self, plan: TrainingPlan, elements: float, passes: _PassTime
    ) -> list[PlannedCollective]:
        """Gradients and gathered parameters: one call per layer."""
        if plan.data == 1:
            return []
        job, count = self.job, plan.micro_batches(self.job.batch)
        layout = self._layout(plan.data, plan.tensor)
        gradients, parameters = elements * job.gradient_bytes, elements * job.width
        rounds = {0: 1, 1: 1, 2: count, 3: count}[plan.zero]

        def planned(name: str, nbytes: float, times: int, window_s: float) -> PlannedCollective:
            units = passes.layers
            once = units * self._collective_s(name, layout, nbytes / units)
            exposed = max(once / units, once - window_s) if job.overlap else once
            calls = times * units
            return PlannedCollective(
                name, "data", plan.data, nbytes / units, calls, times * once, times * exposed
            )

        if plan.zero == 0:
            return [planned("all_reduce", gradients, 1, passes.backward_s)]
        if plan.zero < 3:
            scatter = planned("reduce_scatter", gradients, rounds, passes.backward_s)
            return [scatter, planned("all_gather", parameters, 1, passes.forward_s)]
        return [
            planned("all_gather", parameters, rounds, passes.forward_s),
            planned("all_gather", parameters, rounds, passes.backward_s / 2),
            planned("reduce_scatter", gradients, rounds, passes.backward_s / 2),
        ]


def _bubble_s(plan: TrainingPlan, middle_s: float) -> float:
    """Waiting at the two ends of a step: (p-1)/v stages. Narayanan et al., 2021, section 2.2."""
    return (plan.pipeline - 1) / plan.interleave * middle_s
