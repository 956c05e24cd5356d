"""A step of each rank without values: what `parallelize` would build, on shapes, and what it keeps in memory.

The tensor axis and the stages are those of a run; dry_step.py runs the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unisono.errors import UnfitError
from unisono.parallel.arguments import check_model
from unisono.parallel.batches import rows_of, sizes
from unisono.parallel.graph.capture import Recorder
from unisono.parallel.graph.containers import cast
from unisono.parallel.graph.shapes import Shapes, may_be_packed, single_texts
from unisono.parallel.graph.stage_program import StageProgram, choose_starts
from unisono.parallel.pipeline.p2p_communication import TensorSpec
from unisono.parallel.pipeline.program_stage import ProgramStage
from unisono.parallel.pipeline.schedule import schedule
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
from unisono.parallel.sharded_parameters import TYPES
from unisono.parallel.structure import identity

from .dry_context import DryContext
from .dry_experts import spread_by_chance
from .dry_step import DryStep, RankModel, Specs, StepSize
from .dry_tensor import run_parts
from .memory_account import MemoryPeak

if TYPE_CHECKING:
    from unisono.parallel.structure import ModelStructure

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
        if task.batch < plan.data:
            raise UnfitError(f"a batch of {task.batch} rows is too small for {plan.data} data ranks")
        self._task, self._everyone, self._limit = task, plan, limit
        self._plan = plan if plan.local_steps is None else plan.of_replica()
        self._rows = -(-task.batch // plan.data)
        self._parts = min(plan.micro_batches, task.batch // plan.data)  # as the rank with fewest rows can
        self._micro_rows = -(-self._rows // self._parts)
        enough = 2 * plan.stages + 2  # of a pipeline's micro-batches; more are in memory as these are
        self._run_parts = min(self._parts, -(-enough // plan.pipeline) * plan.pipeline)
        if plan.schedule == "gpipe":  # all are in memory
            self._run_parts = self._parts
        self._sizes = sizes(self._rows, self._parts)[: self._run_parts]

    def peaks(self) -> list[MemoryPeak]:
        """The peak of a step on each rank of a pipeline; the ranks of other axes are like them."""
        return [self.peak_of(rank) for rank in range(self._plan.pipeline)]

    def peak_of(self, rank: int) -> MemoryPeak:
        """The peak on the ranks at one place of a pipeline."""
        task, plan = self._task, self._plan
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
            check_model(model, self._everyone)
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
        size = StepSize(self._rows, self._parts, self._sizes, self._limit)
        here_is = RankModel(rank, shapes, root, structure, names, specs, parted, sums, experts, context)
        with single_texts(single):
            return DryStep(task, self._everyone, plan, size, here_is).peak()

    def _here(self, rank: int) -> list[int]:
        plan = self._plan
        rank_of = schedule(plan.schedule, plan.pipeline, 1, plan.chunks).rank_of
        return [stage for stage, there in enumerate(rank_of) if there == rank]

    def _lower(self, model: nn.Module, shapes: Shapes) -> None:
        """Have the parameters in the type of compute."""
        if not self._plan.low:
            return
        exact = {value for module in kept_in_f32(model, self._plan) for value in module.parameters()}
        with shapes.mode:
            for parameter in model.parameters():
                if parameter.is_floating_point() and parameter not in exact:
                    parameter.data = parameter.data.to(TYPES[self._plan.precision])

    def _stages(
        self, model: nn.Module, structure: ModelStructure, programs: _DryPrograms | None
    ) -> list[Any]:
        plan = self._plan
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
        for rows in dict.fromkeys(self._sizes) if stages else ():
            whole = self._task.blank_batch(rows, shapes)[0]
            inputs = cast(whole, _low(self._plan))  # any stage may take them
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
        plan, known, starts = run._plan, dict[int, StageProgram](), None
        for rows in dict.fromkeys(run._sizes):
            copy = Shapes(shapes.model)
            run._lower(copy.model, copy)  # a model may ask for the type of its parameters
            inputs = run._task.blank_batch(rows, copy)[0]
            graph = Recorder(copy).run(copy.model, cast(inputs, _low(plan)))
            starts = starts or choose_starts(graph, plan.stages)
            known[rows] = StageProgram(graph, copy.model, starts)
        self._known, self.first = known, known[run._sizes[0]]

    def of(self, inputs: Any) -> StageProgram:
        """The program of these inputs."""
        return self._known[rows_of([inputs])]
