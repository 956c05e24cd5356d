"""What prices the plans of a job: the time of a step and the fullest rank, part by part.

A part is ranks that are alike: some of a pipeline, or the data ranks on hosts of one kind. Each is priced as
on equal hosts. The slowest part sets the pace; each has to fit the memory of its hosts. On equal hosts the
first rank of a pipeline, the last one, and those between them are the parts.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import msgspec

from unisono.planner.choice_page import PricedCollective
from unisono.planner.collectives import GroupPrices, interconnect_of
from unisono.planner.hardware import Cluster
from unisono.planner.memory import MemoryUse, RankElements, RankParts
from unisono.planner.stages import layers_of_rank
from unisono.planner.step_time import HostModel, StepTime
from unisono.planner.training_plan import TrainingJob, TrainingPlan


def with_layers(job: TrainingJob, plan: TrainingPlan) -> TrainingPlan:
    """The plan with the layers of each rank of its pipeline written out."""
    if plan.layers or plan.pipeline == 1:
        return plan
    layers = tuple(layers_of_rank(job.shape, plan, rank).total for rank in range(plan.pipeline))
    return msgspec.structs.replace(plan, layers=layers)


class PlanPart:
    """Ranks that are alike: the model of their hosts, their plan, one of their ranks of the pipeline.

    `alike` ranks of the pipeline are like this one, with itself. `pace`: what a micro-batch takes there.
    """

    def __init__(self, model: HostModel, plan: TrainingPlan, rank: int, alike: int = 1) -> None:
        self.model, self.plan, self.rank, self.alike = model, plan, rank, alike
        self.pace = model.pace(plan, rank)

    def of(self, plan: TrainingPlan) -> TrainingPlan:
        """Another plan with the same stages, as this part has it."""
        layers, rows = self.plan.layers, self.plan.micro_batch
        if (plan.layers, plan.micro_batch) == (layers, rows):
            return plan
        return msgspec.structs.replace(plan, layers=layers, micro_batch=rows)

    @cached_property
    def memory(self) -> RankParts:
        """What such a rank has, however its states are shared."""
        return self.model.memory.part(self.plan, self.rank)


class PlanParts(list[PlanPart]):
    """The parts of all plans with the same stages."""

    @property
    def slowest(self) -> PlanPart:
        """The part that sets the pace."""
        return max(self, key=lambda part: part.pace.micro_batch_s)

    @property
    def fill_s(self) -> float:
        """What all ranks of a pipeline add to its filling and draining."""
        return sum(part.alike * part.pace.fill_s for part in self)

    @cached_property
    def most_elements(self) -> RankElements:
        """Those of the fullest rank on such hosts as the slowest part has: all wait for its data axis."""
        model = self.slowest.model
        alike = (part.memory.elements for part in self if part.model is model)
        return max(alike, key=lambda each: each.total)


class MemoryNeed(NamedTuple):
    """Memory of the rank that has least to spare, what a plan may use of it, and what is missing of any."""

    use: MemoryUse
    limit_bytes: int
    excess_bytes: int


class HostUse(NamedTuple):
    """What the hosts of one kind have of a plan."""

    hosts: str  # such as "4 x a100-40g"
    ranks: tuple[int, int]  # the first and the last one
    layers: tuple[int, ...]  # of each rank of the pipeline that is there
    rows: int  # of a micro-batch of a data rank
    memory_bytes: int  # of their fullest rank
    limit_bytes: int  # what a plan may use of it


class PlanModel:
    """Prices plans of one job. It keeps what plans have in common."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self._models: dict[tuple[object, ...], HostModel] = {}
        self._stages: dict[tuple[object, ...], list[HostModel]] = {}
        self._kept: dict[tuple[object, ...], list[float]] = {}

    # ---- parts -------------------------------------------------------------------------------------------

    def parts(self, plan: TrainingPlan) -> PlanParts:
        """Of ranks that are alike the first one counts, which has most micro-batches in flight."""
        size, models = plan.pipeline, self._stage_models(plan)
        if self.job.cluster is None:
            ranks = sorted({0, min(1, size - 1), size - 1})
            return PlanParts(
                PlanPart(models[0], plan, rank, max(1, size - 2) if rank == 1 else 1) for rank in ranks
            )
        if size == 1:
            return self._data_parts(plan)
        plan = with_layers(self.job, plan)
        alike: dict[tuple[object, ...], list[int]] = {}
        for rank, model in enumerate(models):
            alike.setdefault((id(model), plan.layers[rank], rank == 0, rank == size - 1), []).append(rank)
        return PlanParts(PlanPart(models[ranks[0]], plan, ranks[0], len(ranks)) for ranks in alike.values())

    def _stage_models(self, plan: TrainingPlan) -> list[HostModel]:
        """The model of each rank of the pipeline."""
        key = plan.order, plan.pipeline, plan.compute
        if key not in self._stages:
            job, cluster, count = self.job, self.job.cluster, plan.pipeline
            blocks = [()] * count if cluster is None else cluster.blocks(plan.order, count)
            near = 0 if cluster is None else job.ranks // count
            self._stages[key] = [self._model(plan.compute, kinds, near, job.batch) for kinds in blocks]
        return self._stages[key]

    def _data_parts(self, plan: TrainingPlan) -> PlanParts:
        """The data ranks of each kind; all ranks, where a data rank is on several kinds."""
        job = self.job
        assert job.cluster is not None
        size, placed = plan.context * plan.tensor, job.cluster.placed(plan.order)
        if any(each.begin % size or each.end % size for each in placed):
            kinds = tuple(range(len(placed)))
            return PlanParts([PlanPart(self._model(plan.compute, kinds, job.ranks, job.batch), plan, 0)])
        found = PlanParts()
        for each, rows in zip(placed, plan.rows or [plan.micro_batch] * len(placed), strict=True):
            batch = job.batch // plan.micro_batch * rows
            model = self._model(plan.compute, (each.kind,), math.gcd(each.begin, each.end), batch)
            found.append(PlanPart(model, msgspec.structs.replace(plan, micro_batch=rows), 0))
        return found

    def placement(self, plan: TrainingPlan) -> list[HostUse]:
        """What the hosts of each kind have, in the order of ranks; empty where all hosts are equal."""
        cluster, job = self.job.cluster, self.job
        if cluster is None:
            return []
        plan, placed, size = with_layers(job, plan), cluster.placed(plan.order), job.ranks // plan.pipeline
        found = []
        for each, rows in zip(placed, plan.rows or [plan.micro_batch] * len(placed), strict=True):
            kind = cluster.kinds[each.kind]
            stages = range(each.begin // size, (each.end - 1) // size + 1)
            layers = tuple(plan.layers[rank] for rank in stages) if plan.layers else (job.shape.layers,)
            own = msgspec.structs.replace(plan, micro_batch=rows)
            model = self._model(plan.compute, (each.kind,), size, job.batch // plan.micro_batch * rows)
            found.append(
                HostUse(
                    f"{kind.hosts} x {kind.hardware.name}",
                    (each.begin, each.end - 1),
                    layers,
                    rows,
                    max(model.memory.use(own, model.memory.part(own, rank)).total for rank in stages),
                    kind.hardware.usable_bytes,
                )
            )
        return found

    def _model(self, compute: str, kinds: tuple[int, ...], near: int, batch: int) -> HostModel:
        """The model of hosts that have what these kinds have in common; `batch` as if all had these rows.

        Groups of ranks within blocks of `near` have the links of these hosts.
        """
        key = compute, kinds, near, batch
        if key not in self._models:
            job, wide = self.job.typed(compute), None
            if job.cluster is not None:
                hardware, wide = job.cluster.slowest(kinds), msgspec.structs.replace(job, cluster=None)
                job = msgspec.structs.replace(
                    wide,
                    hardware=hardware,
                    links=interconnect_of(hardware, None, job.ranks),
                    batch=batch,
                    limit_bytes=hardware.usable_bytes,
                )
            self._models[key] = HostModel(job, GroupPrices(job, wide, near))
        return self._models[key]

    # ---- time --------------------------------------------------------------------------------------------

    def step(self, plan: TrainingPlan, parts: PlanParts | None = None) -> StepTime:
        """The time of a step, by cause: that of the slowest part, which waits for the others' ends."""
        parts = parts or self.parts(plan)
        slowest = parts.slowest
        time = slowest.model.step(slowest.of(plan), slowest.rank, parts.most_elements)
        if plan.pipeline == 1:
            return time
        return time._replace(bubble=parts.fill_s - slowest.pace.fill_s)

    def collectives(self, plan: TrainingPlan) -> list[PricedCollective]:
        """The collectives of a step of the slowest part, those that take longest first."""
        parts = self.parts(plan)
        slowest = parts.slowest
        return slowest.model.collectives(slowest.of(plan), slowest.rank, parts.most_elements)

    def least_s(self, plan: TrainingPlan) -> float:
        """A bound: no plan with these axes and stages is faster, whatever it shares, swaps and codes."""
        count = plan.micro_batches(self.job.batch)
        if self.job.cluster is not None and plan.pipeline > 1:
            layers = with_layers(self.job, plan).layers
            paces = [each * one for each, one in zip(layers, self._least_layers_s(plan), strict=True)]
            return count * max(paces) + (sum(paces) - max(paces)) / plan.interleave
        parts = self.parts(plan)
        found = count * parts.slowest.pace.micro_batch_s
        if plan.pipeline > 1:
            found += parts.fill_s - max(part.pace.fill_s for part in parts)
        return found

    def least_of_axes_s(self, plan: TrainingPlan) -> float:
        """A bound: no plan with these axes is faster, whatever its stages and rows are.

        The ranks of a pipeline share all layers, in parts of a layer. The bubble has one layer of each other
        stage, and may have none under ZB-H1. With pipeline=1 each rank has its rows at the rate that it has
        with as many as there can be.
        """
        count, layers = plan.micro_batches(self.job.batch), self.job.shape.layers
        if plan.pipeline == 1 and self.job.cluster is not None:
            return count * self._least_rows_s(plan, self.job.cluster)
        each = self._least_layers_s(plan)
        split = plan.recompute == "none" and self.job.cluster is None  # ZB-H1 may be the schedule
        return count * layers / sum(1 / one for one in each) + (0.0 if split else sum(each) - max(each))

    def _least_layers_s(self, plan: TrainingPlan) -> list[float]:
        """The least that a layer and a micro-batch take on each rank of the pipeline."""
        key = (
            plan.tensor, plan.context, plan.pipeline, plan.order, plan.micro_batch, plan.sequence,
            plan.expert, plan.recompute, plan.compute,
        )  # fmt: skip
        if key not in self._kept:
            models = self._stage_models(plan)
            least = {model: model.least_layer_s(plan) for model in {*models}}
            self._kept[key] = [least[model] for model in models]
        return self._kept[key]

    def _least_rows_s(self, plan: TrainingPlan, cluster: Cluster) -> float:
        """A bound of a micro-batch without a pipeline: rows go where they are quick."""
        parts = self.parts(plan)
        equal = parts.slowest.pace.micro_batch_s
        if len(parts) == 1 or plan.data == 1:
            return equal
        total, rate = plan.data * plan.micro_batch, 0.0
        most = total - plan.data + 1
        widest = msgspec.structs.replace(plan, micro_batch=most)
        for part, each in zip(parts, cluster.placed(plan.order), strict=True):
            count = (each.end - each.begin) // (plan.context * plan.tensor)
            rate += count * most / part.model.pace(widest, 0).micro_batch_s
        return min(equal, total / rate)

    # ---- memory ------------------------------------------------------------------------------------------

    def memory(self, plan: TrainingPlan, parts: PlanParts | None = None) -> MemoryNeed:
        """That of the rank that has least to spare."""
        found, excess = list[MemoryNeed](), 0
        for part in parts or self.parts(plan):
            own, memory = part.of(plan), part.model.memory
            use, limit = memory.use(own, part.memory), part.model.job.limit_bytes
            missing = use.total - limit
            excess = max(excess, missing, memory.missing_of_host(own, part.memory.elements))
            if not found or missing > found[0].use.total - found[0].limit_bytes:
                found = [MemoryNeed(use, limit, 0)]
        return found[0]._replace(excess_bytes=excess)

    def least_bytes(self, plan: TrainingPlan, parts: PlanParts | None = None) -> float:
        """A bound: no sharing, swapping or codec of these stages takes less.

        Bounds are as if the limit of all hosts were that of the job: what is above it is missing somewhere.
        """
        return self.job.limit_bytes + max(
            part.model.memory.least_of_part_bytes(part.memory, part.of(plan)) - part.model.job.limit_bytes
            for part in parts or self.parts(plan)
        )

    def least_of_axes_bytes(self, plan: TrainingPlan) -> float:
        """A bound: no plan with these axes takes less, whatever its stages and rows are.

        On equal hosts the second rank of a pipeline has as many layers as any. With so many bytes more on
        each of other hosts, all of them together have room for all layers, in parts of one.
        """
        layers, limit, size = self.job.shape.layers, self.job.limit_bytes, plan.pipeline
        if self.job.cluster is None:
            memory = self._stage_models(plan)[0].memory
            return memory.least_of_layers_bytes(plan, min(1, size - 1), -(-layers // size))
        if size == 1:
            single = msgspec.structs.replace(plan, micro_batch=1)
            models = [part.model for part in self._data_parts(plan)]
            each = [
                (model.memory.least_of_layers_bytes(single, 0, layers), model.job.limit_bytes)
                for model in models
            ]
            return limit + max(used - most for used, most in each)
        each = [
            (model.memory.least_of_layers_bytes(plan, rank, 1), model.job.limit_bytes)
            for rank, model in enumerate(self._stage_models(plan))
        ]
        room = sum(most / layer for layer, most in each)
        return limit + (layers - room) / sum(1 / layer for layer, _ in each)
