"""Several types of compute in one search: each plan is priced by the model of its type."""

from __future__ import annotations

from typing import Any

from unisono.planner.cluster_model import ClusterModel, one_type_model
from unisono.planner.collectives import PlannedCollective
from unisono.planner.memory import MemoryUse
from unisono.planner.step_time import StepTime, TimeModel
from unisono.planner.training_plan import TrainingJob, TrainingPlan

__all__ = ["PlanModel", "TypedMemory", "TypedModel", "model_of"]


class TypedModel:
    """Prices plans of one job, as `TimeModel` does, each by its type of compute."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self._models = {compute: one_type_model(job.typed(compute)) for compute in job.computes}
        self.memory = TypedMemory(self)

    def of(self, plan: TrainingPlan) -> TimeModel | ClusterModel:
        """The model of a plan's type."""
        return self._models[plan.compute or self.job.compute]

    def step(self, plan: TrainingPlan) -> StepTime:
        """The time of a step, by cause."""
        return self.of(plan).step(plan)

    def collectives(self, plan: TrainingPlan) -> list[PlannedCollective]:
        """The collectives of a step, those that take longest first."""
        return self.of(plan).collectives(plan)

    def least_s(self, plan: TrainingPlan) -> float:
        """A bound: no plan with these axes and stages is faster."""
        return self.of(plan).least_s(plan)

    def least_of_axes_s(self, plan: TrainingPlan) -> float:
        """A bound: no plan with these axes is faster."""
        return self.of(plan).least_of_axes_s(plan)


class TypedMemory:
    """Memory of plans of one job, as `MemoryModel` says it, each by its type of compute."""

    def __init__(self, model: TypedModel) -> None:
        self._model = model

    def of(self, plan: TrainingPlan) -> MemoryUse:
        """That of the fullest rank."""
        return self._model.of(plan).memory.of(plan)

    def parts(self, plan: TrainingPlan) -> Any:
        """What ranks have however their states are shared."""
        return self._model.of(plan).memory.parts(plan)

    def fullest(self, plan: TrainingPlan, parts: Any) -> MemoryUse:
        """Memory of the fullest rank of a plan that has these parts."""
        return self._model.of(plan).memory.fullest(plan, parts)

    def excess_bytes(self, plan: TrainingPlan, use: MemoryUse) -> int:
        """What is missing; 0: the plan fits."""
        return self._model.of(plan).memory.excess_bytes(plan, use)

    def limit_bytes(self, plan: TrainingPlan) -> int:
        """What a plan may use of its fullest rank."""
        return self._model.of(plan).memory.limit_bytes(plan)

    def least_bytes(self, parts: Any, plan: TrainingPlan) -> float:
        """A bound: no sharing, swapping or codec of these stages takes less."""
        return self._model.of(plan).memory.least_bytes(parts, plan)

    def least_of_axes_bytes(self, plan: TrainingPlan) -> float:
        """A bound: no plan with these axes takes less."""
        return self._model.of(plan).memory.least_of_axes_bytes(plan)


PlanModel = TimeModel | ClusterModel | TypedModel


def model_of(job: TrainingJob) -> PlanModel:
    """What prices the plans of a job."""
    return TypedModel(job) if job.computes else one_type_model(job)
