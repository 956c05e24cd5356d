"""What is needed to price a step under a plan: where its stages begin, what it costs, on which hosts.

Prices of operators do not see what a forward does between them, such as the wrappers that a library puts
around its modules. In a small model that is a third of a step. A few steps of few rows show it: it does not
grow with them.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from unisono.errors import UnfitError
from unisono.parallel.arguments import two
from unisono.parallel.batches import cut_rows
from unisono.parallel.generators import generators_kept, pythons_generators_kept
from unisono.parallel.graph.capture import call
from unisono.parallel.graph.containers import tensors_in
from unisono.parallel.graph.shapes import model_copy
from unisono.parallel.loss_weights import own_loss
from unisono.parallel.optimizers import Parameters
from unisono.parallel.replicated_parameters import BUCKET_BYTES
from unisono.planner.choice_page import PricedCollective

from .collectives import CollectiveCosts, LinkCosts, RankGroups
from .operators import OperatorPrices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from unisono.codecs.codec import Codec
    from unisono.engine.costs.machine import MachineCalibration
    from unisono.parallel.graph.stage_program import StageProgram
    from unisono.parallel.plan import Plan
    from unisono.planner.compute_calibration import ComputeCalibration, RuntimeCosts, SharedSteps
    from unisono.planner.hardware import Hardware

    from .collectives import Collectives, PricedExchange, RankGroups
    from .operators import OperatorPrices, TracedOperator
    from .task import TrainingTask
    from .trace import TracedMove, TracedStep


class StageStarts(NamedTuple):
    """Where the stages of a pipeline begin."""

    starts: tuple[tuple[str, int], ...] = ()  # (path, which call of it) of each stage but the first
    sent: tuple[float, ...] = ()  # bytes of a row from each stage to the next; (): the first module's inputs
    opened: frozenset[str] = frozenset()  # modules that span several stages
    items: tuple[int, ...] = ()  # that each stage runs of a recorded program; (): stages are pieces
    repeated: tuple[int, ...] = ()  # operators of each stage that an earlier one runs too, such as masks

    @classmethod
    def of_program(cls, program: StageProgram, rows: int) -> StageStarts:
        """Those of a program that was recorded with so many rows."""
        values, stages = program.graph.values, program.stages
        sent = [sum(values[number].nbytes for number in stage.goes) / rows for stage in stages[:-1]]
        run: set[int] = set()
        repeated = []
        for stage in stages:
            repeated.append(sum(item.last - item.first for item in stage.items if item.first in run))
            run.update(item.first for item in stage.items)
        return cls(
            tuple((start.path, start.call) for start in program.starts), tuple(sent), program.open,
            tuple(len(stage.items) for stage in stages), tuple(repeated),
        )  # fmt: skip

    def of(self, traced: TracedStep, rows: int) -> tuple[list[int], list[float]]:
        """The stage of each module call, and the bytes from each stage to the next.

        Raises:
            ValueError: a stage begins at a module that a forward does not call.
        """
        first, sent = [], []
        for path, count in self.starts:
            begins = (
                number
                for number, call in enumerate(traced.calls)
                if call.number == count and f"{call.path}.".startswith(f"{path}.")
            )
            found = next(begins, None)
            if found is None:
                raise UnfitError(f'StepPredictor: a stage begins at "{path}", which a forward does not call')
            first.append(found)
            sent.append(float(traced.calls[found].nbytes))
        stages = [bisect.bisect_right(first, number) for number in range(len(traced.calls))]
        return stages, [each * rows for each in self.sent] or sent


ADAM_OPERATORS = 12
WHOLE_MODEL = StageStarts()


class HostPrices(NamedTuple):
    """What a job on some hosts pays."""

    collectives: Collectives  # what ranks wait for within a step, as those of the tensor axis
    reductions: Collectives  # of the data axis, whose turns are in `shared`; and messages
    operators: OperatorPrices
    crowd: float  # ranks of a host per core, at least 1
    shared: SharedSteps  # what ranks that train together take beside the sum of their costs
    groups: RankGroups  # which group of an axis a step waits for


class ParameterSizes(NamedTuple):
    """Parameters of one unit on one rank: how many are trained, their elements, and the same of frozen ones.

    Frozen ones are gathered, too; they have no gradients and no updates.
    """

    number: int = 0
    elements: int = 0
    frozen: int = 0
    frozen_elements: int = 0

    def plus(self, elements: int, *, trained: bool) -> ParameterSizes:
        """With one more."""
        if trained:
            return self._replace(number=self.number + 1, elements=self.elements + elements)
        return self._replace(frozen=self.frozen + 1, frozen_elements=self.frozen_elements + elements)

    @property
    def whole(self) -> ParameterSizes:
        """As if all were trained: what is gathered."""
        return ParameterSizes(self.number + self.frozen, self.elements + self.frozen_elements)


class CompressedGradients(NamedTuple):
    """What a rank sends of the gradients of a stage."""

    exact: int  # elements in f32
    coded: Mapping[Codec, int]  # codec -> elements
    matrices: Sequence[tuple[int, int, int]]  # rows, columns and rank of those of low rank
    factors: Codec | None  # their codec; None: f32

    @property
    def buckets(self) -> int:
        """Of gradients in f32."""
        whole = self.exact + sum(self.coded.values()) + sum(n * m for n, m, _ in self.matrices)
        return max(1, -(-4 * whole // BUCKET_BYTES))


@dataclass
class StepParts:
    """What is needed to price a plan."""

    plan: Plan
    traced: TracedStep  # a micro-batch
    stages: Sequence[int]  # the stage of each of its module calls
    sent: Sequence[float]  # bytes from each stage to the next, in forward
    update_s: float | None  # the optimizer on a rank's share of all parameters; None: as Adam's
    units: dict[int, dict[str, ParameterSizes]]  # stage -> unit -> its parameters; "": those in no unit
    buffers: ParameterSizes
    host: HostPrices
    runtime: RuntimeCosts
    hides: bool = False  # collectives of the data axis run beside backward
    source: str = ""
    exchanges: Sequence[PricedExchange] = ()  # of the context axis and the expert axis
    spread: float = 1.0  # the share of the parameters that a rank has where experts are spread
    swap_rate: float = 1e9  # bytes per second that are swapped
    compressed: Mapping[int, CompressedGradients] = field(default_factory=dict)  # stage -> what it sends
    slow: Sequence[float] = ()  # of each rank of the pipeline, its compute beside its host's; (): once
    update_operators: int = ADAM_OPERATORS  # of it
    hosts: Sequence[int] = ()  # of each rank; (): all are on one
    starts: StageStarts = WHOLE_MODEL  # where stages begin, and what they run of a recorded program

    def moves(self) -> Iterator[tuple[TracedMove, PricedCollective]]:
        """The collectives of the tensor axis in a micro-batch, priced."""
        plan, members = self.plan, self.host.groups.slowest(self.plan.tensor, 1)
        regathers = plan.sequence and not plan.recompute
        for move in self.traced.moves:
            if move.phase != "regather" or regathers:
                nbytes = move.nbytes / plan.context
                taken = self.host.collectives.seconds(move.collective, members, nbytes)
                yield move, PricedCollective(move.collective, "tensor", len(members), nbytes, 1.0, taken)


@dataclass
class HostPricing:
    """Prices of the jobs that one predictor is asked about; each is made once."""

    _compute: ComputeCalibration
    _machine: MachineCalibration
    _hardware: Sequence[Hardware]  # of each host, whose links count in place of the machine's
    _own_device: bool  # each rank computes on a device of its own
    _trial: ModelTrial | None  # of the model, if it is tried
    _trace: Callable[[int], Sequence[TracedOperator]]  # the operators of a step of so many rows
    _known: dict[tuple[tuple[int, ...], str], HostPrices] = field(default_factory=dict)
    _overheads: dict[int, dict[str, float]] = field(default_factory=dict)

    def of(self, hosts: tuple[int, ...], plan: Plan, *, cut: bool) -> HostPrices:
        """Prices on such hosts, under a plan that may have ranks wait for each other within a step.

        Args:
            cut: the tensor axis cuts some module, so that its ranks wait.
        """
        kind = "cut_scale" if cut else "stage_scale" if plan.pipeline > 1 else "scale"
        if (hosts, kind) not in self._known:
            here = 1 if self._own_device else max(map(hosts.count, hosts))
            costs, factor, crowd = self._compute.of(here)
            shared = self._compute.together(here)
            collectives, reductions = (
                LinkCosts(self._hardware, hosts)
                if self._hardware
                else CollectiveCosts(self._machine, hosts, turn_s)
                for turn_s in (shared.turn_s, 0.0)
            )
            operators = OperatorPrices(costs, factor * getattr(shared, kind), self._overhead(here))
            groups = RankGroups(hosts, reductions, [id(each) for each in self._hardware])
            self._known[hosts, kind] = HostPrices(collectives, reductions, operators, crowd, shared, groups)
        return self._known[hosts, kind]

    def swap_rate(self, plan: Plan) -> float:
        """Bytes per second between a rank and where it swaps, on the slowest of the hosts.

        Raises:
            ValueError: the plan swaps, and a hardware file says nothing about its host.
        """
        silent = [each.name for each in self._hardware if each.host is None]
        if plan.swap is not None and silent:
            raise UnfitError(f"swap={plan.swap!r}: the file of {silent[0]} has no [host] with a rate")
        rates = [each.host.bytes_per_s for each in self._hardware if each.host is not None]
        return min(rates, default=self._machine.copy.memory)

    def _overhead(self, here: int) -> dict[str, float]:
        """What the model's own Python adds to an operator, by phase, with so many ranks on a host."""
        if self._trial is None:
            return {}
        threads = max(1, self._compute.cores // here)
        if threads not in self._overheads:
            costs, factor, _ = self._compute.of(here)
            self._overheads[threads] = self._trial.overhead(
                self._trace, OperatorPrices(costs, factor), threads
            )
        return self._overheads[threads]


def source_of(compute: ComputeCalibration, hardware: Sequence[Hardware], *, own_device: bool) -> str:
    """Where the costs of operators are from, that were given."""
    if hardware:
        return f"a roofline of {names_of(hardware)}"
    if not own_device:
        return "given"
    measured = all(each.launch_s is not None for each in compute.settings)
    return "measured on this device" if measured else "a roofline of this device"


def names_of(hardware: Sequence[Hardware]) -> str:
    """Each name once."""
    return " and ".join(dict.fromkeys(each.name for each in hardware))


# ---- the model's own Python ----

LIMIT_BYTES = 100 << 20
"""Of parameters: a larger model has steps whose operators take most."""

MOST_SECONDS = 0.005
"""Of a forward: fewer rows are tried where it would take more."""

WARM, ROUNDS = 2, 5
PHASES = ("forward", "backward", "update")


class ModelTrial:
    """What can be tried of a model.

    Args:
        task: whose model and batch have values, on the CPU. Without an optimizer no update is tried.
        output: of the model -> what the loss takes.
    Attributes:
        problem: why the model did not run; "": it did.
    """

    def __init__(self, task: TrainingTask, output: Callable[[Any], Any]) -> None:
        self._task, self._output = task, output
        self.problem = ""

    def overhead(
        self, trace: Callable[[int], Sequence[TracedOperator]], prices: OperatorPrices, threads: int
    ) -> dict[str, float]:
        """Seconds of an operator beside its price, by phase, also less; {}: the model does not run so.

        Args:
            trace: the operators of a step of so many rows.  threads: with which these prices were measured.
        """
        rows = self._task.rows
        while (said := _priced(trace(rows), prices))["forward"][0] > MOST_SECONDS and rows > 1:
            rows //= 2
        took = self._passes(rows, threads)
        if took is None:
            return {}
        return {
            phase: (measured - said[phase][0]) / max(1, said[phase][1])
            for phase, measured in zip(PHASES, took, strict=True)
        }

    @generators_kept([torch.default_generator])
    @pythons_generators_kept()
    def _passes(self, rows: int, threads: int) -> tuple[float, ...] | None:
        """The least seconds of each phase of a copy's steps; None: it does not run.

        Generators of random numbers have their state again after it.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(min(threads, before))
        alone = torch.get_num_threads() == 1  # then other ranks may wait on this core
        clock = time.thread_time if alone else time.perf_counter
        try:
            task = self._task
            model, loss = model_copy((task.model, task.loss or own_loss))
            trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
            made: Any = [] if task.optimizer is None else task.optimizer(Parameters(trained))
            optimizers = made if isinstance(made, (list, tuple)) else [made]
            parameters = [*trained.values()]
            inputs, targets = two(cut_rows(task.sample, 0, rows), own_loss=task.own_loss)
            found = []

            def forward() -> torch.Tensor:
                value = loss(self._output(call(model, inputs)), targets)
                scalar: torch.Tensor = value[0] if isinstance(value, tuple) else value
                return scalar

            with torch.enable_grad():
                for _ in range(WARM + ROUNDS):
                    found.append(phase_seconds(forward, parameters, optimizers, clock))
                    model.zero_grad()
        except Exception as error:  # noqa: BLE001  no plan depends on it; where it trains, it comes again
            self.problem = f"{type(error).__name__}: {error}"
            return None
        finally:
            torch.set_num_threads(before)
        return tuple(min(column) for column in zip(*found[WARM:], strict=True))


def phase_seconds(
    forward: Callable[[], torch.Tensor], parameters: Sequence[nn.Parameter], optimizers: Sequence[Any],
    clock: Callable[[], float],
) -> tuple[float, float, float]:  # fmt: skip
    """Of a step: the model with its loss, the gradients of these parameters, and the update."""
    began = clock()
    value = forward()
    ran = clock()
    value.backward(inputs=parameters)  # type: ignore[no-untyped-call]  # not those that the loss may have
    back = clock()
    for each in optimizers:
        each.step()
    return ran - began, back - ran, clock() - back


def should_try(model: nn.Module, batch: Any) -> bool:
    """Whether the model is small, and it and the batch have values on the CPU."""
    held = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    plain = all(type(v) in (torch.Tensor, nn.Parameter) and v.device.type == "cpu" for v in held)
    return plain and sum(v.nbytes for v in held) < LIMIT_BYTES


def _priced(operators: Sequence[TracedOperator], prices: OperatorPrices) -> dict[str, tuple[float, int]]:
    """Of each phase: the seconds of its operators, and how many they are."""
    every = {phase: [each for each in operators if each.phase == phase] for phase in PHASES}
    return {phase: (sum(map(prices.seconds, each)), len(each)) for phase, each in every.items()}
