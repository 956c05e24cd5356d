"""A step of each rank without values: what `parallelize` would build, on shapes, and what it keeps in memory.

The runtime of pipelines, autograd, recomputation, the loss and the optimizer are those of a run. Messages
arrive at once; what the data axis gathers and reduces is counted by dry_units.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unisono.parallel.batches import micro_batches, tensors_of
from unisono.parallel.families import identity
from unisono.parallel.gradients import local
from unisono.parallel.graph.capture import CaptureError, Recorder
from unisono.parallel.graph.containers import mapped
from unisono.parallel.graph.shapes import Shapes
from unisono.parallel.graph.stage_choice import choose_starts
from unisono.parallel.graph.stage_program import StageProgram
from unisono.parallel.optimizer_groups import Parameters
from unisono.parallel.pipeline.p2p_communication import TensorSpec
from unisono.parallel.pipeline.program_stage import ProgramStage
from unisono.parallel.pipeline.runtime import PipelineRuntime, StepInput
from unisono.parallel.pipeline.schedule import Action, schedule
from unisono.parallel.pipeline.stages import PieceStage, PipelineStages, balance
from unisono.parallel.precision import kept_in_f32
from unisono.parallel.recomputation import recompute
from unisono.parallel.sharded_parameters import TYPES, apart, gathered_units, own_memory, own_units
from unisono.torch_internals.fake import is_about_data

from .allocator import CachingAllocator, allowed
from .dry_tensor import run_parts
from .dry_units import DryReplicas, DryShards, shard_of
from .memory_account import MemoryPeak, MemoryTracker
from .storage_watch import StorageWatch

if TYPE_CHECKING:
    from unisono.parallel.families import ModelFamily
    from unisono.parallel.plan import Plan

    from .task import TrainingTask

__all__ = ["DryRun"]


class DryRun:
    """A model without values, cut and staged by a plan.

    Args:
        task: what is trained.
        limit: bytes of a rank's memory, of which a GPU's allocator gets a little less; None: not limited.
    Raises:
        CaptureError, ValueError: the model does not go with the plan; the text says why.
    """

    def __init__(self, task: TrainingTask, plan: Plan, limit: int | None = None) -> None:
        self._task, self._plan, self._limit = task, plan, limit
        if task.batch < plan.data:
            raise ValueError(f"a batch of {task.batch} rows is too small for {plan.data} data ranks")
        self._rows = -(-task.batch // plan.data)
        self._parts = min(plan.micro_batches, self._rows)
        self._micro_rows = -(-self._rows // self._parts)
        enough = 2 * plan.stages + 2  # of a pipeline's micro-batches; more are in memory as these are
        self._run_parts = min(self._parts, -(-enough // plan.pipeline) * plan.pipeline)

    def peaks(self) -> list[MemoryPeak]:
        """The peak of a step on each rank of a pipeline; the ranks of other axes are like them."""
        return [self.peak_of(rank) for rank in range(self._plan.pipeline)]

    def peak_of(self, rank: int) -> MemoryPeak:
        """The peak on the ranks at one place of a pipeline."""
        task, plan = self._task, self._plan
        changed = task.changed_buffer(self._micro_rows) if plan.recompute else ""
        if changed:
            raise ValueError(
                f'recompute={plan.recompute!r} would change the buffer "{changed}" twice in a step'
            )
        shapes = task.shapes()
        model, family = shapes.model, task.family(shapes.model, shapes.also)
        names = {module: path for path, module in model.named_modules()}
        in_pieces = task.in_pieces(family)
        programs, parted = None, set[nn.Parameter]()
        if plan.pipeline > 1 and not in_pieces:
            programs = _DryPrograms(self, shapes)
        elif plan.pipeline > 1:
            family.output = identity  # the last piece returns what the loss takes
        if plan.tensor > 1:
            cut = task.cut(
                plan.tensor,
                self._micro_rows,
                sequence=plan.sequence,
                in_pieces=plan.pipeline > 1 and in_pieces,
                opened=frozenset() if programs is None else programs.first.open,
            )
            with shapes.mode:
                regathers = plan.sequence and not plan.recompute
                parted = run_parts(model, cut, task.device_type, regathers=regathers)
        self._lower(model, shapes)
        stages = self._stages(model, family, programs)
        specs = self._boundaries(stages, shapes)
        here = list(range(plan.stages)) if plan.pipeline == 1 else self._here(rank)
        root = model if plan.pipeline == 1 else PipelineStages({stage: stages[stage] for stage in here})
        return _StepRun(
            self, rank, shapes, root, family, names, specs, parted, last=plan.stages - 1 in here
        ).peak()

    def _here(self, rank: int) -> list[int]:
        plan = self._plan
        rank_of = schedule(plan.schedule, plan.pipeline, 1, plan.chunks).rank_of
        return [stage for stage, there in enumerate(rank_of) if there == rank]

    def _lower(self, model: nn.Module, shapes: Shapes) -> None:
        """Have the parameters in the type of compute."""
        if self._plan.precision == "f32":
            return
        exact = {value for module in kept_in_f32(model, self._plan) for value in module.parameters()}
        with shapes.mode:
            for parameter in model.parameters():
                if parameter.is_floating_point() and parameter not in exact:
                    parameter.data = parameter.data.to(TYPES[self._plan.precision])

    def _stages(self, model: nn.Module, family: ModelFamily, programs: _DryPrograms | None) -> list[Any]:
        plan = self._plan
        if plan.pipeline == 1:
            return []
        if programs is not None:
            return [ProgramStage(programs, stage, model) for stage in range(plan.stages)]  # type: ignore[arg-type]
        counted = [1.0 + sum(value.numel() for value in piece.parameters()) for piece in family.pieces]
        cuts = plan.cuts or balance(counted, plan.stages)  # as without a sample
        if not 0 < cuts[0] <= cuts[-1] < len(family.pieces):
            raise ValueError(f"cuts={cuts} do not fit a model of {len(family.pieces)} pieces")
        bounds = [0, *cuts, len(family.pieces)]
        return [PieceStage(family.pieces[a:b], first=a == 0) for a, b in itertools.pairwise(bounds)]

    def _boundaries(self, stages: list[Any], shapes: Shapes) -> dict[int, Any]:
        """What each stage but the last sends: shapes, in the order of its outputs."""
        found: dict[int, tuple[TensorSpec, ...]] = {}
        if not stages:
            return found
        inputs = self._task.blank_batch(self._micro_rows, shapes)[0]
        value: tuple[Tensor, ...] = ()
        with shapes.mode:
            for number, stage in enumerate(stages[:-1]):
                output = stage(value, _low_inputs(inputs, self._plan) if number == 0 else inputs)
                output = tuple(output) if isinstance(output, (tuple, list)) else (output,)
                found[number] = tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in output)
                value = tuple(t.detach().requires_grad_(t.requires_grad) for t in output)
        return found


def _low_inputs(inputs: Any, plan: Plan) -> Any:
    if plan.precision == "f32":
        return inputs
    low = TYPES[plan.precision]
    return mapped(inputs, lambda t: t.to(low) if t.is_floating_point() else t)


class _DryPrograms:
    """Stands for StagePrograms: all micro-batches run the program of the first."""

    def __init__(self, run: DryRun, shapes: Shapes) -> None:
        plan = run._plan
        copy = Shapes(shapes.model)
        inputs = run._task.blank_batch(run._micro_rows, copy)[0]
        graph = Recorder(copy).run(copy.model, _low_inputs(inputs, plan))
        self.first = StageProgram(graph, copy.model, choose_starts(graph, plan.stages))

    def of(self, _inputs: Any) -> StageProgram:
        """The program of these inputs."""
        return self.first


# ---- one step ----


class _Messages:
    """Messages that arrive at once. What was sent is kept until the next one is."""

    def __init__(self, specs: dict[int, Any], device_type: str) -> None:
        self._specs, self._device_type = specs, device_type
        self._sent: list[Tensor] = []

    def recv(self, message: Any, _source: int, _shape: Hashable) -> tuple[Tensor, ...]:
        """Activations."""
        specs = self._specs[message.stage]
        made = self.recv_known(message, specs, 0)
        return tuple(t.requires_grad_(spec.requires_grad) for t, spec in zip(made, specs, strict=True))

    def recv_known(self, _message: Any, specs: Any, _source: int) -> tuple[Tensor, ...]:
        """Tensors of known shapes."""
        return tuple(torch.empty(each.shape, dtype=each.dtype, device=self._device_type) for each in specs)

    def send(self, message: Any, tensors: Sequence[Tensor], to: int, _shape: Hashable) -> None:
        """Activations."""
        self.send_known(message, tensors, to)

    def send_known(self, _message: Any, tensors: Sequence[Tensor], _to: int) -> None:
        """Tensors of known shapes."""
        self._sent = [tensor.detach().contiguous() for tensor in tensors]

    def finish(self) -> None:
        """All have arrived."""
        self._sent.clear()


class _DryRuntime(PipelineRuntime):
    """The runtime of a run, whose phases a watch is told."""

    def __init__(self, units: Any, mesh: Any, output: Any, messages: _Messages, watch: StorageWatch) -> None:
        super().__init__(units, mesh, output, single=mesh.plan.pipeline == 1)
        self._messages, self._watch = messages, watch  # type: ignore[assignment]

    def _forward(self, step: Any, action: Action) -> None:
        self._watch.phase, self._watch.cause = "forward", "activations"
        super()._forward(step, action)

    def _backward(self, step: Any, action: Action) -> None:
        self._watch.phase, self._watch.cause = "backward", "temporary"
        super()._backward(step, action)
        self._units.after_backward()  # type: ignore[union-attr]


class _StepRun:
    """One rank, and its step.

    Args:
        specs: what stages send.    cut: parameters that the tensor axis cuts.
        last: it has the last stage.
    """

    def __init__(
        self,
        run: DryRun,
        rank: int,
        shapes: Shapes,
        root: Any,
        family: ModelFamily,
        names: dict[nn.Module, str],
        specs: dict[int, Any],
        cut: set[nn.Parameter],
        *,
        last: bool,
    ) -> None:
        self._cut = cut  # parameters that the tensor axis cuts
        self._task, self._plan, self._run, self._shapes = run._task, run._plan, run, shapes
        self._root, self._family, self._names, self._last = root, family, names, last
        device = self._task.device_type
        limit = None if run._limit is None else allowed(run._limit)
        allocator = CachingAllocator(limit) if device == "cuda" else None
        self._watch = StorageWatch(device)
        self._account = MemoryTracker(allocator, self._watch.place)
        self._watch.begin(self._account)
        rank_of = schedule(self._plan.schedule, self._plan.pipeline, 1, self._plan.chunks).rank_of
        self._mesh = SimpleNamespace(
            plan=self._plan,
            stage=rank,
            axes=SimpleNamespace(device_type=device),
            group=lambda _: None,
            peer=lambda _: 0,
        )
        self._messages = _Messages(specs, device)
        self._rank_of = rank_of

    def peak(self) -> MemoryPeak:
        """Run a step, when the moments are there already."""
        with ExitStack() as stack:
            stack.enter_context(self._shapes.mode)
            stack.enter_context(self._watch)
            try:
                self._step()
            except Exception as error:
                if is_about_data(error):
                    raise CaptureError(
                        f"a step of this model reads values of tensors, which a dry run lacks: {error}"
                    ) from error
                raise
        return self._account.peak

    def _step(self) -> None:
        plan, watch, task = self._plan, self._watch, self._task
        units, held = self._units()
        optimizers = self._optimizers(held)
        self._account.forget_peak()
        with watch.labelled("inputs"):
            batch = task.blank_batch(self._run._rows, self._shapes)
            for tensor in tensors_of(batch):
                watch.see(tensor)
        micros = micro_batches(batch, self._run._parts)[: self._run._run_parts]
        weights = [1.0 / len(micros)] * len(micros)
        work = StepInput(micros, weights, task.counted_loss, float(plan.data), counts=task.counts)
        runtime = _DryRuntime(units, self._mesh, self._family.output, self._messages, watch)
        del batch
        runtime.run(schedule(plan.schedule, plan.pipeline, len(micros), plan.chunks), work)
        watch.phase, watch.cause, watch.numbers = "update", "temporary", True
        if isinstance(units, DryShards):
            self._give(held)
        for optimizer in optimizers:
            optimizer.step()

    def _units(self) -> tuple[DryReplicas | DryShards, dict[str, nn.Parameter]]:
        """The data axis, and what the optimizer gets."""
        plan, root, watch = self._plan, self._root, self._watch
        inside = set(root.modules())
        own = own_units(root, [unit for unit in self._family.units if unit in inside])
        exact = [module for module in kept_in_f32(self._shapes.model, plan) if module in inside]
        replicas = plan.zero == 0 and plan.precision == "f32"
        watch.follow(root, self._names)
        for module in [*own, *exact, root] if plan.tensor > 1 or not replicas else ():
            module.register_forward_hook(own_memory)
        for unit in own if plan.recompute else ():
            recompute(unit, selective=plan.recompute == "selective", draws=False)
        with watch.labelled("parameters"):
            for buffer in root.buffers():
                watch.see(buffer)
            named = dict(root.named_parameters())
            held = named
            for value in named.values():
                watch.see(value, counts=replicas)
                value.register_post_accumulate_grad_hook(
                    lambda value: watch.relabel(value.grad, "gradients") if value.grad is not None else None
                )
            if not replicas:
                held = {name: self._shard(value) for name, value in named.items()}
        if replicas:
            return DryReplicas(root, plan, watch), held
        alone = apart(root, exact)
        covered = {part for module in alone for part in module.modules()}
        outer = [unit for unit in gathered_units(root, own, plan) if unit not in covered]
        return DryShards(root, outer, alone, plan, watch, last=self._last), held

    def _shard(self, value: nn.Parameter) -> nn.Parameter:
        plan = self._plan
        shape = shard_of(value.shape, plan.shards * plan.context) if plan.zero else value.shape
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        made = torch.empty(shape, dtype=dtype, device=value.device)
        return nn.Parameter(made, requires_grad=value.requires_grad)

    def _give(self, held: dict[str, nn.Parameter]) -> None:
        """What was reduced, which is counted already, as gradients."""
        for value in held.values():
            if value.requires_grad:
                grad = local(value).detach().view(-1).view(value.shape)  # no memory of its own
                value.grad = grad

    def _optimizers(self, held: dict[str, nn.Parameter]) -> list[Any]:
        """Make the optimizers, and their state."""
        watch, trained = self._watch, {name: value for name, value in held.items() if value.requires_grad}
        if not trained:
            return []
        made: Any = self._task.optimizer(Parameters(trained))
        optimizers = list(made) if isinstance(made, (list, tuple)) else [made]
        with watch.labelled("moments"):
            watch.numbers = True
            self._give(held)
            for optimizer in optimizers:
                self._together(optimizer)
                optimizer.step()
            watch.numbers = False
        for value in trained.values():
            value.grad = None
        return optimizers

    def _together(self, optimizer: Any) -> None:
        """Choose between PyTorch's loops and its kernels of lists, as a run does on tensors with values."""
        if self._task.device_type != "cuda":
            return
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
        groups = []
        for group in optimizer.param_groups:  # DTensors and others are not in one list
            for kind in (True, False):
                alike = [each for each in group["params"] if (each in self._cut) is kind]
                if alike:
                    groups.append({**group, "params": alike})
        optimizer.param_groups = groups
