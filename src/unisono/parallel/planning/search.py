"""The fastest plan of a model that fits: plans in the order of their seconds, each in a dry run."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from unisono.engine.costs.machine import recall
from unisono.engine.environment import env
from unisono.errors import UnfitError
from unisono.networks.quantities import readable_size
from unisono.parallel.axes import NAMES
from unisono.parallel.costs.forecast import StepForecast
from unisono.parallel.costs.predictor import StepPredictor
from unisono.parallel.costs.step_parts import names_of
from unisono.parallel.costs.task import TrainingTask
from unisono.parallel.experts.layers import expert_layers
from unisono.parallel.graph.capture import CaptureError
from unisono.parallel.plan import Plan
from unisono.parallel.precision import BATCH_NORM
from unisono.planner.choice import RefusedPlan, nearest_first
from unisono.planner.planner import NoPlanFitsError
from unisono.planner.search import best_first, divisors
from unisono.torch_internals.fake import is_about_data

from .candidates import RECOMPUTE, ROWS, StageCuts, changes, neighbours, plans
from .choice import ModelChoice, PlanForecast, refusal
from .dry_run import DryRun
from .machine import JobMachine
from .memory_account import MemoryPeak

SHOWN = 5  # plans beside the chosen one
MOST_TRIED = 120  # dry runs until a plan fits
CLOSE = 9  # decimals of a second: plans that agree in them are as fast
FLOOR = 0.9  # of the activations of a plan that needs less: what is expected at least
IN_PASSES = ("forward", "backward", "recomputation")
"""Phases whose peak says what a plan needs beside its state; an update has temporaries of its own."""


Found = TypeVar("Found")


class _Queued(NamedTuple):
    """A plan that waits: its seconds, or without a forecast what it takes at least."""

    seconds: float
    simplicity: tuple[Any, ...]
    number: int
    plan: Plan
    time: StepForecast | None


class PlanSearch:
    """Plans of one task on some ranks.

    Args:
        given: fields of the plan; a list has several values, which are searched.
        machine: the ranks' hosts and memory, and what operators take on their devices.
    """

    def __init__(
        self, task: TrainingTask, given: dict[str, Any], machine: JobMachine, *, trial: bool = False
    ) -> None:
        self._axes: Collection[str] = ()
        self._task, self._ranks, self._given, self._machine = task, len(machine.hosts), given, machine
        self._host = math.gcd(*Counter(machine.hosts).values())
        self._most = max(machine.memory)
        self._predictor = StepPredictor.of(
            task, hosts=machine.hosts, compute=machine.compute, own_device=machine.compute is not None,
            speeds=machine.speeds, hardware=machine.hardware, trial=trial,
        )  # fmt: skip
        self._problems: dict[Any, str] = {}  # of axes that the model does not have
        self._cuts = StageCuts(task)
        self._least_s: dict[Plan, float] = {}  # of plans with 1F1B: what no other schedule is below
        self._known: dict[Plan, PlanForecast] = {}
        self._needs: list[tuple[Plan, int]] = []  # bytes of what is not state
        self._least: tuple[int, Plan] | None = None

    def choose(self, axes: Collection[str] = ()) -> ModelChoice:
        """The fastest plan that fits. What an earlier search has found counts.

        Args:
            axes: what `plans` searches, too.
        Raises:
            NoPlanFitsError: there is none.    CaptureError: the model cannot be recorded.
        """
        self._recorded()
        self._axes = {axis for axis in axes if axis in self._given or self._has(axis)}
        queue, tried = [*self._queued()], len(self._known)
        fitting: list[PlanForecast] = []
        for entry in best_first(queue, self._priced):
            found = None if entry.time is None else self._try(entry.time, entry.plan)
            if found is not None and not found.peak.exceeded:
                fitting.append(found)
            if len(self._known) == tried + MOST_TRIED or len(fitting) > SHOWN:
                break
        if not fitting:
            raise NoPlanFitsError(self._nothing(len(queue)))
        chosen, *others = _distinct(fitting)
        return self._choice(chosen, others, self._refused(chosen), len(queue))

    def _priced(self, entry: _Queued) -> list[_Queued] | None:
        """What takes the place of a plan: its price where only a bound is known; nothing if it cannot fit."""
        if self._floor(entry.plan) > self._most:
            return []
        if entry.time is not None:
            return None
        time = self._time(entry.plan)
        return [] if time is None else [entry._replace(seconds=time.total, time=time)]

    def _recorded(self) -> None:
        """Record the model, or say how it trains without that."""
        try:
            self._task.graph(ROWS)
        except CaptureError as error:
            raised = error.__cause__ is not None and not is_about_data(error.__cause__)
            check = "Look whether the model takes the inputs of sample=. " if raised else ""
            raise CaptureError(
                f"{error}. {check}A plan is chosen only for what can be recorded. Other models train with "
                "data parallelism and ZeRO: write up.Plan(data=...)"
            ) from None

    def price(self, plan: Plan) -> ModelChoice:
        """One plan, whether it fits or not.

        Raises:
            UnfitError: it cannot run; the text says why.
        """
        staged = self._staged(plan)[0]
        found = self._dry(self._predictor.forecast(staged), staged)
        return self._choice(found, [], [], 1)

    def _choice(
        self,
        chosen: PlanForecast,
        others: list[PlanForecast],
        refused: list[RefusedPlan],
        candidates: int,
    ) -> ModelChoice:
        task, modules = self._task, self._task.model.modules()
        rows = max(1, task.batch // chosen.plan.data // chosen.plan.micro_batches)
        normed = any(isinstance(module, BATCH_NORM) and module.training for module in modules)
        links, hardware = recall(env.read()).source, self._machine.hardware
        if hardware:
            links = f"the links of {names_of(hardware)}"
        return ModelChoice(
            chosen, self._predictor.collectives(chosen.plan), others, refused, candidates,
            type(task.model).__name__, task.parameters, task.batch, len(self._known), self._predictor.source,
            links, rows if normed else 0,
        )  # fmt: skip

    # ---- candidates ----

    def _has(self, axis: str) -> bool:
        """Whether the model has such an axis: what says so is asked once for all plans."""
        task, parts = self._task, divisors(self._ranks)[1:]
        if axis == "context":
            one = next((n for n in parts if task.batch % (self._ranks // n) == 0), None)
            plan = Plan(data=self._ranks // (one or 1), context=one or 1)
            return one is None or _goes(lambda: DryRun(task, plan, self._most).peak_of(0))
        if axis == "expert":
            spread = (Plan(data=self._ranks, expert=n) for n in parts)
            return any(_goes(partial(expert_layers, task.model, None, plan)) for plan in spread)
        return True

    def _queued(self) -> Iterable[_Queued]:
        """All plans with their seconds, or with a bound where only the schedule differs from a known one."""
        number = itertools.count()
        for plan in plans(self._ranks, self._task.batch, self._given, host=self._host, axes=self._axes):
            plain = replace(plan, schedule="1f1b", stages_per_rank=None) if plan.cuts is None else plan
            for staged in self._staged(plan):
                if plain in self._least_s and plain != plan:
                    least = self._least_s[plain]
                    yield _Queued(least, _simplicity(staged), next(number), staged, None)
                    continue
                time = self._time(staged)
                if time is not None:
                    self._least_s.setdefault(plan, time.least_s)
                    yield _Queued(time.total, _simplicity(staged), next(number), staged, time)

    def _time(self, plan: Plan) -> StepForecast | None:
        """The seconds of a step; None: the model has no such axes."""
        return self._unless_refused(self._timed(plan), lambda: self._predictor.forecast(plan))

    def _unless_refused(self, axes: tuple[Any, ...], work: Callable[[], Found]) -> Found | None:
        """What `work` finds; None: plans with these axes are refused, now or before."""
        if axes in self._problems:
            return None
        try:
            return work()
        except UnfitError as error:
            self._problems[axes] = str(error)
            return None

    def _timed(self, plan: Plan) -> tuple[Any, ...]:
        """What decides whether a step can be recorded: one row may be refused, such as by a BatchNorm."""
        return self._task.batch // plan.data // plan.micro_batches == 1, plan.cuts, *_settings(plan)

    def _staged(self, plan: Plan) -> list[Plan]:
        """The plan with cuts, the best balanced first, where the model is a chain of pieces."""
        if plan.pipeline == 1 or plan.cuts is not None:
            return [plan]
        found = self._cuts.of(plan, self._machine)
        return [replace(plan, cuts=cuts) for cuts in found] or [plan]

    # ---- memory ----

    def _try(self, time: StepForecast, plan: Plan) -> PlanForecast | None:
        """A dry run; None: the plan cannot run."""
        known = self._known.get(plan)
        return known or self._unless_refused(_dried(plan), lambda: self._dry(time, plan))

    def _dry(self, time: StepForecast, plan: Plan) -> PlanForecast:
        """A dry run; it raises what speaks against it."""
        peaks = self._peaks(plan)
        stage, (peak, limit) = max(
            enumerate(peaks), key=lambda at: (at[1][0].exceeded, at[1][0].reserved / at[1][1])
        )
        if peak.place.phase in IN_PASSES:
            self._needs.append((plan, peak.parts["activations"] + peak.parts["temporary"]))
        if self._least is None or peak.reserved < self._least[0]:
            self._least = peak.reserved, plan
        found = PlanForecast(plan, time, peak, stage * (plan.ranks // plan.pipeline), limit)
        self._known[plan] = found
        return found

    def _peaks(self, plan: Plan) -> list[tuple[MemoryPeak, int]]:
        """The peak of each place of a pipeline, and its limit. What an earlier search has found counts."""
        task, found = self._task, []
        for place, (limit, _) in enumerate(self._machine.of_places(plan)):
            on_host = task.memory_type != "cuda"  # whose allocator knows no limit
            key = plan, place, None if on_host else limit
            if key not in task.peaks:
                task.peaks[key] = DryRun(task, plan, limit).peak_of(place)
            peak = task.peaks[key]
            if on_host and peak.reserved > limit:
                peak = peak._replace(exceeded=peak.reserved - limit)
            found.append((peak, limit))
        return found

    def _floor(self, plan: Plan) -> float:
        """Bytes that a plan is expected to need at least, in backward and in the update.

        In backward the activations of a leaner plan count, and gradients are not there yet.
        """
        cut = plan.tensor * plan.pipeline * plan.expert
        held, trained, moments = (0.0 if plan.swap else each / cut for each in self._task.state_bytes)
        low = 0.5 if plan.low else 1
        gathered = 0.0 if plan.zero in (0, 3) else held * low
        lean = [
            nbytes
            for other, nbytes in self._needs
            if _kept_alike(other) == _kept_alike(plan)
            and (other.zero > 0) == (plan.zero > 0)
            and other.micro_batches >= plan.micro_batches
            and RECOMPUTE.index(other.recompute) >= RECOMPUTE.index(plan.recompute)
            and plan.pipeline == 1
        ]
        share = 0.5 if plan.tensor > 1 else 1.0  # not all is cut evenly
        kept = (held + moments) / plan.sharers
        backward = share * (kept + gathered) + max(lean, default=0)
        return FLOOR * max(backward, share * (kept + low * trained / plan.sharers))

    # ---- reasons ----

    def _refused(self, chosen: PlanForecast) -> list[RefusedPlan]:
        """What is one step away. A slower one is refused by its seconds: only a faster one gets a dry run."""
        found = []
        around = neighbours(
            chosen.plan, self._ranks, self._task.batch, host=self._host, axes=self._axes, given=self._given
        )
        for plan in around:
            change, staged = changes(plan, chosen.plan), self._staged(plan)[0]
            time, other = self._time(staged), self._known.get(staged)
            slower = time is not None and time.total >= chosen.time.total
            if time is not None and other is None and not slower:
                other = self._try(time, staged)
            if time is None or (other is None and not slower):
                more = None if time is None else time.total - chosen.time.total
                missing = self._missing(staged) if time is None else 0
                found.append(RefusedPlan(change, self._why(staged), missing, more, ""))
            else:
                found.append(refusal(chosen, plan, time, other))
        return nearest_first(found)

    def _missing(self, plan: Plan) -> int:
        """Bytes that a plan without a forecast has too many; 0: it fits, or has no dry run either."""
        try:
            return max(peak.exceeded for peak, _ in self._peaks(plan))
        except UnfitError:
            return 0

    def _why(self, plan: Plan | None = None) -> str:
        keys: list[Any] = [*self._problems]
        if plan is not None:
            keys = [self._timed(plan), _dried(plan)]
        texts = [self._problems[key] for key in keys if key in self._problems]
        rows = self._task.batch
        return next(iter(texts), f"no axes with these fields divide {self._ranks} ranks and {rows} rows")

    def _nothing(self, candidates: int) -> str:
        if self._least is None and (self._problems or not candidates):
            return f"no plan of {self._ranks} ranks can run: {self._why()}"
        if self._least is None:
            return (
                f"none of {candidates} plans of {self._ranks} ranks fits into {readable_size(self._most)}: "
                "parameters, gradients and moments alone take more. Use more ranks"
            )
        least, plan = self._least
        return (
            f"none of {candidates} plans of {self._ranks} ranks fits into {readable_size(self._most)} of a "
            f"rank; the leanest that was tried, {plan}, needs {readable_size(least)}. Use more ranks, a "
            "smaller batch, or more memory"
        )


def _goes(work: Callable[[], object]) -> bool:
    """Whether something does not refuse a plan."""
    try:
        work()
    except UnfitError:
        return False
    return True


def _distinct(found: list[PlanForecast]) -> list[PlanForecast]:
    """Without plans that take the bytes and the seconds of an earlier one: they say nothing."""
    kept: dict[Any, PlanForecast] = {}
    for each in found:
        kept.setdefault((round(each.time.total, CLOSE), each.peak.reserved), each)
    return [*kept.values()]


_kept_alike = attrgetter(*NAMES, "sequence", "expert", "cuts", "precision", "keep_f32", "swap")
"""What decides, beside ZeRO, micro-batches and recomputation, how much a plan keeps for backward."""

_settings = attrgetter(
    *(name for name in NAMES if name != "data"), "schedule", "chunks", "sequence", "expert", "swap",
    "recompute", "precision", "keep_f32", "compression", "local_steps",
)  # fmt: skip
"""What decides whether a plan can run at all."""


def _dried(plan: Plan) -> tuple[Any, ...]:
    """What decides whether a dry run can be made: also what modules, types and optimizers are refused for."""
    shared = plan.copies > 1, plan.zero > 0, plan.micro_batches > 1
    return "dry run", plan.cuts, *shared, *_settings(plan)


def _simplicity(plan: Plan) -> tuple[Any, ...]:
    """Of plans that take as long, the one with less sharing and fewer axes comes first."""
    axes = plan.tensor, plan.pipeline, plan.context, plan.expert, plan.zero, plan.sequence
    return *axes, RECOMPUTE.index(plan.recompute), plan.micro_batches, plan.schedule, plan.chunks
