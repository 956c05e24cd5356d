"""The inside of `unisono.parallel` that tests use: after a change of its layout only this file changes.

A test uses a name of it for a price, a schedule or a part of a plan that no run shows by itself.
"""
# ruff: noqa: F401

from unisono.parallel.batches import RankBatches, cut_rows
from unisono.parallel.calibration.operators import call_of
from unisono.parallel.compression.exchange_queue import ARRAYS
from unisono.parallel.context import attention
from unisono.parallel.context.layout import PositionSpan
from unisono.parallel.costs import predictor
from unisono.parallel.costs.collectives import CollectiveCosts, LinkCosts, RankGroups
from unisono.parallel.costs.forecast import ForecastCheck
from unisono.parallel.costs.operators import (
    CONVOLUTIONS,
    PRICED,
    PRODUCTS,
    HostStarts,
    OperatorPoint,
    OperatorPrices,
    TracedOperator,
    does_matrices,
    point_of,
)
from unisono.parallel.costs.step_parts import HostPrices, ParameterSizes, StageStarts, StepParts
from unisono.parallel.costs.step_time import (
    COMPARED,
    REPEATED,
    REPLAYED,
    ActionWork,
    RankClock,
    StageTime,
    shared_time,
    step_forecast,
)
from unisono.parallel.costs.task import TrainingTask
from unisono.parallel.costs.trace import NO_UNIT, TimedStep, TracedStep, trace_step, trace_update
from unisono.parallel.experts import spread
from unisono.parallel.graph.capture import Recorder
from unisono.parallel.graph.program import Ref, template
from unisono.parallel.graph.proof import prove as prove_cut
from unisono.parallel.graph.rules import WHOLE, rule_of
from unisono.parallel.graph.shapes import Shapes
from unisono.parallel.mesh import PlanMesh
from unisono.parallel.optimizer_scope import scope_of
from unisono.parallel.optimizers import Parameters
from unisono.parallel.pipeline.schedule import KINDS, Action, Schedule, predict, prove, schedule
from unisono.parallel.pipeline.stages import balance, counted_costs
from unisono.parallel.planning import dry_run, planner, search
from unisono.parallel.planning.candidates import changes, neighbours, plans
from unisono.parallel.planning.dry_axes import DrawnRows
from unisono.parallel.planning.dry_run import DryRun
from unisono.parallel.planning.machine import (
    LOW,
    POINTS,
    JobHost,
    JobMachine,
    _of_control_groups,
    hosts_of,
    measure,
)
from unisono.parallel.planning.memory_account import (
    MIB,
    CachingAllocator,
    MemoryTracker,
    StorageWatch,
    allowed,
    column_sum,
    convolution,
    kernel_memory,
)
from unisono.parallel.planning.search import PlanSearch
from unisono.parallel.prediction import proved_schedule
from unisono.parallel.program_state import ModuleSettings
from unisono.parallel.programs import ModelRecorder
from unisono.parallel.sharded_parameters import TYPES
from unisono.parallel.tensor_moves import TensorAxis
from unisono.parallel.written_parameters import STEPS
