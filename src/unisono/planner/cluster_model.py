"""What prices the plans of a job: a model for each type of compute, and on hosts that differ several.

There each part of the ranks, such as a stage of the pipeline, is priced on its own hosts, by the model of
equal hosts. The slowest part sets the pace; each part has to fit the memory of its hosts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from unisono.planner.collectives import GroupPrices, PlannedCollective
from unisono.planner.interconnect import interconnect_of
from unisono.planner.memory import MemoryUse, RankParts
from unisono.planner.stages import layers_of_rank
from unisono.planner.step_time import StepTime, TimeModel
from unisono.planner.training_plan import TrainingJob, TrainingPlan

__all__ = ["ClusterMemory", "ClusterModel", "HostUse", "PlanModels", "with_layers"]


class PlanModels:
    """What prices the plans of a job, each by its type of compute."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        model = TimeModel if job.cluster is None else ClusterModel
        self._models = {compute: model(job.typed(compute)) for compute in job.computes or (job.compute,)}

    def of(self, plan: TrainingPlan) -> TimeModel | ClusterModel:
        """The model of a plan's type."""
        return self._models[plan.compute or self.job.compute]

    def excess_bytes(self, plan: TrainingPlan, use: MemoryUse) -> int:
        """What is missing of memory; 0: the plan fits."""
        return self.of(plan).memory.excess_bytes(plan, use)


def with_layers(job: TrainingJob, plan: TrainingPlan) -> TrainingPlan:
    """The plan with the layers of each rank of its pipeline written out."""
    if plan.layers or plan.pipeline == 1:
        return plan
    layers = tuple(layers_of_rank(job.shape, plan, rank).total for rank in range(plan.pipeline))
    return msgspec.structs.replace(plan, layers=layers)


class ClusterPart(NamedTuple):
    """Ranks that are alike: the model of their hosts, their plan, one of their ranks of the pipeline.

    `alike` ranks of the pipeline are like this one, with itself.
    """

    model: TimeModel
    plan: TrainingPlan
    rank: int
    alike: int

    def of(self, plan: TrainingPlan) -> TrainingPlan:
        """Another plan with the same stages, as this part has it."""
        fields = {"layers": self.plan.layers, "micro_batch": self.plan.micro_batch}
        return msgspec.structs.replace(plan, **fields)


class HostUse(NamedTuple):
    """What the hosts of one kind have of a plan.

    Attributes:
        hosts: such as "4 x a100-40g".  ranks: the first and the last one.
        layers: of each rank of the pipeline that is there.  rows: of a micro-batch of a data rank.
        memory_bytes: of their fullest rank.  limit_bytes: what a plan may use of it.
    """

    hosts: str
    ranks: tuple[int, int]
    layers: tuple[int, ...]
    rows: int
    memory_bytes: int
    limit_bytes: int


