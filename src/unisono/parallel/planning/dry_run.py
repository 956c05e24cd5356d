"""A step of each rank without values: what `parallelize` would build, on shapes, and what it keeps in memory.

The axes, the stages, the runtime, autograd, recomputation, the loss and the optimizer are those of a run. It
is one rank of a job of PyTorch's fake process group, whose collectives send nothing: see lone_rank.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unisono.engine.environment import env
from unisono.errors import UnfitError
from unisono.parallel.arguments import check_model
from unisono.parallel.batches import micro_batches, sizes
from unisono.parallel.failures import is_ours
from unisono.parallel.gradients import TiedParameter, add_up, local, squared_norm, sums_of
from unisono.parallel.graph.capture import CaptureError
from unisono.parallel.graph.containers import cast, tensors_in
from unisono.parallel.graph.noted_call import gpu_attention
from unisono.parallel.graph.shapes import may_be_packed, single_texts
from unisono.parallel.materialize import Initializer
from unisono.parallel.mesh import PlanMesh
from unisono.parallel.optimizers import (
    Parameters,
    chooses_lists,
    has_cut_parameters,
    optimizers_of,
    refuse_cut_parameters,
    step,
    steps_parts,
)
from unisono.parallel.outer_optimizer import OuterOptimizer
from unisono.parallel.pipeline.runtime import PipelineRuntime, StepInput, TensorSpec
from unisono.parallel.pipeline.schedule import Action, Schedule, StageMessage, schedule
from unisono.parallel.pipeline.stages import (
    PipelineStages,
    ProgramStage,
    check_no_cuts,
    first_pieces,
    stages_of,
)
from unisono.parallel.plan import Plan
from unisono.parallel.precision import kept_in_f32
from unisono.parallel.programs import ModelPrograms, RecordedPrograms
from unisono.parallel.replicated_parameters import ReplicatedParameters, like
from unisono.parallel.sharded_parameters import TYPES, DataAxis, shard_units
from unisono.parallel.structure import identity
from unisono.parallel.tensor_parallel import cut_model
from unisono.torch_internals import fsdp
from unisono.torch_internals.dtensor import handle_parts
from unisono.torch_internals.fake import READ, is_about_data
from unisono.torch_internals.lone_rank import lone_rank

from .dry_axes import DryCompression, DrySwap, refuse_axes, spread_by_chance
from .memory_account import CachingAllocator, MemoryPeak, MemoryTracker, StorageWatch, allowed, kernel_memory

if TYPE_CHECKING:
    from unisono.parallel.costs.task import TrainingTask
    from unisono.parallel.graph.stage_program import StageProgram


class DryRun:
    """A model without values, cut and staged by a plan.

    Args:
        task: what is trained.
        limit: bytes of a rank's memory, of which a GPU's allocator gets a little less; None: not limited.
    Attributes:
        everyone: the plan of all ranks.    plan: that of one replica, where replicas train on their own.
        rows: of a rank.    parts: micro-batches into which they are cut.
        micro_rows: of the largest of these.    sizes: rows of each that is run, the first ones.
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
        self.micro_rows = -(-self.rows // self.parts)
        enough = 2 * plan.stages + 2  # of a pipeline's micro-batches; more are in memory as these are
        run = min(self.parts, -(-enough // plan.pipeline) * plan.pipeline)
        few, all_ = self.schedule(run), self.schedule(self.parts)
        if any(few.kept(rank) < all_.kept(rank) for rank in range(plan.pipeline)):
            run = self.parts
        self.sizes = sizes(self.rows, self.parts)[:run]

    def peaks(self) -> list[MemoryPeak]:
        """The peak of a step on each rank of a pipeline; the ranks of other axes are like them."""
        return [self.peak_of(rank) for rank in range(self.plan.pipeline)]

    def peak_of(self, rank: int) -> MemoryPeak:
        """The peak on the ranks at one place of a pipeline."""
        task, plan = self.task, self.plan
        changed = task.changed_buffer(self.micro_rows) if plan.recompute else ""
        if changed:
            raise UnfitError(
                f'recompute={plan.recompute!r} would change the buffer "{changed}" twice in a step'
            )
        of_stage = self.everyone.ranks // plan.pipeline
        with lone_rank(rank * of_stage, self.everyone.ranks):
            step = _DryStep(self, PlanMesh.of(self.everyone, task.device_type))
            with single_texts(step.single):
                return step.peak()

    def schedule(self, micro_batches: int) -> Schedule:
        """The order of so many micro-batches."""
        return schedule(self.plan.schedule, self.plan.pipeline, micro_batches, self.plan.chunks)


def _low(plan: Plan) -> torch.dtype | None:
    return TYPES[plan.precision] if plan.low else None


Specs = tuple[TensorSpec, ...]


class _DryRuntime(PipelineRuntime):
    """The runtime of a run, whose phases a watch is told."""

    def __init__(
        self, units: Any, mesh: PlanMesh, output: Any, programs: ModelPrograms, watch: StorageWatch
    ) -> None:
        super().__init__(units, mesh, output, single=mesh.plan.pipeline == 1)
        self._watch = watch
        self.programs = None if programs.recorded is None else programs

    def expect(self, work: StepInput, specs: dict[tuple[int, int], Specs], sizes: Sequence[int]) -> None:
        """Know what each stage sends of a micro-batch of so many rows: no stage tells."""
        for (stage, rows), each in specs.items():
            for micro in (micro for micro, size in enumerate(sizes) if size == rows):
                self._messages.expect(StageMessage("F", stage, micro), self._key(work, micro), each)

    def _forward(self, step: Any, action: Action) -> None:
        self._watch.phase, self._watch.cause = "forward", "activations"
        super()._forward(step, action)

    def _arrived(self, step: Any, action: Action) -> Any:
        self._watch.phase, self._watch.cause = "backward", "temporary"
        with self._watch.having(numbers=1.0):  # flags of gradients that may be None: all are there
            return super()._arrived(step, action)

    def _weights(self, step: Any, action: Action) -> None:
        self._watch.phase, self._watch.cause = "backward", "temporary"
        super()._weights(step, action)


@contextmanager
def _explained() -> Iterator[None]:
    """Say what an error means where there are no values."""
    try:
        yield
    except Exception as error:
        if is_about_data(error):
            raise CaptureError(f"a step reads values of tensors: a dry run has none: {error}") from error
        if isinstance(error, ValueError) and not is_ours(error):  # such as of a BatchNorm of one row
            raise UnfitError(str(error)) from error
        raise


class _DryStep:
    """One rank, in a mesh whose others are not there: what it has of a model without values, and its step."""

    def __init__(self, run: DryRun, mesh: PlanMesh) -> None:
        self._run, self._mesh, self._task, self._plan = run, mesh, run.task, run.plan
        self._on_gpu = run.task.memory_type == "cuda"
        self._real = run.task.on_gpu or (self._on_gpu and not env.read().virtual_gpus)
        inside = kernel_memory(on_gpu=self._on_gpu, virtual=not self._real)
        self._watch = StorageWatch(run.task.device_type, inside)
        limit = None if run.limit is None else allowed(run.limit)
        self._account = MemoryTracker(CachingAllocator(limit) if self._on_gpu else None, self._watch.place)
        self._watch.account = self._account
        self._followed = set[Tensor]()
        self._build()

    def _build(self) -> None:
        """Cut and stage the model."""
        task, plan, mesh, run = self._task, self._plan, self._mesh, self._run
        self._shapes = shapes = task.shapes()
        self._model = model = shapes.model
        self._structure = structure = task.structure(model, shapes.also, staged=plan.pipeline > 1)
        self._names = {module: path for path, module in model.named_modules()}
        with shapes.mode:
            check_model(model, run.everyone)
        self._experts = spread_by_chance(model, mesh)
        in_pieces = bool(structure.pieces) and plan.context == 1
        self.single = plan.context == 1 and not may_be_packed(task.inputs_of(task.sample))  # else with masks
        if plan.context > 1:
            refuse_axes(plan, "context", beside=("tensor", "pipeline"))
        if plan.swaps_parts:
            raise UnfitError(f"{plan}: the memory of swapped parts is not predicted")
        recorded: RecordedPrograms | None = None
        if plan.pipeline > 1 and in_pieces:
            structure.output = identity  # the last piece returns what the loss takes
        elif plan.pipeline > 1 or plan.context > 1:
            recorded = self._recorded()
        first = None if recorded is None else recorded.first
        self._sums: list[TiedParameter] = []  # whole parameters whose gradients tensor ranks add up
        if plan.tensor > 1:
            opened = frozenset[str]() if first is None else first.open
            cut = task.cut(
                plan.tensor, run.micro_rows, sequence=plan.sequence, opened=opened, single=self.single,
                in_pieces=plan.pipeline > 1 and in_pieces,
            )  # fmt: skip
            with shapes.mode:
                regathers = plan.sequence and not plan.recompute
                cut_model(model, cut, mesh.part("tensor"), regathers=regathers, draws=False)
            self._sums = sums_of(cut, {path: path for path, _ in model.named_parameters()}, mesh)
        self._programs, stages = ModelPrograms(recorded), self._stages(first)
        self._specs = self._boundaries(stages)
        self._root: Any = model
        if plan.pipeline > 1:
            exact = plan.stages - 1 if plan.low else None
            here = [stage for stage, there in enumerate(run.schedule(1).rank_of) if there == mesh.stage]
            self._root = PipelineStages({stage: stages[stage] for stage in here}, exact)

    def _recorded(self) -> RecordedPrograms:
        """The programs that run. The last rank of a context group has as much in memory as any other."""
        if self._plan.pipeline > 1:
            check_no_cuts(self._plan, self._task.model)
        sample = self._task.blank_batch(self._run.sizes[0], self._shapes)[0]
        recorded = RecordedPrograms(self._model, self._mesh, self._structure.output, sample)
        if recorded.axis is not None:
            recorded.axis.ranks = recorded.axis.ranks._replace(place=self._plan.context - 1)
        return recorded

    @contextmanager
    def _low(self) -> Iterator[None]:
        """Have the parameters in the type of compute."""
        low = _low(self._plan)
        kept = kept_in_f32(self._model, self._plan) if low else []
        exact = {value for module in kept for value in module.parameters()}
        changed = [value for value in self._model.parameters() if low and value.is_floating_point()]
        before = [(value, value.data) for value in changed if value not in exact]
        with self._shapes.mode:
            for value, data in before:
                value.data = data.to(low)
            yield
            for value, data in before:
                value.data = data

    def _stages(self, first: StageProgram | None) -> list[Any]:
        plan, structure = self._plan, self._structure
        if plan.pipeline == 1:
            return []
        if first is not None:
            return [ProgramStage(first, stage, self._model) for stage in range(plan.stages)]
        return stages_of(structure, first_pieces(structure, plan, None, on_meta=True), self._model)

    def _boundaries(self, stages: list[Any]) -> dict[tuple[int, int], Specs]:
        """What each stage but the last sends of a micro-batch of so many rows: shapes, in their order."""
        found: dict[tuple[int, int], Specs] = {}
        programs, shapes, rows_of_each = self._programs, self._shapes, self._run.sizes if stages else ()
        batches = {rows: self._task.blank_batch(rows, shapes) for rows in rows_of_each}
        if stages:
            programs.note(shapes.model, batches[self._run.sizes[0]][0])
            programs.confirm(batches.values(), None)
        for rows, (whole, _) in batches.items():
            inputs = cast(whole, _low(self._plan))  # any stage may take them
            value: tuple[Tensor, ...] = ()
            with self._low(), shapes.mode:
                for number, stage in enumerate(stages[:-1]):
                    if programs.first is None:
                        output = stage(value, inputs)
                    else:
                        output = programs.of(inputs).run(number, stage, value, inputs)
                    output = tuple(output) if isinstance(output, (tuple, list)) else (output,)
                    specs = (TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in output)
                    found[number, rows] = tuple(specs)
                    value = tuple(t.detach().requires_grad_(t.requires_grad) for t in output)
        return found

    def peak(self) -> MemoryPeak:
        """Run a step, when the moments are there already."""
        with self._shapes.mode:
            self._see_model()
        units = self._units()
        with self._running():
            trained = {name: v for name, v in self._root.named_parameters() if v.requires_grad}
            optimizers = self._optimizers(units, trained)
            meetings = self._meetings(trained)
        task, run, programs = self._task, self._run, self._programs
        batch = task.blank_batch(run.rows, self._shapes)
        micros = micro_batches(batch, run.parts)[: len(run.sizes)]
        if (axis := programs.axis) is not None:
            calls = self._plan.recompute or not isinstance(units, ReplicatedParameters)
            axis.follow(self._root, self._structure.units if calls else [])
            programs.note(self._root, None)
            programs.confirm(micros, task.counted_loss)
        with self._running():
            self._account.forget_peak()
            with self._watch.having(cause="inputs"):
                for tensor in tensors_in(batch):
                    self._watch.see(tensor)
            del batch
            self._step(units, micros)
            self._watch.phase, self._watch.cause, self._watch.numbers = "update", "temporary", READ
            self._update(units, optimizers, trained)
            if meetings is not None:
                self._watch.phase = "meeting"
                meetings.meet()
        return self._account.peak

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Operators have no values, and their memory is counted."""
        with (
            _explained(), self._shapes.mode, self._watch.seeing(), gpu_attention(on_gpu=self._real)
        ):  # fmt: skip
            yield

    def _step(self, units: DataAxis, micros: list[Any]) -> None:
        plan = self._plan
        weights = [1.0 / len(micros)] * len(micros)
        work = StepInput(micros, weights, self._task.counted_loss, float(plan.data), counts=self._task.counts)
        runtime = _DryRuntime(units, self._mesh, self._structure.output, self._programs, self._watch)
        runtime.expect(work, self._specs, self._run.sizes)
        runtime.run(schedule(plan.schedule, plan.pipeline, len(micros), plan.chunks), work)

    def _update(self, units: DataAxis, optimizers: list[Any], trained: dict[str, nn.Parameter]) -> None:
        """Add up over the tensor axis what its ranks have parts of, and step."""
        add_up(trained, self._sums)
        if not isinstance(units, DrySwap) and (self._plan.clip is not None or self._plan.precision == "fp16"):
            squared_norm(trained, (), self._mesh)
        for optimizer in optimizers:
            if isinstance(units, DrySwap):
                units.update(optimizer, 1.0)
            else:
                step(optimizer, cut=has_cut_parameters(trained.values()))

    def _see_model(self) -> None:
        root, watch = self._root, self._watch
        replicas = self._plan.zero == 0 and not self._plan.low  # a rank keeps the model's own parameters
        watch.follow([(self._names.get(module, ""), module) for module in root.modules()], always=True)
        with watch.having(cause="parameters"):
            for buffer in root.buffers():
                watch.see(buffer)
            for value in root.parameters():
                watch.see(local(value.detach()), counts=replicas and self._plan.swap is None)
                if value.requires_grad:
                    value.register_post_accumulate_grad_hook(self._note_gradient)

    def _units(self) -> Any:
        plan, root, watch = self._plan, self._root, self._watch
        inside = set(root.modules())
        made: Any = None
        units = [unit for unit in self._structure.units if unit in inside]
        if plan.swap is not None:
            with self._running(), watch.having(cause="parameters"):
                made = DrySwap(root, units, self._mesh, self._task.memory_type)
        elif plan.zero == 0 and not plan.low:
            with self._running(), watch.having(cause="buffers"):
                made = self._shard(units)
                made.compression = self._compression(plan)
        else:
            with _explained():  # its meshes have values
                made = self._shard(units)
            labels = partial(watch.having, cause="gathered"), partial(watch.having, cause="buffers")
            fsdp.observe(root, *labels, self._follow, self._note_gradient)
            with self._shapes.mode, watch.having(cause="parameters"):
                for value in root.parameters():
                    watch.see(local(value.detach()))
            with self._running():
                made.compression = self._compression(plan)
        made.finish = watch.having(numbers=1.0)(made.finish)  # all ranks have used what this one has
        return made

    def _shard(self, units: list[nn.Module]) -> Any:
        model, plan = self._shapes.model, self._plan
        made: Any = shard_units(
            self._root, units, self._mesh, last=plan.pipeline == 1, initial=Initializer(model),
            exact=kept_in_f32(model, plan), experts=self._experts,
        )  # fmt: skip
        return made

    def _follow(self, copy: Tensor) -> None:
        """Note the gradient of a gathered copy of a parameter."""
        if copy.requires_grad and copy not in self._followed:
            self._followed.add(copy)
            copy.register_post_accumulate_grad_hook(self._note_gradient)

    def _note_gradient(self, value: Tensor) -> None:
        if value.grad is not None:
            self._watch.relabel(local(value.grad), "gradients")

    def _compression(self, plan: Plan) -> DryCompression | None:
        """How gradients of a plan, or its differences, are sent; None: as they are."""
        if plan.compression is None or plan.copies == 1:
            return None
        named = {
            f"{path}.{leaf}".lstrip("."): value
            for module, path in self._names.items()
            for leaf, value in module._parameters.items()
            if value is not None and value.requires_grad and value in set(self._root.parameters())
        }
        ranks = plan.copies if plan.local_steps is None else plan.copies // plan.shards
        units = plan.zero > 0 and plan.local_steps is None  # whole matrices, unless there are replicas
        whole, twice = units and plan.copies == plan.shards, plan.precision == "fp16"
        return DryCompression(plan.compression, named, ranks, self._watch, whole=whole, twice=twice)

    def _optimizers(self, units: DataAxis, trained: dict[str, nn.Parameter]) -> list[Any]:
        watch, cut, make = self._watch, has_cut_parameters(trained.values()), self._task.optimizer
        if not trained or make is None:
            return []
        if cut:
            handle_parts()
        with watch.having(cause="moments"), watch.having(numbers=READ):
            given = Parameters(trained)
            made = make(given)  # some make their state at once
            optimizers = optimizers_of(made, given, swap=isinstance(units, DrySwap))
            for value in trained.values() if not isinstance(units, DrySwap) else ():
                mine = local(value.detach())
                value.grad = like(mine.view(-1).view(mine.shape), value)  # no memory of its own
            for optimizer in optimizers:
                if cut:
                    refuse_cut_parameters(optimizer)
                self._together(optimizer)
                units.begin(optimizer) if isinstance(units, DrySwap) else self._make_state(optimizer, cut=cut)
        for value in trained.values():
            value.grad = None
        return optimizers

    def _make_state(self, optimizer: Any, *, cut: bool) -> None:
        """The first step, whose peak does not count. Without values PyTorch's loops take far longer than its
        kernels of lists, which make the same state.
        """
        groups = optimizer.param_groups
        if steps_parts(optimizer):
            optimizer.param_groups = [
                {**group, "foreach": True} if chooses_lists(optimizer, group) else group for group in groups
            ]
        try:
            step(optimizer, cut=cut)
        except RuntimeError as error:
            if is_ours(error):  # PyTorch has no rule for an operation of it on DTensors
                raise UnfitError(str(error)) from error
            raise
        optimizer.param_groups = groups

    def _meetings(self, trained: dict[str, nn.Parameter]) -> OuterOptimizer | None:
        """Make what replicas that train on their own keep, and its state; None: gradients are averaged."""
        if self._run.everyone.local_steps is None:
            return None
        buffers: Any = SimpleNamespace(changed=lambda: (), synchronize=lambda _: None)
        with self._watch.having(cause="moments"), self._watch.having(numbers=READ):
            meetings = OuterOptimizer(trained, buffers, self._mesh)
            meetings.compression = self._compression(self._run.everyone)  # type: ignore[assignment]
            if meetings.sgd is not None:
                self._together(meetings.sgd, plain=True)
            meetings.meet()
        return meetings

    def _together(self, optimizer: Any, *, plain: bool = False) -> None:
        """Choose between PyTorch's loops and its kernels of lists, as a run does on tensors with values."""
        if not self._on_gpu:
            return
        plain = plain or steps_parts(optimizer)
        groups = []
        for group in optimizer.param_groups:
            for cut in (False, True):  # DTensors are in no list with others, and none by default
                alike = [
                    each for each in group["params"] if (not plain and has_cut_parameters([each])) is cut
                ]
                lists = {"foreach": not cut} if chooses_lists(optimizer, group) else {}
                if alike:
                    groups.append({**group, "params": alike, **lists})
        optimizer.param_groups = groups
