"""From a model, a batch and plans to forecasts of a step on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from unisono.engine.costs.machine import MachineCalibration, recall
from unisono.engine.environment import env
from unisono.parallel.arguments import two
from unisono.parallel.batches import cut_rows, rows_of, sizes
from unisono.parallel.families import ModelFamily, family_of, identity
from unisono.parallel.graph.capture import Recorder, Shapes
from unisono.parallel.graph.containers import mapped
from unisono.parallel.graph.proof import prove
from unisono.parallel.graph.stage_choice import choose_starts
from unisono.parallel.graph.stage_program import StageProgram
from unisono.parallel.loss_weights import own_loss
from unisono.parallel.optimizer_groups import Parameters
from unisono.parallel.pipeline.stages import balance
from unisono.parallel.precision import BATCH_NORM
from unisono.parallel.sharded_parameters import TYPES, gathered_units, own_units
from unisono.parallel.tensor_parallel import cut_of
from unisono.planner.compute_calibration import ComputeCalibration, recall_compute

from .collectives import CollectiveCosts
from .forecast import StepForecast
from .step_time import ParameterSizes, StepParts, step_forecast
from .trace import NO_UNIT, StepLayout, TracedOperator, TracedStep, trace_step, trace_update

if TYPE_CHECKING:
    from unisono.parallel.graph.cut import Cut
    from unisono.parallel.plan import Plan

__all__ = ["StepPredictor"]

NOT_PRICED = (("context", 1), ("expert", 1), ("swap", None), ("compression", None), ("local_steps", None))


class StepPredictor:
    """Says what a step of a model takes under plans, without running one. What plans share is recorded once.

    Args:
        model: as `parallelize` takes it, before that; it stays as it is. It may be on the meta device.
        batch: (inputs, targets) of a step, of all ranks; only shapes and types count.
        loss, optimizer, pieces, cuts: as `parallelize` takes them. optimizer None: as Adam takes it.
            The tensor axis cuts as under `parallelize(..., sample=inputs)`; stages of pieces are balanced by
            parameters.
        compute: costs of operators; None: `unisono calibrate --compute`'s, or a roofline.
        machine: figures of the collectives; None: `unisono calibrate`'s, or the defaults.
        hosts: number of the host of each rank; (): all ranks are on this one.
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
        optimizer: Callable[[Any], Any] | None = None,
        pieces: Sequence[nn.Module] | None = None,
        cuts: dict[str, str] | None = None,
        compute: ComputeCalibration | None = None,
        machine: MachineCalibration | None = None,
        hosts: Sequence[int] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"StepPredictor: model is a {type(model).__name__}, expected an nn.Module")
        self._batch = two(batch, own_loss=loss is None)
        self._rows = rows_of(self._batch)
        self._loss, self._own_loss, self._optimizer = loss or own_loss, loss is None, optimizer
        self._base = Shapes(model, None if pieces is None else list(pieces))
        self._family = family_of(self._base.model, self._base.also, cuts)
        for module in self._base.model.modules():  # as the runtime does
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", False):
                config.use_cache = False
        self._output = identity if loss is None else self._family.output
        self._given, self._explicit = pieces is not None, cuts
        self._hosts = tuple(hosts)
        settings = env.read()
        if compute is None:
            found = recall_compute(settings, str(torch.__version__))
            self._compute, self._source = found.calibration, found.source
        else:
            self._compute, self._source = compute, "given"
        self._machine = recall(settings).calibration if machine is None else machine
        self._traces: dict[Any, TracedStep] = {}
        self._updates: dict[Any, list[TracedOperator] | None] = {}
        self._cuts: dict[Any, Cut] = {}
        self._starts: dict[Any, tuple[tuple[tuple[str, int], ...], tuple[int, ...], frozenset[str]]] = {}

    def forecast(self, plan: Plan) -> StepForecast:
        """The seconds of a step under this plan, by cause.

        Raises:
            ValueError: the plan has an axis or a feature that is not priced, does not fit the model or the
                batch, or needs other ranks than there are.
        """
        for name, plain in NOT_PRICED:
            if getattr(plan, name) != plain:
                raise ValueError(f"StepPredictor: plans with {name}={getattr(plan, name)!r} are not priced")
        hosts = self._hosts or (0,) * plan.ranks
        if len(hosts) != plan.ranks:
            raise ValueError(f"StepPredictor: {plan} needs {plan.ranks} ranks, and hosts has {len(hosts)}")
        rows = sizes(sizes(self._rows, plan.data)[0], plan.micro_batches)[0]
        if not sizes(sizes(self._rows, plan.data)[-1], plan.micro_batches)[-1]:
            raise ValueError(
                f"StepPredictor: {self._rows} rows are too few for {plan.data} data ranks with "
                f"{plan.micro_batches} micro-batches"
            )
        traced = self._traced(plan, rows)
        collectives = CollectiveCosts(self._machine, hosts)
        costs, factor, crowd = self._compute.of(collectives.here)
        return step_forecast(
            StepParts(
                plan, traced, self._updated(plan, rows, traced), self._units(plan, traced), self._buffers(),
                costs, self._compute.runtime, collectives, factor, crowd, self._source,
            )
        )  # fmt: skip

    # ---- what plans share ----

    def _traced(self, plan: Plan, rows: int) -> TracedStep:
        key = self._key(plan, rows)
        if key not in self._traces:
            starts, sent, opened = self._stages(plan, rows) if plan.pipeline > 1 else ((), (), frozenset())
            shapes = Shapes(self._base)
            layout = StepLayout(
                starts=starts,
                units=self._paths(self._family.units),
                cut=self._cut(plan, rows, opened) if plan.tensor > 1 else None,
                regathers=plan.sequence and not plan.recompute,
                dtype=None if plan.precision == "f32" else TYPES[plan.precision],
            )
            found = trace_step(shapes, self._micro(rows), self._loss, layout, output=self._output)
            found.sent = list(sent) or found.sent
            self._traces[key] = found
        return self._traces[key]

    def _key(self, plan: Plan, rows: int) -> Any:
        cut = (plan.tensor, plan.sequence, plan.sequence and not plan.recompute)
        return rows, cut, plan.stages, plan.cuts, plan.precision

    def _micro(self, rows: int) -> tuple[Any, Any]:
        inputs, targets = cut_rows(self._batch, 0, rows)
        return inputs, targets

    def _updated(self, plan: Plan, rows: int, traced: TracedStep) -> list[TracedOperator] | None:
        if self._optimizer is None:
            return None
        key = self._key(plan, rows)
        if key not in self._updates:
            named = {name: value for name, value in traced.model.named_parameters() if value.requires_grad}
            self._updates[key] = trace_update(traced, self._optimizer, Parameters(named))
        return self._updates[key]

    def _paths(self, modules: Sequence[nn.Module]) -> tuple[str, ...]:
        wanted = set(modules)
        return tuple(path for path, module in self._base.model.named_modules() if module in wanted)

    def _cut(self, plan: Plan, rows: int, opened: frozenset[str]) -> Cut:
        key = plan.tensor, plan.sequence, rows, opened
        if key not in self._cuts:
            kinds = self._explicit or {}
            if any(kind != "whole" for kind in kinds.values()):
                self._cuts[key] = cut_of(self._base.model, self._family.cuts, plan.tensor)
            else:
                whole = [path for path, kind in self._family.cuts.items() if kind == "whole"] if kinds else []
                with torch.enable_grad():
                    self._cuts[key] = prove(
                        Shapes(self._base), self._micro(rows)[0], plan.tensor, whole=frozenset(whole),
                        opened=opened, sequence=plan.sequence,
                    )  # fmt: skip
        return self._cuts[key]

    def _stages(self, plan: Plan, rows: int) -> Any:
        """Where stages begin, the bytes that go from each to the next, and the modules that span several."""
        key = plan.stages, plan.cuts, rows
        if key not in self._starts:
            family = self._family
            tensor = isinstance(self._batch[0], torch.Tensor)
            plain = self._given or isinstance(self._base.model, nn.Sequential)
            if plain or (family.pieces and not family.no_pieces and tensor):
                self._starts[key] = self._of_pieces(plan, family), (), frozenset()
            else:
                self._starts[key] = self._of_program(plan, rows)
        return self._starts[key]

    def _of_pieces(self, plan: Plan, family: ModelFamily) -> tuple[tuple[str, int], ...]:
        counted = [1.0 + sum(value.numel() for value in piece.parameters()) for piece in family.pieces]
        paths = {module: path for path, module in reversed([*self._base.model.named_modules()])}
        found = []
        for start in plan.cuts or balance(counted, plan.stages):
            first = next(module for module in family.pieces[start].modules() if module in paths)
            found.append((paths[first], 0))
        return tuple(found)

    def _of_program(self, plan: Plan, rows: int) -> Any:
        shapes = Shapes(self._base)
        inputs = self._micro(rows)[0]
        if plan.precision != "f32":
            inputs = mapped(inputs, lambda t: t.to(TYPES[plan.precision]) if t.is_floating_point() else t)
            with shapes.mode:
                shapes.model.to(TYPES[plan.precision])
        with torch.enable_grad():
            graph = Recorder(shapes).run(shapes.model, inputs)
        starts = choose_starts(graph, plan.stages)
        program = StageProgram(graph, shapes.model, starts)
        sent = [sum(graph.values[number].nbytes for number in stage.goes) for stage in program.stages[:-1]]
        return tuple((start.path, start.call) for start in starts), tuple(sent), program.open

    # ---- sizes ----

    def _units(self, plan: Plan, traced: TracedStep) -> dict[int, dict[str, ParameterSizes]]:
        """Stage -> unit -> trained parameters on one rank of the tensor axis."""
        model = traced.model
        modules = [model.get_submodule(path) for path in self._paths(self._family.units)]
        sharded = plan.zero > 0 or plan.precision != "f32"
        kept = set(gathered_units(model, own_units(model, modules), plan)) if sharded else set()
        paths = {path for path, module in model.named_modules() if module in kept}
        inside = {id(value): path for path in paths for value in model.get_submodule(path).parameters()}
        found: dict[int, dict[str, ParameterSizes]] = {stage: {} for stage in range(plan.stages)}
        for name, value in model.named_parameters():
            if value.requires_grad:
                stage, unit = traced.homes.get(name, (0, NO_UNIT))[0], inside.get(id(value), NO_UNIT)
                count, elements = found[stage].get(unit, (0, 0))
                found[stage][unit] = ParameterSizes(count + 1, elements + value.numel())
        return found

    def _buffers(self) -> ParameterSizes:
        held = [value for value in self._base.model.buffers() if value.is_floating_point()]
        changing = any(isinstance(m, BATCH_NORM) for m in self._base.model.modules())
        return ParameterSizes(len(held), sum(v.numel() for v in held)) if changing else ParameterSizes(0, 0)
