"""A model that is ready to train: its parts, and what a step asks of them. `build.py` makes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from unisono.torch_internals.training import persistent

from .experts.layers import ExpertAxis
from .experts.spread import ExpertCheck
from .generators import RngRegion
from .gradients import TiedParameter, add_up, squared_norm
from .mesh import PlanMesh
from .model_buffers import ModelBuffers
from .output_check import OutputCheck
from .parameter_hooks import ParameterHooks
from .pipeline.runtime import PipelineRuntime
from .programs import ModelPrograms
from .replicated_parameters import ReplicatedParameters
from .sharded_parameters import DataAxis
from .structure import ModelStructure
from .swap import ParameterSwap
from .swap_space import SwapSpace
from .tensor_decision import TensorDecision


@dataclass
class ModelSetup:
    """A model ready to train, and its properties."""

    model: nn.Module
    units: DataAxis
    mesh: PlanMesh
    structure: ModelStructure
    runtime: PipelineRuntime
    ties: list[TiedParameter]
    cuts: tuple[int, ...]  # the first piece of each stage but the first
    names: dict[str, str]  # every path of a parameter -> its first path, which is its name
    seed: int  # of what the model draws in steps, the same on all ranks
    trial: ExpertCheck | None  # of the expert axis, before the first step
    compared: OutputCheck | None  # of the stages, before the first step
    region: RngRegion | None  # where the tensor axis cuts
    decision: TensorDecision | None  # how it cuts
    experts: ExpertAxis | None
    programs: ModelPrograms
    others: list[dist.ProcessGroup]  # groups that are on no axis
    elsewhere: set[nn.Module]  # what other stages have, and not this rank
    hooks: ParameterHooks  # the caller's

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """Every parameter of this rank by its name in the user's model."""
        return {self.names[path]: value for path, value in self.model.named_parameters() if not value.is_meta}

    def follow(self, mesh: PlanMesh) -> None:
        """Train on the data ranks of this mesh from now on; there are no other axes."""
        assert not isinstance(self.units, ParameterSwap)
        self.mesh = mesh
        self.units.follow(mesh)
        self.runtime = PipelineRuntime(self.units, mesh, self.structure.output, single=True)

    def follow_frozen(self, everywhere: Mapping[str, bool]) -> None:
        """Train those parameters that require gradients now. `everywhere`: which these are, of all ranks."""
        assert not isinstance(self.units, ParameterSwap)
        self.units.follow_frozen()
        self.runtime.follow_frozen()
        self.programs.follow_frozen(everywhere)

    def complete(self, trained: dict[str, nn.Parameter], scale: float) -> None:
        """Make the gradients those of all axes, and call the caller's hooks. `scale`: of the loss."""
        with self._having([trained[tie.name] for tie in self.ties if tie.name in trained]):
            add_up(trained, self.ties)
        if self.experts is not None:
            each = [{name: trained[name]} for name in self.experts.names if name in trained]
            for named in [trained] if self.swap is None else each:
                with self._having(named.values()):
                    self.experts.average(named)
        self.hooks.call(trained, scale)

    def _having(self, parameters: Iterable[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        """Have the gradients of some parameters in memory."""
        return contextlib.nullcontext() if self.swap is None else self.swap.fetched(parameters)

    def squared_norm(self, trained: dict[str, nn.Parameter]) -> Tensor | float:
        """This rank's part of the squared norm of the gradients."""
        spread = {} if self.experts is None else {"spread": self.experts.spread}
        stored = None if self.swap is None else self.swap.norms
        return squared_norm(trained, self.ties, self.mesh, stored=stored, **spread)

    @property
    def swap(self) -> SwapSpace | None:
        """What swaps; None: nothing does."""
        return None if isinstance(self.units, ReplicatedParameters) else self.units.swap

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All groups in which a run communicates."""
        meshes = [mesh for mesh in (self.mesh, self.mesh.outer) if mesh is not None]
        found: list[Any] = [group for mesh in meshes for group in (mesh.world, *mesh.axes.get_all_groups())]
        if self.experts is not None:
            found += self.experts.mesh.axes.get_all_groups()
        found += [self.mesh.context] * (self.mesh.context is not None)
        return found + [tie.group for tie in self.ties] + self.others

    def statistics(self, mesh: PlanMesh) -> ModelBuffers:
        """Every buffer of this rank's stages, to be kept equal over the data ranks of `mesh`."""
        return ModelBuffers(self._inside, self.structure.units if self.mesh.plan.recompute else (), mesh)

    @property
    def _inside(self) -> list[tuple[str, nn.Module]]:
        return [(path, one) for path, one in self.model.named_modules() if one not in self.elsewhere]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Every persistent buffer of this rank's stages by its name in the user's model."""
        return {
            f"{path}.{name}".lstrip("."): buffer
            for path, module in self._inside
            for name, buffer in module.named_buffers(recurse=False)
            if persistent(module, name)
        }
