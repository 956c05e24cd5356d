"""Builds what trains from a model and a plan, in four stages: record, split, place, wire.

`record` tells what the model consists of, and records the programs that run in its place. `split` leaves a
rank its part of each matrix. `place` leaves it its stages, and wraps them on the data axis. `wire` connects
what the three have made. Each takes what the ones before return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from .arguments import agree, check_model, same_everywhere
from .experts.layers import ExpertAxis
from .experts.spread import ExpertCheck, spread
from .generators import RngRegion
from .gradients import TiedParameter, sums_of, ties_of
from .graph.capture import CaptureError
from .graph.fused import split_
from .loss_check import LossParameters
from .materialize import Init, Initializer
from .mesh import PlanMesh
from .model_buffers import sync_batch_norms
from .model_setup import ModelSetup
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
from .tensor_decision import TensorDecision
from .tensor_parallel import cut_model


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


@dataclass(frozen=True)
class RecordedModel:
    """The whole model: what it consists of, and what runs in its place."""

    model: nn.Module
    mesh: PlanMesh
    initial: Initializer
    structure: ModelStructure
    sample: Any
    names: dict[str, str]
    hooks: ParameterHooks
    compared: OutputCheck | None
    experts: ExpertAxis | None  # of this rank; the model has no others from here on
    trial: ExpertCheck | None
    programs: RecordedPrograms | None  # None: the model's forward runs, or its pieces
    starts: Sequence[int]  # the first piece of each stage but the first, where stages are pieces


@dataclass(frozen=True)
class SplitModel:
    """This rank's part of each matrix."""

    decision: TensorDecision | None
    region: RngRegion | None
    programs: ModelPrograms
    names: dict[str, str]  # with those of layers that stand for fused ones
    exact: list[nn.Module]  # modules that compute in f32
    others: list[dist.ProcessGroup]


@dataclass(frozen=True)
class PlacedModel:
    """This rank's stages, and its parts of their parameters on the data axis."""

    units: DataAxis
    runtime: PipelineRuntime
    ties: list[TiedParameter] = field(default_factory=list)
    elsewhere: set[nn.Module] = field(default_factory=set)


def set_up(
    model: nn.Module,
    plan: Plan,
    begun: SetupBeginning | None = None,
    *,
    seed: int | None = None,
    init: Init | None = None,
    **options: Any,
) -> ModelSetup:
    """See `parallelize`, and `record` for the options."""
    begun = begun or begin(model, plan, seed=seed, init=init)
    whole = record(model, begun, **options)
    part = split(whole)
    placed = place(whole, part)
    return wire(whole, part, placed, begun.drawn)


def record(
    model: nn.Module,
    begun: SetupBeginning,
    *,
    pieces: Sequence[nn.Module] | None = None,
    cuts: dict[str, str] | None = None,
    sample: Any = None,
    check: bool | None = None,
    experts: dict[str, str] | None = None,
    own_loss: bool = False,
    weigh: object = None,
) -> RecordedModel:
    """Record the model. `own_loss`: it computes its loss, and returns more than logits."""
    mesh, initial = begun.mesh, begun.initial
    plan = mesh.plan
    hooks = ParameterHooks.of(model, plan, weigh)
    structure = structure_of(model, pieces, cuts, staged=plan.pipeline > 1, own_loss=own_loss)
    same_everywhere(model)
    if plan.context > 1 or plan.tensor == 1:
        forget_caches(model)
    fill, names = initial.fill_copy, _names(model)
    compared = OutputCheck.of(model, plan, check, fill, structure)
    in_pieces = bool(structure.pieces) and plan.context == 1
    axis, trial = spread(model, mesh, experts, check, fill, structure.output, pieces=in_pieces)
    recorded: RecordedPrograms | None = None
    starts: Sequence[int] = ()
    if plan.pipeline > 1 and in_pieces:
        starts = first_pieces(structure, plan, sample, on_meta=bool(initial))
    elif plan.pipeline > 1 or plan.context > 1:
        recorded = _recorded(model, structure, mesh, pieces, sample)
    return RecordedModel(
        model, mesh, initial, structure, sample, names, hooks, compared, axis, trial, recorded, starts
    )


