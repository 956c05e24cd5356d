"""Builds what trains from a model and a plan: cut on the tensor axis, staged, wrapped on the data axis."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from unisono.torch_internals.training import persistent

from .arguments import agree, check_model, same_everywhere
from .experts.layers import ExpertAxis
from .experts.spread import ExpertCheck, spread
from .generators import RngRegion
from .gradients import TiedParameter, add_up, squared_norm, sums_of, ties_of
from .graph.capture import CaptureError
from .graph.fused import split_
from .graph.stage_program import StageProgram
from .loss_check import LossParameters
from .materialize import Init, Initializer
from .mesh import PlanMesh
from .model_buffers import ModelBuffers, sync_batch_norms
from .output_check import OutputCheck
from .parameter_hooks import ParameterHooks
from .pipeline.runtime import PipelineRuntime
from .pipeline.schedule import schedule
from .pipeline.stages import (
    PipelineStages,
    ProgramStage,
    check_no_cuts,
    first_pieces,
    forget,
    refuse_calls,
    stages_of,
)
from .plan import Plan
from .precision import check_staged, kept_in_f32
from .programs import ModelPrograms, RecordedPrograms
from .replicated_parameters import ReplicatedParameters
from .sharded_parameters import DataAxis, shard_units
from .structure import ModelStructure, identity, structure_of
from .swap import ParameterSwap
from .swap_space import SwapSpace
from .tensor_decision import TensorDecision
from .tensor_parallel import cut_model


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
    seed: int = 0  # of what the model draws in steps, the same on all ranks
    trial: ExpertCheck | None = None  # of the expert axis, before the first step
    compared: OutputCheck | None = None  # of the stages, before the first step
    region: RngRegion | None = None  # where the tensor axis cuts
    decision: TensorDecision | None = None  # how it cuts
    experts: ExpertAxis | None = None
    programs: ModelPrograms = field(default_factory=ModelPrograms)
    others: list[dist.ProcessGroup] = field(default_factory=list)  # groups that are on no axis
    elsewhere: set[nn.Module] = field(default_factory=set)  # what other stages have, and not this rank
    hooks: ParameterHooks = field(default_factory=ParameterHooks)  # the caller's

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


@dataclass
class SetupBeginning:
    """What is agreed before a model is recorded: its values, and the groups of the plan."""

    initial: Initializer
    drawn: int  # a seed of rank 0's generator
    mesh: PlanMesh


def begin(
    model: nn.Module, plan: Plan, *, seed: int | None = None, init: Init | None = None, **_more: Any
) -> SetupBeginning:
    """Agree on a model and a plan, and make the groups. All ranks call this.

    Raises:
        ValueError: ranks have other models or plans, or the model does not fit any plan.
    """
    check_model(model, plan)
    initial, drawn = Initializer(model, seed=seed, init=init), 0
    if dist.is_initialized():  # otherwise the mesh says so
        initial.seed, drawn = agree(model, plan, initial.seed)
    return SetupBeginning(initial, drawn, PlanMesh.of(plan, initial.device))


def set_up(
    model: nn.Module,
    plan: Plan,
    begun: SetupBeginning | None = None,
    *,
    pieces: Sequence[nn.Module] | None = None,
    cuts: dict[str, str] | None = None,
    sample: Any = None,
    seed: int | None = None,
    init: Init | None = None,
    check: bool | None = None,
    experts: dict[str, str] | None = None,
    own_loss: bool = False,
    weigh: object = None,
) -> ModelSetup:
    """See `parallelize`. `own_loss`: the model computes its loss, and returns more than logits."""
    begun = begun or begin(model, plan, seed=seed, init=init)
    hooks, initial, mesh = ParameterHooks.of(model, plan, weigh), begun.initial, begun.mesh
    structure = structure_of(model, pieces, cuts, staged=plan.pipeline > 1, own_loss=own_loss)
    same_everywhere(model)
    if plan.context > 1 or plan.tensor == 1:
        forget_caches(model)
    fill = partial(_fill, seed=initial.seed, init=init) if initial else nothing
    names, compared = _names(model), OutputCheck.of(model, plan, check, fill, structure)
    in_pieces = bool(structure.pieces) and plan.context == 1
    axis, trial = spread(model, mesh, experts, check, fill, structure.output, pieces=in_pieces)
    recorded: RecordedPrograms | None = None
    starts: Sequence[int] = ()
    if plan.pipeline > 1 and in_pieces:
        starts = first_pieces(structure, plan, sample, on_meta=bool(initial))
    elif plan.pipeline > 1 or plan.context > 1:
        recorded = _recorded(model, structure, mesh, pieces, sample)
    decision = _decided(model, structure, plan, sample, recorded)
    programs = ModelPrograms(recorded, decision)
    if decision is not None:
        others = {} if axis is None else {name: names[name] for name in names if name in axis.names}
        names = others | _names(model)  # of the layers that stand for fused ones, and of all experts
    kept, norms = kept_in_f32(model, plan), sync_batch_norms(model, mesh)
    region = None if decision is None else _cut(model, decision, mesh)
    if plan.pipeline == 1:
        units = shard_units(
            model, structure.units, mesh, last=True, initial=initial, exact=kept, experts=axis
        )
        runtime = PipelineRuntime(units, mesh, structure.output, single=True)
        built = ModelSetup(model, units, mesh, structure, runtime, [], (), names)
    else:
        built = _staged(model, structure, mesh, programs.first, starts, names, initial, axis)
    hooks.check_names(names)
    _complete(built, region)
    built.others, built.hooks = norms.begin(), hooks
    built.seed, built.trial, built.region, built.programs = begun.drawn, trial, region, programs
    built.compared, built.experts, built.decision = compared, axis, decision
    _follow(built, model, sample)
    sums, whole = [] if decision is None else decision.cut.sums, plan.tensor == plan.pipeline == 1
    if plan.context == 1:
        built.runtime.loss_parameters = LossParameters(model, sums, plan.tensor, whole=whole)
    built.runtime.runs_twice = axis is not None and axis.runs_twice
    if decision is not None:
        built.ties += sums_of(decision.cut, names, mesh)
    return built


def _complete(built: ModelSetup, region: RngRegion | None) -> None:
    """Tell the units what is known now."""
    if not isinstance(built.units, ParameterSwap):
        built.units.compress(built.named)
    if region is not None and built.mesh.plan.recompute:
        for unit in built.structure.units:  # the last recomputation may have ended within a region
            unit.register_forward_pre_hook(lambda *_: region.forget())


def _decided(
    model: nn.Module, structure: ModelStructure, plan: Plan, sample: Any, recorded: RecordedPrograms | None
) -> TensorDecision | None:
    """How the tensor axis cuts a model, whose fused layers are several then."""
    if plan.tensor == 1:
        return None
    first = None if recorded is None else recorded.first
    decision = TensorDecision(model, structure, plan, sample, None if first is None else first.open)
    forget_caches(model)  # not before: recorded without a cache, Hugging Face's models make a mask
    for path, sizes in decision.cut.fused.items():
        split_(model, path, sizes)
    if recorded is not None:
        recorded.cut(model, decision.cut)
    return decision


def _cut(model: nn.Module, decision: TensorDecision, mesh: PlanMesh) -> RngRegion:
    """Cut `model` in place. With recompute=True nothing of a unit is kept, so nothing is gathered again."""
    regathers = mesh.plan.sequence and not mesh.plan.recompute
    alone = mesh.plan.pipeline == 1 and mesh.plan.context == 1
    return cut_model(model, decision.cut, mesh.part("tensor"), regathers=regathers, alone=alone)


def _follow(built: ModelSetup, model: nn.Module, sample: Any) -> None:
    """Run the model by its programs from now on."""
    if built.programs.recorded is not None:
        built.runtime.programs = built.programs
    if (axis := built.programs.axis) is not None:
        calls = built.mesh.plan.recompute or not isinstance(built.units, ReplicatedParameters)
        units = [unit for unit in built.structure.units if calls and unit not in built.elsewhere]
        axis.follow(model, units)
    built.programs.note(model, sample)


def _fill(model: nn.Module, *, seed: int, init: Init | None) -> None:
    Initializer(model, seed=seed, init=init).fill(model)


def nothing(_model: nn.Module) -> None:
    """Do nothing: the model has its values."""


def forget_caches(model: nn.Module) -> None:
    """Switch off Hugging Face's key-value caches, which no step of training reads.

    A layer that runs again would add to its cache again. And with a cache the models do not look for packed
    texts, so plans with one would train another model than plans without. `generate` has its own setting.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def _names(model: nn.Module) -> dict[str, str]:
    first: dict[nn.Parameter, str] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(parameter, path)
    return {path: first[value] for path, value in model.named_parameters(remove_duplicate=False)}


