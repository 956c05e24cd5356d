"""Seconds of one layer and a micro-batch on one rank, with its collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from unisono.planner.collectives import GroupPrices, PlannedCollective, context_exchange, expert_exchange
from unisono.planner.operators import layer_compute
from unisono.planner.stages import RankLayers, expert_rows, sequence_part
from unisono.planner.training_plan import TrainingJob, TrainingPlan

__all__ = ["LayerPrices", "LayerTime"]


class LayerTime(NamedTuple):
    """Seconds of some layers and a micro-batch, by cause and by pass.

    Attributes:
        matrix, other: matrix products and other operators, forward and backward.
        tensor, context, experts: collectives that are waited for, forward and backward.
        again: what backward computes again, with its collectives.
        forward, backward: the passes, without `again`.
        weights: of backward, the gradients of weights.
    """

    matrix: float = 0.0
    other: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    again: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0

    @property
    def total(self) -> float:
        """Both passes, and what is computed again."""
        return self.forward + self.backward + self.again


class _LayerExchange(NamedTuple):
    """Calls of a layer: `forward` of them, and `again` so many where forward is computed again.

    `waited` are those backward that nothing hides, of `backward`; each takes `seconds`.
    """

    collective: str
    axis: str
    size: int
    nbytes: float
    seconds: float
    forward: int
    backward: int
    waited: int


class LayerPrices:
    """Prices layers of plans of one job. It keeps what plans have in common."""

    def __init__(self, job: TrainingJob, prices: GroupPrices) -> None:
        self.job, self.prices = job, prices
        self._kept: dict[tuple[object, ...], LayerTime] = {}

    def layers(self, plan: TrainingPlan, layers: RankLayers) -> LayerTime:
        """Some layers of both kinds, one after the other."""
        if not layers.mixed:
            return _times(self.layer(plan, experts=False), layers.dense)
        mixed = _times(self.layer(plan, experts=True), layers.mixed)
        if not layers.dense:
            return mixed
        dense = _times(self.layer(plan, experts=False), layers.dense)
        return LayerTime(*(one + other for one, other in zip(dense, mixed, strict=True)))

    def total_s(self, plan: TrainingPlan, layers: RankLayers) -> float:
        """The `total` of some layers of both kinds."""
        found = 0.0
        if layers.dense:
            found += layers.dense * self.layer(plan, experts=False).total
        if layers.mixed:
            found += layers.mixed * self.layer(plan, experts=True).total
        return found

    def layer(self, plan: TrainingPlan, *, experts: bool) -> LayerTime:
        """One layer, with experts or without."""
        key = (
            plan.tensor, plan.micro_batch, plan.sequence, plan.context, plan.expert, plan.recompute,
            plan.schedule, experts, self._hidden(plan, experts=experts),
        )  # fmt: skip
        if key not in self._kept:
            self._kept[key] = self._priced(plan, experts=experts)
        return self._kept[key]

    def collectives(self, plan: TrainingPlan, layers: RankLayers) -> list[PlannedCollective]:
        """Those of a step in these layers, except of the data axis and the pipeline."""
        found = []
        full, steps = plan.recompute == "full", plan.micro_batches(self.job.batch)
        for number, experts in ((layers.dense, False), (layers.mixed, True)):
            count = steps * number
            for each in self._exchanges(plan, experts=experts) if count else ():
                calls = each.forward * (1 + full) + each.backward
                waited = (each.forward * (1 + full) + each.waited) * each.seconds
                if each.axis == "expert":
                    waited *= self._exposed(plan)
                found.append(
                    PlannedCollective(
                        each.collective, each.axis, each.size, each.nbytes, calls * count,
                        calls * count * each.seconds, waited * count,
                    )
                )  # fmt: skip
            if count and plan.context > 1:
                found += self._context_calls(plan, count, experts=experts)
        return found

    # ---- parts -------------------------------------------------------------------------------------------

    def _priced(self, plan: TrainingPlan, *, experts: bool) -> LayerTime:
        exchange = context_exchange(plan, self.job, self.prices)
        compute = layer_compute(self.job, plan, experts=experts, hops=exchange.hops)
        passes = {"tensor": [0.0, 0.0], "expert": [0.0, 0.0]}
        for each in self._exchanges(plan, experts=experts):
            passes[each.axis][0] += each.forward * each.seconds
            passes[each.axis][1] += each.waited * each.seconds
        there = exchange.forward_s(compute.core.total_s)
        back = exchange.backward_s(compute.core_backward.total_s)
        (tensor, tensor_back), (rows, rows_back) = passes["tensor"], passes["expert"]
        if rows and self._hidden(plan, experts=experts):
            share = _waited_share(rows + rows_back, compute.forward.total_s + compute.backward.total_s)
            rows, rows_back = share * rows, share * rows_back
        forward = compute.forward.total_s + tensor + there + rows
        again = {"none": 0.0, "selective": compute.core.total_s + there, "full": forward}[plan.recompute]
        return LayerTime(
            matrix=compute.forward.matrix_s + compute.backward.matrix_s,
            other=compute.forward.other_s + compute.backward.other_s,
            tensor=tensor + tensor_back,
            context=there + back,
            experts=rows + rows_back,
            again=again,
            forward=forward,
            backward=compute.backward.total_s + tensor_back + back + rows_back,
            weights=compute.weights_s,
        )

    def _exchanges(self, plan: TrainingPlan, *, experts: bool) -> Iterator[_LayerExchange]:
        """Of the tensor axis, and of ranks that spread experts.

        Attention and MLP end forward with a sum, and backward with that of the gradients, which hides behind
        those of the weights. With sequence=yes sums are scattered, and inputs are gathered; backward gathers
        them once more. Rows of experts go to their ranks and back, a part over each tensor rank, which gather
        them there.
        """
        job = self.job
        values = job.width * sequence_part(plan, job) * job.shape.hidden
        spread = experts and plan.expert > 1
        sums = [(values, 2)]
        if spread:
            rows = job.width * expert_rows(plan, job) * job.shape.hidden
            sums = [(values, 2 if job.shape.mixed.shared_ffn else 1), (rows, 1)]
            once = expert_exchange(plan, job, self.prices)
            yield _LayerExchange("all_to_all", "expert", plan.expert, *once, 2, 2, 2)
        if plan.tensor == 1:
            return
        for nbytes, count in sums:
            if plan.sequence:
                yield self._of_tensor("reduce_scatter", plan, nbytes, count, count, count)
                yield self._of_tensor("all_gather", plan, nbytes, count, 2 * count, count)
            else:
                waited = count if plan.schedule == "zb-h1" else 0
                yield self._of_tensor("all_reduce", plan, nbytes, count, count, waited)

    def _of_tensor(self, name: str, plan: TrainingPlan, nbytes: float, *calls: int) -> _LayerExchange:
        seconds = self.prices.collective_s(name, plan.tensor, 1, nbytes)
        return _LayerExchange(name, "tensor", plan.tensor, nbytes, seconds, *calls)

    def _hidden(self, plan: TrainingPlan, *, experts: bool) -> bool:
        """Whether rows of experts travel during compute: that of another micro-batch."""
        job = self.job
        return job.expert_overlap and experts and plan.expert > 1 and plan.micro_batches(job.batch) > 1

    def _exposed(self, plan: TrainingPlan) -> float:
        """The share of the time of rows of experts that is waited for."""
        if not self._hidden(plan, experts=True):
            return 1.0
        once, exchange = (
            expert_exchange(plan, self.job, self.prices),
            context_exchange(plan, self.job, self.prices),
        )
        compute = layer_compute(self.job, plan, experts=True, hops=exchange.hops)
        return _waited_share(4 * once.seconds, compute.forward.total_s + compute.backward.total_s)

    def _context_calls(self, plan: TrainingPlan, count: int, *, experts: bool) -> Iterator[PlannedCollective]:
        """Of a ring or an exchange of heads."""
        exchange = context_exchange(plan, self.job, self.prices)
        compute = layer_compute(self.job, plan, experts=experts, hops=exchange.hops)
        there = exchange.forward_s(compute.core.total_s) * (1 + (plan.recompute != "none"))
        waited = there + exchange.backward_s(compute.core_backward.total_s)
        passes = 2 + (plan.recompute != "none")
        if exchange.by_heads:
            seconds, calls, name = passes * exchange.pass_s, 4 * passes, "all_to_all"
            nbytes = exchange.nbytes / 4
        else:
            seconds = passes * exchange.hops * exchange.pass_s + (exchange.hops + 1) * exchange.gradient_s
            calls, name, nbytes = passes * exchange.hops + exchange.hops + 1, "send", exchange.nbytes
        yield PlannedCollective(
            name, "context", plan.context, nbytes, calls * count, seconds * count, waited * count
        )


def _waited_share(rows_s: float, compute_s: float) -> float:
    """Of rows of experts beside the compute of a layer, forward and backward."""
    return max(0.0, 1 - compute_s / rows_s) if rows_s else 0.0


def _times(each: LayerTime, count: int) -> LayerTime:
    return LayerTime(*(count * value for value in each))
