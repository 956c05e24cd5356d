"""The device mesh of a plan, and a rank's position in it.

Example: Plan(data=2, tensor=2, pipeline=2) on 8 ranks; rank 5 has pipeline 1, data 0, tensor 1.

Under Plan(local_steps=...) each replica of the model has a mesh of its own, over which a step communicates.
What the replicas exchange goes over the mesh of all ranks, its attribute `outer`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unisono.torch.control_data import control_device
from unisono.torch_internals import c10d

from .axes import AXES

if TYPE_CHECKING:
    from .plan import Plan

DIMS = ("pipeline", "replica", "shard", "tensor")


@dataclass(frozen=True)
class PlanMesh:
    """The ranks of a plan, as PyTorch's DeviceMesh with the axes pipeline, replica, shard, tensor.

    Ranks that share a sequence hold parameters as data ranks do: they are on the axis shard under ZeRO 1 to
    3, and on replica under ZeRO 0.

    Attributes:
        world: a group of all ranks of the plan.
        context: a group of the ranks that share a sequence; None: the plan has no such axis.
        outer: this is the mesh of one replica that trains on its own; `outer` has all of them.
    """

    axes: DeviceMesh
    plan: Plan
    world: dist.ProcessGroup
    outer: PlanMesh | None = None
    context: Any = None

    @classmethod
    def of(cls, plan: Plan, device_type: str) -> PlanMesh:
        """Make the mesh, and with it its process groups. All ranks call this.

        None of them is the default group: an error may end a run and its groups, and the job goes on.

        Raises:
            ValueError: the job has another number of ranks than the plan.
            RuntimeError: torch.distributed has not been initialised.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                'there is no process group; call torch.distributed.init_process_group("unisono") first'
            )
        if dist.get_world_size() != plan.ranks:
            raise ValueError(f"{plan} needs {plan.ranks} ranks, but this job has {dist.get_world_size()}")
        shards = plan.sharers
        shape = (plan.pipeline, plan.copies // shards, shards, plan.tensor)
        ranks = torch.arange(plan.ranks).view(shape)
        groups = groups_along(ranks)
        whole = [group for group, size in zip(groups, shape, strict=True) if size == plan.ranks]
        world: Any = whole[0] if whole else new_group()
        context = None
        if plan.context > 1:
            context = _group(ranks.view(plan.sizes), [axis.name for axis in AXES].index("context"))
        mesh = cls(_axes(groups, ranks, device_type), plan, world, context=context)
        return mesh if plan.local_steps is None else mesh._of_replica(ranks)

    def _of_replica(self, ranks: torch.Tensor) -> PlanMesh:
        """Make the mesh of this rank's replica. All ranks of all replicas call this."""
        alone, world = _group(ranks.unsqueeze(-1), -1), _group(ranks.movedim(1, 0).flatten(1), -1)
        here = self.place("replica")
        groups = [alone if axis == "replica" else self.group(axis) for axis in DIMS]
        axes = _axes(groups, ranks[:, here : here + 1], self.axes.device_type)
        return PlanMesh(axes, self.plan.of_replica(), world, self)

    @functools.cached_property
    def counts(self) -> bool:
        """Whether this rank's loss counts: of the ranks that have its rows it is the first one."""
        return not any(self.index(axis.name) for axis in AXES if axis.splits not in ("layers", "rows"))

    @functools.cached_property
    def draws(self) -> list[int]:
        """This rank's index on the axes whose ranks draw numbers of their own, the fastest first."""
        return [self.index(axis.name) for axis in reversed(AXES) if axis.draws]

    @functools.cached_property
    def control(self) -> torch.device:
        """Where the ranks' control numbers lie: in the host's memory, if `world` takes them there."""
        return control_device(self.world)

    def of_experts(self) -> PlanMesh:
        """Make the mesh of experts' parameters, whose tensor axis is that of experts. All ranks call it."""
        plan = self.plan.of_experts()
        shape = (plan.pipeline, plan.data // plan.shards, plan.shards, plan.tensor)
        ranks = torch.arange(plan.ranks).view(shape)
        axes = _axes(groups_along(ranks), ranks, self.axes.device_type)
        return PlanMesh(axes, plan, self.world)

    def part(self, *axes: str) -> DeviceMesh:
        """Return the mesh of these axes."""
        names: Any = self.axes.mesh_dim_names
        return self.axes[tuple(names[DIMS.index(axis)] for axis in axes)]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the group of the ranks that differ from this one in `axis` only."""
        return self.axes.get_group(DIMS.index(axis))

    def place(self, axis: str) -> int:
        """Return this rank's index on `axis`."""
        return self._places[DIMS.index(axis)]

    @functools.cached_property
    def _places(self) -> list[int]:
        return [self.axes.get_local_rank(axis) for axis in range(len(DIMS))]

    def data_group(self) -> dist.ProcessGroup:
        """Make a group of its own of the data ranks, replica x shard. All ranks call this."""
        ranks = self.everyone.axes.mesh
        alone = self.outer is not None  # a replica that trains on its own
        group: dist.ProcessGroup = _group(ranks, 2) if alone else _group(ranks.flatten(1, 2), 1)
        return group

    @property
    def stage(self) -> int:
        """This rank's index in its pipeline."""
        return self.place("pipeline")

    @property
    def row(self) -> int:
        """This rank's index among the data ranks, which decides its rows of a batch."""
        return self.index("data")

    def index(self, axis: str) -> int:
        """This rank's index on an axis of the plan. Those with copies are together `replica` and `shard`."""
        names = [each.name for each in AXES if each.copies]
        if axis not in names:
            return self.place(axis)
        faster = math.prod(getattr(self.plan, name) for name in names[names.index(axis) + 1 :])
        return int(self.copy // faster % getattr(self.plan, axis))

    @property
    def copy(self) -> int:
        """This rank's index among those that hold the same part of the matrices."""
        return self.place("replica") * self.axes.size(2) + self.place("shard")

    @property
    def everyone(self) -> PlanMesh:
        """The mesh of all ranks of the run: with the rows of a batch, and the replicas."""
        return self.outer or self

    def ranks_of(self, stage: int) -> list[int]:
        """Return the ranks of the job that have this rank of a pipeline, of all replicas."""
        size = self.everyone.plan.ranks // self.plan.pipeline
        return [*range(stage * size, (stage + 1) * size)]

    def peer(self, stage: int) -> int:
        """Return the global rank with this rank's data and tensor place, and another stage's."""
        return dist.get_rank() + (stage - self.stage) * (self.everyone.plan.ranks // self.plan.pipeline)


def _axes(groups: list[Any], ranks: torch.Tensor, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=unique_names(DIMS))


def _group(ranks: torch.Tensor, axis: int) -> Any:
    return group_of(ranks.movedim(axis, -1).reshape(-1, ranks.size(axis)))


def groups_along(ranks: torch.Tensor) -> list[Any]:
    """Make the groups of ranks that differ in one axis only; return this rank's, of each axis."""
    return [_group(ranks, axis) for axis in range(ranks.dim())]


def group_of(columns: torch.Tensor) -> Any:
    """Make the group of each row of ranks; return this rank's, or None. All ranks call this."""
    mine: Any = None
    for column in columns.tolist():
        group = new_group(column)
        mine = group if dist.get_rank() in column else mine
    return mine


def new_group(ranks: list[int] | None = None, *, alone: bool = False) -> Any:
    """Make a group of these ranks, or of all, with the timeout of the job's. All ranks call this, or if
    `alone` its own.
    """
    timeout = c10d.timeout_of(c10d.world()[0])
    return dist.new_group(ranks, timeout=timeout, use_local_synchronization=alone)


# ---- names of axes ----


_numbers = itertools.count()


def unique_names(axes: Iterable[str]) -> tuple[str, ...]:
    """Names of the axes of a new mesh. Example: ("data",) -> ("data of mesh 3",)."""
    number = next(_numbers)
    return tuple(f"{axis} of mesh {number}" for axis in axes)