def _recorded(
    model: nn.Module,
    structure: ModelStructure,
    mesh: PlanMesh,
    pieces: Sequence[nn.Module] | None,
    sample: Any,
) -> RecordedPrograms:
    """The programs that run in place of the model, or of its stages."""
    plan = mesh.plan
    if plan.pipeline > 1 and pieces is not None:
        raise ValueError(
            f"context={plan.context} cuts the stages of a pipeline from the program of "
            f"{type(model).__name__}: leave out pieces=, and write sample=inputs of a batch"
        )
    if plan.pipeline > 1:
        check_no_cuts(plan, model)
        forget_caches(model)
    try:
        return RecordedPrograms(model, mesh, structure.output, sample)
    except CaptureError as error:
        if plan.pipeline == 1:
            raise
        raise CaptureError(
            f"pipeline={plan.pipeline}: stages are cut from the program of {type(model).__name__}, which "
            f"could not be recorded: {error}. Write parallelize(..., sample=inputs of a batch), or "
            "pieces=[first, second, ...]"
        ) from error


def _staged(
    model: nn.Module,
    structure: ModelStructure,
    mesh: PlanMesh,
    first: StageProgram | None,
    starts: Sequence[int],
    names: dict[str, str],
    initial: Initializer,
    experts: ExpertAxis | None,
) -> ModelSetup:
    plan = mesh.plan
    stages: list[Any]
    if first is None:
        stages = stages_of(structure, starts, model)
    else:
        stages = [ProgramStage(first, stage, model) for stage in range(plan.stages)]
    rank_of = schedule(plan.schedule, plan.pipeline, 1, plan.chunks).rank_of
    here: dict[int, Any] = {stage: stages[stage] for stage, rank in enumerate(rank_of) if rank == mesh.stage}
    ties = ties_of(model, stages, rank_of, mesh)
    container = PipelineStages(here, None if plan.precision == "f32" else plan.stages - 1)
    inside = set(container.modules())
    staged = {module for stage in stages for module in stage.modules()}
    elsewhere, kept = staged - inside, kept_in_f32(model, plan)
    check_staged(model, kept, staged)
    forget(model, here.values())
    refuse_calls(model, here.values())
    for stage in here.values() if first is not None and initial else ():
        initial.fill_own(stage.owners)
        stage.take_bare()
        forget(model, here.values())
    units = shard_units(
        container,
        [unit for unit in structure.units if unit in inside],
        mesh,
        last=False,  # the container casts
        initial=initial,
        exact=kept,
        experts=experts,
    )
    output: Callable[[Any], Any] = identity
    if first is not None:
        output = structure.output
        for stage in here.values():
            stage.return_bare()
    runtime = PipelineRuntime(units, mesh, output, single=False)
    built = ModelSetup(model, units, mesh, structure, runtime, ties, tuple(starts), names)
    built.elsewhere = elsewhere
    return built
