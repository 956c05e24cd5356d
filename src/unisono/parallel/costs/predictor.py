"""From a model, a batch and plans to forecasts of a step on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from unisono.engine.base.validation import instance, positive, whole
from unisono.engine.costs.machine import MachineCalibration, recall
from unisono.engine.environment import env
from unisono.errors import UnfitError
from unisono.parallel.arguments import check_model, two
from unisono.parallel.batches import rows_of
from unisono.parallel.experts.layers import caller_of, expert_layers, parameters_of
from unisono.parallel.graph.capture import Recorder, Shapes
from unisono.parallel.graph.containers import cast
from unisono.parallel.graph.noted_call import gpu_attention
from unisono.parallel.graph.shapes import may_be_packed, searches_packed_texts, single_texts
from unisono.parallel.graph.stage_program import StageProgram, choose_starts
from unisono.parallel.optimizers import Parameters
from unisono.parallel.pipeline.stages import check_no_cuts, first_pieces
from unisono.parallel.plan import Plan
from unisono.parallel.precision import BATCH_NORM, kept_in_f32
from unisono.parallel.sharded_parameters import TYPES, apart, gathered_units, own_units
from unisono.planner.choice_page import PricedCollective
from unisono.planner.compute_calibration import ComputeCalibration, recall_compute
from unisono.planner.operator_costs import BY_BYTES
from unisono.torch_internals.training import module_at

from .collectives import SpreadExperts, attention_exchange, expert_exchanges
from .forecast import StepForecast
from .operators import OperatorPrices, TracedOperator
from .parameter_work import compressed_gradients
from .step_parts import (
    ADAM_OPERATORS,
    HostPricing,
    ModelTrial,
    ParameterSizes,
    StageStarts,
    StepParts,
    should_try,
    source_of,
)
from .step_time import collective_calls, step_forecast
from .task import TrainingTask
from .trace import NO_UNIT, TracedStep, trace_step, trace_update

if TYPE_CHECKING:
    from unisono.planner.hardware import Hardware


class StepPredictor:
    """Says what a step of a model takes under plans, without running one. What plans share is recorded once.

    Args:
        model: as `parallelize` takes it, before that; it stays as it is. It may be on the meta device.
        batch: (inputs, targets) of a step, of all ranks; only shapes and types count.
        rows: of a step, where the batch is a sample with other rows; None: those of the batch.
        loss, optimizer, pieces, cuts: as `parallelize` takes them. optimizer None: as Adam takes it.
            The tensor axis cuts as under `parallelize(..., sample=inputs)`; stages of pieces are balanced by
            parameters.
        compute: costs of operators; None: `unisono calibrate --compute`'s, or a roofline.
        machine: figures of the collectives; None: `unisono calibrate`'s, or the defaults.
        hosts: number of the host of each rank; (): all ranks are on this one.
        own_device: each rank computes on a device of its own, which `compute` is of: its cores are one.
            There collectives of the data axis run beside backward.
        speeds: of each rank, its rate of compute beside that of `compute`; (): all are alike.
        trial: run a few rows through a copy of a small model on this CPU, to see what its Python takes.
        hardware: of each host, whose links count in place of `machine`'s.
        task: all of what is trained, see `of`.
    Raises:
        CaptureError, ValueError, TypeError: wrong arguments, or a model that cannot be recorded.
    Example: StepPredictor(model, (x, y), loss=mse_loss).forecast(Plan(data=2)).total is in seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: tuple[Any, Any],
        *,
        loss: Callable[[Any, Any], Any] | None,
        rows: int | None = None,
        optimizer: Callable[[Any], Any] | None = None,
        pieces: Sequence[nn.Module] | None = None,
        cuts: dict[str, str] | None = None,
        compute: ComputeCalibration | None = None,
        machine: MachineCalibration | None = None,
        hosts: Sequence[int] = (),
        own_device: bool = False,
        speeds: Sequence[float] = (),
        trial: bool = False,
        hardware: Sequence[Hardware] = (),
        task: TrainingTask | None = None,
    ) -> None:
        _check_arguments(model, loss, optimizer, rows, hosts, speeds)
        if task is None:
            two(batch, own_loss=loss is None)  # or raise: it is none
            rows = rows_of(batch) if rows is None else rows
            task = TrainingTask(model, batch, rows, optimizer, loss, pieces, cuts=cuts)
        self._task, self._rows = task, task.batch
        self._few = min(2, task.batch)  # on which programs are compared
        self._packed = may_be_packed(task.inputs_of(task.sample))
        self._base = task.shapes()
        check_model(self._base.model, Plan())
        self._structure = task.structure(self._base.model, self._base.also)
        self._hosts, self._own_device, self._speeds = tuple(hosts), own_device, tuple(speeds)
        settings = env.read()
        if compute is None:
            found = recall_compute(settings, str(torch.__version__))
            self._compute, self._source = found.calibration, found.source
            if not self._compute.measured_here:
                self._source += "; unisono calibrate --compute measures this machine"
        else:
            self._compute, self._source = compute, source_of(compute, hardware, own_device=own_device)
        machine = machine or recall(settings).calibration
        self._trial: ModelTrial | None = None
        if trial and not own_device and should_try(model, task.sample):
            self._trial = ModelTrial(task, self._structure.output)
        self._pricing = HostPricing(
            self._compute, machine, tuple(hardware), own_device, self._trial, self._operators
        )
        self._updates: dict[Any, list[TracedOperator] | None] = {}
        self._update_seconds: dict[Any, float] = {}
        self._starts: dict[Any, StageStarts] = {}
        self._sizes: dict[Any, dict[int, dict[str, ParameterSizes]]] = {}

    @classmethod
    def of(cls, task: TrainingTask, **options: Any) -> StepPredictor:
        """That of a task, which finds each cut and records each step once for all who ask."""
        return cls(task.model, task.sample, loss=task.loss, optimizer=task.optimizer, task=task, **options)

    @property
    def source(self) -> str:
        """Where the costs of operators are from."""
        if self._trial is None or not self._trial.problem:
            return self._source
        what = f"without the model's own Python, as a copy did not run: {self._trial.problem}"
        return f"{self._source}; {what}"

    def forecast(self, plan: Plan) -> StepForecast:
        """The seconds of a step under this plan, by cause.

        Raises:
            ValueError: the plan has an axis or a feature that is not priced, does not fit the model or the
                batch, or needs other ranks than there are.
        """
        return step_forecast(self._parts(plan))

    def collectives(self, plan: Plan) -> list[PricedCollective]:
        """The collectives and messages of a step on a rank. Raises as `forecast` does."""
        return collective_calls(self._parts(plan))

    def _parts(self, plan: Plan) -> StepParts:
        _check_plan(plan, self._hosts, self._speeds)
        hosts = self._hosts or (0,) * plan.ranks
        most, least = -(-self._rows // plan.data), self._rows // plan.data  # of a data rank
        if not least:
            raise UnfitError(f"StepPredictor: {self._rows} rows are too few for {plan.data} data ranks")
        plan = replace(plan, micro_batches=min(plan.micro_batches, least))  # all ranks have as many
        rows = -(-most // plan.micro_batches)
        starts = self._stages(plan) if plan.pipeline > 1 else StageStarts()
        traced = self._traced(plan, rows, starts.opened)
        stages, sent = starts.of(traced, rows)
        host, experts = self._pricing.of(hosts, plan, cut=bool(traced.moves)), self._experts(plan, traced)
        exchanges = []
        if plan.context > 1:
            members = host.groups.slowest(plan.context, plan.tensor)
            exchanges += [attention_exchange(each, host.collectives, members) for each in traced.attentions]
        if plan.expert > 1:
            members = host.groups.slowest(plan.expert, plan.tensor)
            exchanges += expert_exchanges(traced, experts.called, host.collectives, members, 1 / plan.context)
        return StepParts(
            plan, traced, stages, sent, self._update_s(plan, traced, host.operators),
            self._units(plan, traced, stages, experts), self._buffers(), host, self._compute.runtime,
            self._own_device, self.source, exchanges, experts.spread, self._pricing.swap_rate(plan),
            compressed_gradients(plan, traced, stages), self._slow(plan),
            len(self._updated(plan, traced) or ()) or ADAM_OPERATORS, hosts, starts,
        )  # fmt: skip

    def _operators(self, rows: int) -> list[TracedOperator]:
        traced = self._traced(Plan(), rows)
        return [*traced.operators, *(self._updated(Plan(), traced) or ())]

    def _experts(self, plan: Plan, traced: TracedStep) -> SpreadExperts:
        """Where the experts are that the expert axis spreads."""
        if plan.expert == 1:
            return SpreadExperts()
        model = traced.model
        layers = expert_layers(model, None, plan)
        called = {layer.path if layer.kind == "stacked" else caller_of(model, layer.path) for layer in layers}
        own = frozenset(parameters_of(model, layers))
        trained = {name: v.numel() for name, v in model.named_parameters() if v.requires_grad}
        inside = sum(count for name, count in trained.items() if name in own)
        every = sum(trained.values())
        spread = (every - inside + inside / plan.expert) / every if every else 1.0
        return SpreadExperts(frozenset(called), own, spread)

    # ---- what plans share ----

    def _traced(self, plan: Plan, rows: int, opened: frozenset[str] = frozenset()) -> TracedStep:
        single = self._single(plan)
        cut = None
        if plan.tensor > 1:
            cut = self._task.cut(plan.tensor, self._few, sequence=plan.sequence, opened=opened, single=single)

        def record(rows: int) -> TracedStep:
            dtype = None if plan.precision == "f32" else TYPES[plan.precision]
            units = self._paths(self._structure.units)
            shapes = Shapes(self._base)
            try:
                with gpu_attention(on_gpu=self._own_device), single_texts(single):
                    return trace_step(
                        shapes, self._task.blank_batch(rows, shapes), self._task.counted_loss,
                        output=self._structure.output, units=units, cut=cut, dtype=dtype,
                    )  # fmt: skip
            finally:
                self._task.restore()

        key = *self._key(plan), opened if cut else None, self._own_device, single and searches_packed_texts()
        return self._task.traces.of(key, rows, record)

    def _single(self, plan: Plan) -> bool:
        """Whether the model takes each row for one text, else it has the masks that shapes have."""
        return plan.context == 1 and not self._packed

    def _key(self, plan: Plan) -> tuple[Any, ...]:
        return plan.tensor, plan.sequence, plan.precision

    def _updated(self, plan: Plan, traced: TracedStep) -> list[TracedOperator] | None:
        optimizer = self._task.optimizer
        if optimizer is None:
            return None
        key = self._key(plan)
        if key not in self._updates:
            named = {name: value for name, value in traced.model.named_parameters() if value.requires_grad}
            alike = tuple((name, value.shape, value.dtype) for name, value in named.items())
            if alike not in self._updates:  # such as those without sequence=True
                trained, on_gpu = Parameters(named), self._own_device
                self._updates[alike] = trace_update(traced, optimizer, trained, on_gpu=on_gpu)
            self._updates[key] = self._updates[alike]
        return self._updates[key]

    def _update_s(self, plan: Plan, traced: TracedStep, prices: OperatorPrices) -> float | None:
        """Seconds of the optimizer on a rank's share of all parameters; None: as Adam takes it."""
        update = self._updated(plan, traced)
        if update is None:
            return None
        parts = 1 / plan.sharers
        key = *self._key(plan), parts, prices
        if key not in self._update_seconds:
            wide = 1 if plan.precision == "f32" else 2  # its parameters are f32, the traced ones are not
            self._update_seconds[key] = sum(
                prices.seconds(operator, parts * (wide if operator.size.kind in BY_BYTES else 1.0))
                for operator in update
            )
        return self._update_seconds[key]

    def _slow(self, plan: Plan) -> list[float]:
        """Of each rank of the pipeline, how many times as long as `compute` says the slowest there takes."""
        each = plan.ranks // plan.pipeline
        speeds = self._speeds or (1.0,) * plan.ranks
        return [1 / min(speeds[place * each : (place + 1) * each]) for place in range(plan.pipeline)]

    def _paths(self, modules: Sequence[nn.Module]) -> tuple[str, ...]:
        wanted = set(modules)
        return tuple(path for path, module in self._base.model.named_modules() if module in wanted)

    def _stages(self, plan: Plan) -> StageStarts:
        key = plan.stages, plan.cuts, plan.precision, plan.context > 1
        if key not in self._starts:
            if self._structure.pieces and plan.context == 1:
                self._starts[key] = StageStarts(self._of_pieces(plan))
            else:
                self._starts[key] = self._of_program(plan)
        return self._starts[key]

    def _of_pieces(self, plan: Plan) -> tuple[tuple[str, int], ...]:
        paths = {module: path for path, module in reversed([*self._base.model.named_modules()])}
        found = []
        for start in first_pieces(self._structure, plan, None, on_meta=True):
            piece = self._structure.pieces[start]
            first = next((module for module in piece.modules() if module in paths), None)
            if first is None:
                raise UnfitError(f"piece {start} has no module of {type(self._base.model).__name__}")
            found.append((paths[first], 0))
        return tuple(found)

    def _of_program(self, plan: Plan) -> StageStarts:
        check_no_cuts(plan, self._base.model)
        shapes = Shapes(self._base)
        inputs = self._task.blank_batch(self._few, shapes)[0]
        if plan.precision != "f32":
            inputs = cast(inputs, TYPES[plan.precision])
            with shapes.mode:
                shapes.model.to(TYPES[plan.precision])
        with torch.enable_grad(), single_texts(self._single(plan)):
            graph = Recorder(shapes).run(shapes.model, inputs)
        program = StageProgram(graph, shapes.model, choose_starts(graph, plan.stages))
        return StageStarts.of_program(program, self._few)

    # ---- sizes ----

    def _units(
        self, plan: Plan, traced: TracedStep, stages: Sequence[int], experts: SpreadExperts
    ) -> dict[int, dict[str, ParameterSizes]]:
        """Stage -> unit -> parameters on one rank of the tensor axis."""
        axes = plan.shards, plan.pipeline, plan.stages, plan.expert
        key = *self._key(plan), plan.zero, plan.cuts, plan.keep_f32, *axes
        if key in self._sizes:
            return self._sizes[key]
        model = traced.model
        modules = [module_at(model, path) for path in self._paths(self._structure.units)]
        sharded = plan.zero > 0 or plan.precision != "f32"
        kept = set(gathered_units(model, own_units(model, modules), plan)) if sharded else set()
        kept.update(apart(model, kept_in_f32(model, plan)))
        paths = [path for path, module in model.named_modules() if module in kept]  # outer ones first
        inside = {id(value): path for path in paths for value in module_at(model, path).parameters()}
        found: dict[int, dict[str, ParameterSizes]] = {stage: {} for stage in range(plan.stages)}
        for name, value in model.named_parameters():
            call = traced.homes.get(name, (-1, NO_UNIT))[0]
            stage, unit = stages[call] if call >= 0 else 0, inside.get(id(value), NO_UNIT)
            here, parts = found[stage], plan.expert if name in experts.parameters else 1
            before = here.get(unit, ParameterSizes())
            here[unit] = before.plus(value.numel() // parts, trained=value.requires_grad)
        self._sizes[key] = found
        return found

    def _buffers(self) -> ParameterSizes:
        held = [value for value in self._base.model.buffers() if value.is_floating_point()]
        changing = any(isinstance(m, BATCH_NORM) for m in self._base.model.modules())
        return ParameterSizes(len(held), sum(v.numel() for v in held)) if changing else ParameterSizes()


# ---- what it is given ----


def _check_arguments(
    model: object,
    loss: object,
    optimizer: object,
    rows: object,
    hosts: Sequence[int],
    speeds: Sequence[float],
) -> None:
    """Raise TypeError or ValueError for arguments of `StepPredictor` that are none."""
    instance(model, nn.Module, "StepPredictor: model")
    for name, value in (("loss", loss), ("optimizer", optimizer)):
        if value is not None and not callable(value):
            raise TypeError(f"StepPredictor: {name} is a {type(value).__name__}, expected a function")
    if rows is not None:
        whole(rows, "StepPredictor: rows", 1)
    for host in hosts:
        whole(host, "StepPredictor: hosts", 0)
    for speed in speeds:
        positive(speed, "StepPredictor: speeds")


def _check_plan(plan: object, hosts: Sequence[int], speeds: Sequence[float]) -> None:
    """Raise TypeError or ValueError for a plan that is not priced, or needs other ranks than there are."""
    if not isinstance(plan, Plan):
        raise TypeError(f"StepPredictor: plan is a {type(plan).__name__}, expected a Plan")
    if plan.precision == "autocast":
        raise ValueError("StepPredictor: precision='autocast' is not priced, bf16 is")
    for name, held in (("hosts", hosts), ("speeds", speeds)):
        if held and len(held) != plan.ranks:
            raise ValueError(f"StepPredictor: {plan} needs {plan.ranks} ranks, and {name} has {len(held)}")