def split(whole: RecordedModel) -> SplitModel:
    """Leave this rank its part on the tensor axis, in place."""
    model, plan, axis = whole.model, whole.mesh.plan, whole.experts
    decision, names = _decided(whole), whole.names
    if decision is not None:
        others = {} if axis is None else {name: names[name] for name in names if name in axis.names}
        names = others | _names(model)  # of the layers that stand for fused ones, and of all experts
    whole.hooks.check_names(names)
    exact, norms = kept_in_f32(model, plan), sync_batch_norms(model, whole.mesh)
    region = None if decision is None else _cut(model, decision, whole.mesh)
    programs = ModelPrograms(whole.programs, decision)
    return SplitModel(decision, region, programs, names, exact, norms.begin())


def place(whole: RecordedModel, part: SplitModel) -> PlacedModel:
    """Leave this rank its stages, in place, and wrap them on the data axis."""
    if whole.mesh.plan.pipeline > 1:
        return _staged(whole, part)
    structure, mesh = whole.structure, whole.mesh
    units = shard_units(
        whole.model, structure.units, mesh, last=True, initial=whole.initial, exact=part.exact,
        experts=whole.experts,
    )  # fmt: skip
    return PlacedModel(units, PipelineRuntime(units, mesh, structure.output, single=True))


def wire(whole: RecordedModel, part: SplitModel, placed: PlacedModel, seed: int) -> ModelSetup:
    """Connect the parts: programs run the model from now on, and units know what they compress."""
    model, mesh, decision, runtime = whole.model, whole.mesh, part.decision, placed.runtime
    sums = [] if decision is None else sums_of(decision.cut, part.names, mesh)
    built = ModelSetup(
        model, placed.units, mesh, whole.structure, runtime, placed.ties + sums, tuple(whole.starts),
        part.names, seed, whole.trial, whole.compared, part.region, decision, whole.experts, part.programs,
        part.others, placed.elsewhere, whole.hooks,
    )  # fmt: skip
    if not isinstance(built.units, ParameterSwap):
        built.units.compress(built.named)
    if (region := built.region) is not None and mesh.plan.recompute:
        for unit in built.structure.units:  # the last recomputation may have ended within a region
            unit.register_forward_pre_hook(lambda *_: region.forget())
    _follow(built, whole.sample)
    if mesh.plan.context == 1:
        alone = mesh.plan.tensor == mesh.plan.pipeline == 1
        added = [] if decision is None else decision.cut.sums
        runtime.loss_parameters = LossParameters(model, added, mesh.plan.tensor, whole=alone)
    runtime.runs_twice = whole.experts is not None and whole.experts.runs_twice
    return built


def _decided(whole: RecordedModel) -> TensorDecision | None:
    """How the tensor axis cuts a model, whose fused layers are several then."""
    model, plan, recorded = whole.model, whole.mesh.plan, whole.programs
    if plan.tensor == 1:
        return None
    first = None if recorded is None else recorded.first
    decision = TensorDecision(
        model, whole.structure, plan, whole.sample, None if first is None else first.open
    )
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


def _follow(built: ModelSetup, sample: Any) -> None:
    """Run the model by its programs from now on."""
    if built.programs.recorded is not None:
        built.runtime.programs = built.programs
    if (axis := built.programs.axis) is not None:
        calls = built.mesh.plan.recompute or not isinstance(built.units, ReplicatedParameters)
        units = [unit for unit in built.structure.units if calls and unit not in built.elsewhere]
        axis.follow(built.model, units)
    built.programs.note(built.model, sample)


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


def _staged(whole: RecordedModel, part: SplitModel) -> PlacedModel:
    model, structure, mesh, initial = whole.model, whole.structure, whole.mesh, whole.initial
    plan, first = mesh.plan, part.programs.first
    stages: list[Any]
    if first is None:
        stages = stages_of(structure, whole.starts, model)
    else:
        stages = [ProgramStage(first, stage, model) for stage in range(plan.stages)]
    rank_of = schedule(plan.schedule, plan.pipeline, 1, plan.chunks).rank_of
    here: dict[int, Any] = {stage: stages[stage] for stage, rank in enumerate(rank_of) if rank == mesh.stage}
    ties = ties_of(model, stages, rank_of, mesh)
    container = PipelineStages(here, None if plan.precision == "f32" else plan.stages - 1)
    inside = set(container.modules())
    staged = {module for stage in stages for module in stage.modules()}
    check_staged(model, part.exact, staged)
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
        exact=part.exact,
        experts=whole.experts,
    )
    output: Callable[[Any], Any] = identity
    if first is not None:
        output = structure.output
        for stage in here.values():
            stage.return_bare()
    runtime = PipelineRuntime(units, mesh, output, single=False)
    return PlacedModel(units, runtime, ties, staged - inside)
