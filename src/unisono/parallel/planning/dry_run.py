"""A step of each rank without values: what `parallelize` would build, on shapes, and what it keeps in memory.

The tensor axis, the stages, the runtime, autograd, recomputation, the loss and the optimizer are those of a
run. Messages arrive at once; what the data axis gathers and reduces is counted by dry_units.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.engine.environment import env
from unisono.errors import UnfitError
from unisono.parallel.arguments import check_model
from unisono.parallel.batches import micro_batches, rows_of, sizes
from unisono.parallel.explained_errors import is_ours
from unisono.parallel.gradients import local, squared_norm
from unisono.parallel.graph.capture import CaptureError, Recorder
from unisono.parallel.graph.containers import cast, tensors_in
from unisono.parallel.graph.noted_call import gpu_attention
from unisono.parallel.graph.shapes import Shapes, may_be_packed, single_texts
from unisono.parallel.graph.stage_program import StageProgram, choose_starts
from unisono.parallel.optimizers import (
    Parameters,
    chooses_lists,
    optimizers_of,
    refuse_cut_parameters,
    steps_parts,
)
from unisono.parallel.pipeline.p2p_communication import TensorSpec
from unisono.parallel.pipeline.program_stage import ProgramStage
from unisono.parallel.pipeline.runtime import PipelineRuntime, StepInput
from unisono.parallel.pipeline.schedule import Action, schedule
from unisono.parallel.pipeline.stages import (
    PipelineStages,
    balance,
    check_no_cuts,
    check_starts,
    counted_costs,
    stages_of,
)
from unisono.parallel.plan import Plan
from unisono.parallel.precision import kept_in_f32
from unisono.parallel.sharded_parameters import TYPES, apart, gathered_units, own_units
from unisono.parallel.structure import identity
from unisono.parallel.unit_hooks import own_memory, recompute
from unisono.torch_internals.fake import is_about_data

from .dry_axes import DryContext, run_parts, spread_by_chance
from .dry_replicas import DryCompression, DryMeetings, DryReplicas, DrySwap, NoMessages
from .dry_units import DryShards, shard_of
from .memory_account import CachingAllocator, MemoryPeak, MemoryTracker, StorageWatch, allowed, kernel_memory

if TYPE_CHECKING:
    from unisono.parallel.graph.shapes import Shapes
    from unisono.parallel.structure import ModelStructure

    from .dry_axes import DryContext
    from .task import TrainingTask

__all__ = ["DryRun"]


class DryRun:
    """A model without values, cut and staged by a plan.

    Args:
        task: what is trained.
        limit: bytes of a rank's memory, of which a GPU's allocator gets a little less; None: not limited.
    Attributes:
        everyone: the plan of all ranks.    plan: that of one replica, where replicas train on their own.
        rows: of a rank.    parts: micro-batches into which they are cut.
        sizes: rows of each of those that are run, the first ones.
    Raises:
        CaptureError, ValueError: the model does not go with the plan; the text says why.
    """

    def __init__(self, task: TrainingTask, plan: Plan, limit: int | None = None) -> None:
        if task.batch < plan.data:
            raise UnfitError(f"a batch of {task.batch} rows is too small for {plan.data} data ranks")
        self.task, self.everyone, self.limit = task, plan, limit
        self.plan = plan if plan.local_steps is None else plan.of_replica()
        self.rows = -(-task.batch // plan.data)
        self.parts = min(plan.micro_batches, task.batch // plan.data)  # as the rank with fewest rows can
        self._micro_rows = -(-self.rows // self.parts)
        enough = 2 * plan.stages + 2  # of a pipeline's micro-batches; more are in memory as these are
        run = min(self.parts, -(-enough // plan.pipeline) * plan.pipeline)
        if plan.schedule == "gpipe":  # all are in memory
            run = self.parts
        self.sizes = sizes(self.rows, self.parts)[:run]

    def peaks(self) -> list[MemoryPeak]:
        """The peak of a step on each rank of a pipeline; the ranks of other axes are like them."""
        return [self.peak_of(rank) for rank in range(self.plan.pipeline)]

    def peak_of(self, rank: int) -> MemoryPeak:
        """The peak on the ranks at one place of a pipeline."""
        task, plan = self.task, self.plan
        changed = task.changed_buffer(self._micro_rows) if plan.recompute else ""
        if changed:
            raise UnfitError(
                f'recompute={plan.recompute!r} would change the buffer "{changed}" twice in a step'
            )
        shapes = task.shapes()
        model = shapes.model
        structure = task.structure(model, shapes.also, staged=plan.pipeline > 1)
        names = {module: path for path, module in model.named_modules()}
        with shapes.mode:
            check_model(model, self.everyone)
            experts = spread_by_chance(model, plan)
        in_pieces = bool(structure.pieces) and plan.context == 1
        single = plan.context == 1 and not may_be_packed(task.inputs_of(task.sample))  # else with masks
        programs, parted, sums = None, set[nn.Parameter](), set[nn.Parameter]()
        if plan.pipeline > 1 and not in_pieces:
            check_no_cuts(plan, task.model)
            with single_texts(single):
                programs = _DryPrograms(self, shapes)
        elif plan.pipeline > 1:
            structure.output = identity  # the last piece returns what the loss takes
        if plan.tensor > 1:
            cut = task.cut(
                plan.tensor,
                self._micro_rows,
                sequence=plan.sequence,
                in_pieces=plan.pipeline > 1 and in_pieces,
                opened=frozenset() if programs is None else programs.first.open,
                single=single,
            )
            with shapes.mode:
                regathers = plan.sequence and not plan.recompute
                parted = run_parts(model, cut, task.device_type, regathers=regathers)
            sums = {value for name, value in model.named_parameters() if name in cut.sums}
        context = None
        if plan.context > 1:
            context = DryContext(model, structure.output, plan, task.device_type)
        self._lower(model, shapes)
        stages = self._stages(model, structure, programs)
        specs = self._boundaries(stages, shapes)
        here = list(range(plan.stages)) if plan.pipeline == 1 else self._here(rank)
        root = model
        if plan.pipeline > 1:
            exact = plan.stages - 1 if plan.low else None
            root = PipelineStages({stage: stages[stage] for stage in here}, exact)
        own = _RankModel(rank, shapes, root, structure, names, specs, parted, sums, experts, context)
        with single_texts(single):
            return _DryStep(self, own).peak()

    def _here(self, rank: int) -> list[int]:
        plan = self.plan
        rank_of = schedule(plan.schedule, plan.pipeline, 1, plan.chunks).rank_of
        return [stage for stage, there in enumerate(rank_of) if there == rank]

    def _lower(self, model: nn.Module, shapes: Shapes) -> None:
        """Have the parameters in the type of compute."""
        if not self.plan.low:
            return
        exact = {value for module in kept_in_f32(model, self.plan) for value in module.parameters()}
        with shapes.mode:
            for parameter in model.parameters():
                if parameter.is_floating_point() and parameter not in exact:
                    parameter.data = parameter.data.to(TYPES[self.plan.precision])

    def _stages(
        self, model: nn.Module, structure: ModelStructure, programs: _DryPrograms | None
    ) -> list[Any]:
        plan = self.plan
        if plan.pipeline == 1:
            return []
        if programs is not None:
            return [ProgramStage(programs, stage, model) for stage in range(plan.stages)]  # type: ignore[arg-type]
        cuts = plan.cuts or balance(counted_costs(structure.pieces), plan.stages)  # as without a sample
        check_starts(cuts, len(structure.pieces))
        return stages_of(structure, cuts, model)

    def _boundaries(self, stages: list[Any], shapes: Shapes) -> dict[tuple[int, int], Specs]:
        """What each stage but the last sends of a micro-batch of so many rows: shapes, in their order."""
        found: dict[tuple[int, int], Specs] = {}
        for rows in dict.fromkeys(self.sizes) if stages else ():
            whole = self.task.blank_batch(rows, shapes)[0]
            inputs = cast(whole, _low(self.plan))  # any stage may take them
            value: tuple[Tensor, ...] = ()
            with shapes.mode:
                for number, stage in enumerate(stages[:-1]):
                    output = stage(value, inputs)
                    output = tuple(output) if isinstance(output, (tuple, list)) else (output,)
                    specs = (TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in output)
                    found[number, rows] = tuple(specs)
                    value = tuple(t.detach().requires_grad_(t.requires_grad) for t in output)
        return found


def _low(plan: Plan) -> torch.dtype | None:
    return TYPES[plan.precision] if plan.low else None


class _DryPrograms:
    """Stands for StagePrograms: a program for each number of rows of a micro-batch."""

    def __init__(self, run: DryRun, shapes: Shapes) -> None:
        plan, known, starts = run.plan, dict[int, StageProgram](), None
        for rows in dict.fromkeys(run.sizes):
            copy = Shapes(shapes.model)
            run._lower(copy.model, copy)  # a model may ask for the type of its parameters
            inputs = run.task.blank_batch(rows, copy)[0]
            graph = Recorder(copy).run(copy.model, cast(inputs, _low(plan)))
            starts = starts or choose_starts(graph, plan.stages)
            known[rows] = StageProgram(graph, copy.model, starts)
        self._known, self.first = known, known[run.sizes[0]]

    def of(self, inputs: Any) -> StageProgram:
        """The program of these inputs."""
        return self._known[rows_of([inputs])]


DryAxis = DryReplicas | DryShards | DrySwap
Specs = tuple[TensorSpec, ...]


class _Messages:
    """Messages that arrive at once. What was sent is kept until the next one is.

    Args:
        specs: what a stage sends of a micro-batch of so many rows.    sizes: rows of each micro-batch.
    """

    def __init__(self, specs: dict[tuple[int, int], Specs], sizes: list[int], device_type: str) -> None:
        self._specs, self._sizes, self._device_type = specs, sizes, device_type
        self._sent: list[Tensor] = []

    def recv(self, message: Any, _source: int, _shape: Hashable) -> tuple[Tensor, ...]:
        """Activations."""
        specs = self._specs[message.stage, self._sizes[message.micro]]
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

    def _arrived(self, step: Any, action: Action) -> Any:
        self._watch.phase, self._watch.cause = "backward", "temporary"
        self._watch.numbers = True  # flags of gradients that may be None: all are there
        found = super()._arrived(step, action)
        self._watch.numbers = False
        return found

    def _backward(self, step: Any, action: Action) -> None:
        super()._backward(step, action)
        self._units.after_backward()  # type: ignore[union-attr]

    def _inputs(self, step: Any, action: Action) -> None:
        super()._inputs(step, action)
        self._units.after_backward()  # type: ignore[union-attr]

    def _weights(self, step: Any, action: Action) -> None:
        self._watch.phase, self._watch.cause = "backward", "temporary"
        super()._weights(step, action)


class _RankModel(NamedTuple):
    """What a rank has of a model without values.

    Args:
        rank: its place in the pipeline.
        root: the model, or its stages.    names: of the model's modules.
        specs: what a stage sends of a micro-batch of so many rows.
        cut: parameters that the tensor axis cuts.
        sums: whole ones whose gradients its ranks add up.
        experts: layers whose parameters fewer ranks hold.
        context: runs the model on a part of each sequence; None: sequences are whole.
    """

    rank: int
    shapes: Shapes
    root: Any
    structure: ModelStructure
    names: dict[nn.Module, str]
    specs: dict[tuple[int, int], Specs]
    cut: set[nn.Parameter]
    sums: set[nn.Parameter]
    experts: list[nn.Module]
    context: DryContext | None


class _DryStep:
    """One rank, and its step."""

    def __init__(self, run: DryRun, here: _RankModel) -> None:
        self._run, self._task, self._plan, self._here = run, run.task, run.plan, here
        self._shapes, self._root = here.shapes, here.root
        device, of_stage = run.task.device_type, run.everyone.ranks // run.everyone.pipeline
        self._on_gpu = run.task.memory_type == "cuda"
        limit = None if run.limit is None else allowed(run.limit)
        self._real = run.task.on_gpu or (self._on_gpu and not env.read().virtual_gpus)
        self._watch = StorageWatch(device, kernel_memory(on_gpu=self._on_gpu, virtual=not self._real))
        self._account = MemoryTracker(CachingAllocator(limit) if self._on_gpu else None, self._watch.place)
        self._watch.account = self._account
        self._mesh: Any = SimpleNamespace(
            plan=run.plan,
            stage=here.rank,
            axes=SimpleNamespace(device_type=device),
            group=lambda _: None,
            peer=lambda _: 0,
            ranks_of=lambda stage: range(stage * of_stage, (stage + 1) * of_stage),
        )
        self._messages = _Messages(here.specs, run.sizes, device)

    def peak(self) -> MemoryPeak:
        """Run a step, when the moments are there already."""
        with self._running():
            units, held = self._units()
            optimizers = self._optimizers(units, held)
            meetings = self._meetings(held)
        task, run, context = self._task, self._run, self._here.context
        batch = task.blank_batch(run.rows, self._shapes)
        micros = micro_batches(batch, run.parts)[: len(run.sizes)]
        if context is not None:
            context.follow(self._called(units), None)
            context.confirm(micros, task.counted_loss)
        with self._running():
            self._account.forget_peak()
            with self._watch.labelled("inputs"):
                for tensor in tensors_in(batch):
                    self._watch.see(tensor)
            del batch
            self._step(units, micros)
            self._watch.phase, self._watch.cause, self._watch.numbers = "update", "temporary", True
            self._update(units, optimizers, held)
            if meetings is not None:
                self._watch.phase = "meeting"
                meetings.meet()
        return self._account.peak

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Operators have no values, and their memory is counted."""
        try:
            with self._shapes.mode, self._watch, gpu_attention(on_gpu=self._real):
                yield
        except Exception as error:
            if is_about_data(error):
                raise CaptureError(f"a step reads values of tensors: a dry run has none: {error}") from error
            if isinstance(error, ValueError) and not is_ours(error):  # such as of a BatchNorm of one row
                raise UnfitError(str(error)) from error
            raise

    def _called(self, units: DryAxis) -> list[nn.Module]:
        """The units that a program calls."""
        calls = self._plan.recompute or not isinstance(units, DryReplicas)
        return self._here.structure.units if calls else []

    def _step(self, units: DryAxis, micros: list[Any]) -> None:
        plan = self._plan
        weights = [1.0 / len(micros)] * len(micros)
        work = StepInput(micros, weights, self._task.counted_loss, float(plan.data), counts=self._task.counts)
        output = self._here.structure.output
        runtime = _DryRuntime(units, self._mesh, output, self._messages, self._watch)
        runtime.context = self._here.context
        runtime.run(schedule(plan.schedule, plan.pipeline, len(micros), plan.chunks), work)

    def _update(self, units: DryAxis, optimizers: list[Any], held: dict[str, nn.Parameter]) -> None:
        """Add up over the tensor axis what its ranks have parts of, and step."""
        if isinstance(units, DrySwap):
            for optimizer in optimizers:
                units.update(optimizer, 1.0)
            return
        if isinstance(units, DryShards):
            self._give(held)
        added = [held[name] for name, value in self._root.named_parameters() if value in self._here.sums]
        parts = [local(value.grad).flatten() for value in added if value.grad is not None]
        if parts:
            torch.cat(parts)
        del parts
        if self._plan.clip is not None or self._plan.precision == "fp16":
            squared_norm({name: value for name, value in held.items() if value.requires_grad}, (), self._mesh)
        for optimizer in optimizers:
            optimizer.step()

    def _units(self) -> tuple[DryAxis, dict[str, nn.Parameter]]:
        """The data axis, and what the optimizer gets."""
        plan, root, watch = self._plan, self._root, self._watch
        inside = set(root.modules())
        given = [unit for unit in self._here.structure.units if unit in inside]
        own = own_units(root, given)
        exact = [module for module in kept_in_f32(self._shapes.model, plan) if module in inside]
        replicas = plan.zero == 0 and not plan.low
        experts = [layer for layer in self._here.experts if layer in inside]
        spread = {value for layer in experts for value in layer.parameters()}
        watch.follow(root, self._here.names)
        for module in [*own, *exact, *experts, root] if plan.tensor > 1 or not replicas else ():
            module.register_forward_hook(own_memory)
        for unit in own if plan.recompute else ():
            recompute(unit, selective=plan.recompute == "selective", draws=False)
        with watch.labelled("parameters"):
            for buffer in root.buffers():
                watch.see(buffer)
            named = held = dict(root.named_parameters())
            for value in named.values():
                watch.see(value, counts=replicas and plan.swap is None)
                if not value.requires_grad:
                    continue
                value.register_post_accumulate_grad_hook(
                    lambda value: watch.relabel(value.grad, "gradients") if value.grad is not None else None
                )
            if not replicas:
                held = {name: self._shard(value, spread) for name, value in named.items()}
        if plan.swap is not None:
            return DrySwap(root, given, plan, watch, self._task.memory_type), held
        if replicas:
            return DryReplicas(root, plan, watch, spread, self._compression(plan)), held
        alone = apart(root, exact)
        covered = {part for module in alone for part in module.modules()}
        outer = [unit for unit in gathered_units(root, own, plan) if unit not in covered]
        return DryShards(root, outer, alone, plan, watch, experts=experts, fused=self._real), held

    def _compression(self, plan: Plan) -> NoMessages:
        """How gradients of a plan, or its differences, are sent."""
        if plan.compression is None or plan.copies == 1:
            return NoMessages()
        inside = {value for value in self._root.parameters() if value.requires_grad}
        named = {
            f"{path}.{leaf}".lstrip("."): value
            for module, path in self._here.names.items()
            for leaf, value in module._parameters.items()
            if value is not None and value in inside
        }
        ranks = plan.copies if plan.local_steps is None else plan.copies // plan.shards
        return DryCompression(plan.compression, named, ranks, self._watch)

    def _shard(self, value: nn.Parameter, spread: set[nn.Parameter]) -> nn.Parameter:
        """What this rank keeps. `spread`: parameters that fewer ranks hold."""
        parts = (self._plan.of_experts() if value in spread else self._plan).sharers
        shape = shard_of(value.shape, parts) if self._plan.zero else value.shape
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        made = torch.empty(shape, dtype=dtype, device=value.device)
        return nn.Parameter(made, requires_grad=value.requires_grad)

    def _give(self, held: dict[str, nn.Parameter]) -> None:
        """What was reduced, which is counted already, as gradients."""
        for value in held.values():
            if value.requires_grad:
                value.grad = local(value).detach().view(-1).view(value.shape)  # no memory of its own

    def _optimizers(self, units: DryAxis, held: dict[str, nn.Parameter]) -> list[Any]:
        """Make the optimizers, and their state."""
        watch, trained = self._watch, {name: value for name, value in held.items() if value.requires_grad}
        if not trained:
            return []
        with watch.labelled("moments"):
            given = Parameters(trained)
            made = self._task.optimizer(given)  # some make their state at once
            optimizers = optimizers_of(made, given, swap=isinstance(units, DrySwap))
            for optimizer in optimizers if any(self._is_cut(value) for value in trained.values()) else ():
                refuse_cut_parameters(optimizer)
            watch.numbers = True
            if not isinstance(units, DrySwap):
                self._give(held)
            for optimizer in optimizers:
                self._together(optimizer)
                units.begin(optimizer) if isinstance(units, DrySwap) else self._make_state(optimizer)
            watch.numbers = False
        for value in trained.values():
            value.grad = None
        return optimizers

    def _make_state(self, optimizer: Any) -> None:
        """The first step, whose peak does not count. Without values PyTorch's loops take far longer than its
        kernels of lists, which make the same state.
        """
        groups = optimizer.param_groups
        if steps_parts(optimizer):
            optimizer.param_groups = [
                {**group, "foreach": True} if chooses_lists(optimizer, group) else group for group in groups
            ]
        optimizer.step()
        optimizer.param_groups = groups

    def _meetings(self, held: dict[str, nn.Parameter]) -> DryMeetings | None:
        """Make what replicas that train on their own keep, and its state; None: gradients are averaged."""
        if self._run.everyone.local_steps is None:
            return None
        watch, trained = self._watch, {name: value for name, value in held.items() if value.requires_grad}
        with watch.labelled("moments"):
            watch.numbers = True
            meetings = DryMeetings(trained, self._run.everyone, self._compression(self._run.everyone))
            if meetings.optimizer is not None:
                self._together(meetings.optimizer, plain=True)
            meetings.meet()
            watch.numbers = False
        return meetings

    def _together(self, optimizer: Any, *, plain: bool = False) -> None:
        """Choose between PyTorch's loops and its kernels of lists, as a run does on tensors with values."""
        if not self._on_gpu:
            return
        plain = plain or steps_parts(optimizer)
        groups = []
        for group in optimizer.param_groups:
            for cut in (False, True):  # DTensors are in no list with others, and none by default
                alike = [each for each in group["params"] if (not plain and self._is_cut(each)) is cut]
                lists = {"foreach": not cut} if chooses_lists(optimizer, group) else {}
                if alike:
                    groups.append({**group, "params": alike, **lists})
        optimizer.param_groups = groups

    def _is_cut(self, value: nn.Parameter) -> bool:
        """Whether a run has a DTensor in its place."""
        return self._plan.zero > 0 or self._plan.low or value in self._here.cut