class ClusterModel:
    """Prices plans of one job, as `TimeModel` does."""

    def __init__(self, job: TrainingJob) -> None:
        if job.cluster is None:
            raise ValueError("the hosts of this job do not differ")
        self.job, self.cluster = job, job.cluster
        self.memory = ClusterMemory(self)
        self._models: dict[tuple[tuple[int, ...], int, int], TimeModel] = {}
        self._stages: dict[tuple[tuple[int, ...], int], list[TimeModel]] = {}
        self._kept: dict[tuple[object, ...], tuple[list[float], list[float]]] = {}

    # ---- parts -------------------------------------------------------------------------------------------

    def parts(self, plan: TrainingPlan) -> list[ClusterPart]:
        """Of ranks that are alike the first one counts, which has most micro-batches in flight."""
        if plan.pipeline == 1:
            return self._data_parts(plan)
        plan = with_layers(self.job, plan)
        found: dict[tuple[object, ...], ClusterPart] = {}
        for rank, model in enumerate(self.stage_models(plan)):
            key = id(model), plan.layers[rank], rank == 0, rank == plan.pipeline - 1
            if key in found:
                found[key] = found[key]._replace(alike=found[key].alike + 1)
            else:
                found[key] = ClusterPart(model, plan, rank, 1)
        return list(found.values())

    def stage_models(self, plan: TrainingPlan) -> list[TimeModel]:
        """The model of each rank of the pipeline."""
        key = plan.order, plan.pipeline
        if key not in self._stages:
            size = self.job.ranks // plan.pipeline
            blocks = self.cluster.blocks(plan.order, plan.pipeline)
            self._stages[key] = [self._model(kinds, size, self.job.batch) for kinds in blocks]
        return self._stages[key]

    def _data_parts(self, plan: TrainingPlan) -> list[ClusterPart]:
        """The data ranks of each kind; all ranks, where a data rank is on several kinds."""
        size, placed = plan.context * plan.tensor, self.cluster.placed(plan.order)
        if any(each.begin % size or each.end % size for each in placed):
            kinds = tuple(range(len(placed)))
            return [ClusterPart(self._model(kinds, self.job.ranks, self.job.batch), plan, 0, 1)]
        found = []
        for each, rows in zip(placed, plan.rows or [plan.micro_batch] * len(placed), strict=True):
            batch = self.job.batch // plan.micro_batch * rows
            model = self._model((each.kind,), math.gcd(each.begin, each.end), batch)
            found.append(ClusterPart(model, msgspec.structs.replace(plan, micro_batch=rows), 0, 1))
        return found

    def placement(self, plan: TrainingPlan) -> list[HostUse]:
        """What the hosts of each kind have, in the order of ranks."""
        plan, placed = with_layers(self.job, plan), self.cluster.placed(plan.order)
        size = self.job.ranks // plan.pipeline
        found = []
        for each, rows in zip(placed, plan.rows or [plan.micro_batch] * len(placed), strict=True):
            kind = self.cluster.kinds[each.kind]
            stages = range(each.begin // size, (each.end - 1) // size + 1)
            layers = tuple(plan.layers[rank] for rank in stages) if plan.layers else (self.job.shape.layers,)
            own = msgspec.structs.replace(plan, micro_batch=rows)
            memory = self._model((each.kind,), size, self.job.batch // plan.micro_batch * rows).memory
            found.append(
                HostUse(
                    f"{kind.hosts} x {kind.hardware.name}",
                    (each.begin, each.end - 1),
                    layers,
                    rows,
                    max(memory.use(own, memory.part(own, rank)).total for rank in stages),
                    kind.hardware.usable_bytes,
                )
            )
        return found

    def _model(self, kinds: tuple[int, ...], near: int, batch: int) -> TimeModel:
        """The model of hosts that have what these kinds have in common; `batch` as if all had these rows."""
        key = kinds, near, batch
        if key not in self._models:
            hardware, job = self.cluster.slowest(kinds), self.job
            own = msgspec.structs.replace(
                job,
                hardware=hardware,
                links=interconnect_of(hardware, None, job.ranks),
                batch=batch,
                limit_bytes=hardware.usable_bytes,
                cluster=None,
            )
            wide = msgspec.structs.replace(job, cluster=None)
            self._models[key] = TimeModel(own, GroupPrices(own, wide, near))
        return self._models[key]

    # ---- time --------------------------------------------------------------------------------------------

    def step(self, plan: TrainingPlan) -> StepTime:
        """The time of a step, by cause: that of the slowest part, which waits for the others' ends."""
        return self._slowest(plan)[1]

    def collectives(self, plan: TrainingPlan) -> list[PlannedCollective]:
        """The collectives of a step of the slowest part."""
        part = self._slowest(plan)[0]
        return part.model.collectives_of_rank(part.of(plan), part.rank)

    def _slowest(self, plan: TrainingPlan) -> tuple[ClusterPart, StepTime]:
        parts = self.parts(plan)
        steps = [part.model.of_rank(part.of(plan), part.rank) for part in parts]
        part, step = max(zip(parts, steps, strict=True), key=lambda each: each[1].time.total)
        if plan.pipeline == 1:
            return part, step.time
        all_s = sum(each.alike * one.micro_batch_s for each, one in zip(parts, steps, strict=True))
        bubble = (all_s - step.micro_batch_s) / plan.interleave
        return part, step.time._replace(bubble=bubble)

    def least_s(self, plan: TrainingPlan) -> float:
        """A bound: no plan with these axes and stages is faster, whatever it shares and codes."""
        count = plan.micro_batches(self.job.batch)
        if plan.pipeline == 1:
            return count * max(part.model.micro_batch_s(part.plan, 0) for part in self.parts(plan))
        each, fixed = self._paces(plan)
        layers = with_layers(self.job, plan).layers
        paces = [one * layer + other for one, layer, other in zip(layers, each, fixed, strict=True)]
        most = max(paces)
        return count * most + (sum(paces) - most) / plan.interleave

    def least_of_axes_s(self, plan: TrainingPlan) -> float:
        """A bound: no plan with these axes is faster, whatever its stages and rows are.

        A pace has to leave room for all layers, in parts of a layer. The bubble has one layer of each other
        stage. With pipeline=1 each rank has its rows at the rate that it has with as many as there can be.
        """
        count, layers = plan.micro_batches(self.job.batch), self.job.shape.layers
        if plan.pipeline == 1:
            return count * self._least_rows_s(plan)
        each, fixed = self._paces(plan)
        rate = sum(1 / seconds for seconds in each)
        pace = (layers + sum(one / other for one, other in zip(fixed, each, strict=True))) / rate
        return count * pace + sum(each) - max(each)

    def _paces(self, plan: TrainingPlan) -> tuple[list[float], list[float]]:
        """Of each rank of the pipeline: seconds of a layer and a micro-batch, and of what is no layer."""
        key = (
            plan.data, plan.context, plan.tensor, plan.pipeline, plan.order, plan.micro_batch, plan.sequence,
            plan.expert, plan.recompute, plan.interleave,
        )  # fmt: skip
        if key not in self._kept:
            bare = msgspec.structs.replace(plan, layers=(1,) * plan.pipeline)
            models = self.stage_models(plan)
            each = [model.layer_s(bare) for model in models]
            own = [model.micro_batch_s(bare, rank) for rank, model in enumerate(models)]
            self._kept[key] = each, [one - layer for one, layer in zip(own, each, strict=True)]
        return self._kept[key]

    def _least_rows_s(self, plan: TrainingPlan) -> float:
        """A bound of a micro-batch without a pipeline: rows go where they are quick."""
        parts, placed = self.parts(plan), self.cluster.placed(plan.order)
        equal = max(part.model.micro_batch_s(part.plan, 0) for part in parts)
        if len(parts) == 1 or plan.data == 1:
            return equal
        total, rate = plan.data * plan.micro_batch, 0.0
        most = total - plan.data + 1
        widest = msgspec.structs.replace(plan, micro_batch=most)
        for part, each in zip(parts, placed, strict=True):
            count = (each.end - each.begin) // (plan.context * plan.tensor)
            rate += count * most / part.model.micro_batch_s(widest, 0)
        return min(equal, total / rate)


class LimitedUse(MemoryUse):
    """Memory of a rank; `limit_bytes` is what a plan may use of it."""

    limit_bytes: int

    @classmethod
    def of(cls, use: MemoryUse, limit_bytes: int) -> LimitedUse:
        """The same memory, with its limit."""
        found = cls(*use)
        found.limit_bytes = limit_bytes
        return found


class ClusterMemory:
    """Memory of plans on hosts that differ, as `MemoryModel` says it.

    Bounds are as if the limit of all hosts were that of the job: what is above it is missing somewhere.
    """

    def __init__(self, model: ClusterModel) -> None:
        self._model, self._limit_bytes = model, model.job.limit_bytes

    def of(self, plan: TrainingPlan) -> LimitedUse:
        """That of the rank that has least to spare."""
        return self.fullest(plan, self.parts(plan))

    def parts(self, plan: TrainingPlan) -> list[tuple[ClusterPart, RankParts]]:
        """Those of all ranks that are not alike."""
        return [(part, part.model.memory.part(part.plan, part.rank)) for part in self._model.parts(plan)]

    def fullest(self, plan: TrainingPlan, parts: list[tuple[ClusterPart, RankParts]]) -> LimitedUse:
        """Memory of the rank that has least to spare."""
        uses = [
            LimitedUse.of(part.model.memory.use(part.of(plan), each), part.model.job.limit_bytes)
            for part, each in parts
        ]
        return max(uses, key=lambda use: use.total - use.limit_bytes)

    def excess_bytes(self, plan: TrainingPlan, use: MemoryUse) -> int:
        """What is missing of the memory of some hosts; 0: the plan fits."""
        limit = use.limit_bytes if isinstance(use, LimitedUse) else self.limit_bytes(plan)
        return max(0, use.total - limit)

    def limit_bytes(self, plan: TrainingPlan) -> int:
        """What a plan may use of the rank that has least to spare."""
        return self.of(plan).limit_bytes

    def least_bytes(self, parts: list[tuple[ClusterPart, RankParts]], plan: TrainingPlan) -> float:
        """A bound: no sharing or codec of these stages takes less."""
        return self._limit_bytes + max(
            part.model.memory.least_of_part_bytes(each, part.of(plan)) - part.model.job.limit_bytes
            for part, each in parts
        )

    def least_of_axes_bytes(self, plan: TrainingPlan) -> float:
        """A bound: no plan with these axes takes less, whatever its stages and rows are.

        With so many bytes more on each host, all hosts together have room for all layers, in parts of one.
        """
        layers = self._model.job.shape.layers
        if plan.pipeline == 1:
            parts = [(part.model, part.plan) for part in self._model.parts(plan)]
            single = [(model, msgspec.structs.replace(own, micro_batch=1)) for model, own in parts]
            excess = max(
                layers * model.memory.least_of_layer_bytes(own, 0) - model.job.limit_bytes
                for model, own in single
            )
            return self._limit_bytes + excess
        each = [
            (model.memory.least_of_layer_bytes(plan, rank), model.job.limit_bytes)
            for rank, model in enumerate(self._model.stage_models(plan))
        ]
        room = sum(limit / layer for layer, limit in each)
        return self._limit_bytes + (layers - room) / sum(1 / layer for layer, _ in each)
