"""The fastest plan of a model that fits: plans in the order of their seconds, each in a dry run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from unisono.parallel.graph.capture import CaptureError
from unisono.parallel.graph.program import Graph
from unisono.parallel.pipeline.stages import balance
from unisono.parallel.plan import Plan
from unisono.planner.planner import NoPlanFitsError

from .candidates import changes, neighbours, plans
from .choice import ModelChoice, PlanForecast, RefusedPlan, refusal
from .dry_run import DryRun
from .memory_account import MemoryPeak
from .step_time import ModelWork, RankSpeed, StepEstimate, step_time
from .task import TrainingTask

__all__ = ["NoPlanFitsError", "PlanSearch"]

ROWS = 2  # of the recorded program
SHOWN = 4  # plans beside the chosen one
MOST_TRIED = 120  # dry runs until a plan fits
FLOOR = 0.9  # of the activations of a plan that needs less: what is expected at least
RECOMPUTED = {False: 0, "selective": 1, True: 2}


class PlanSearch:
    """Plans of one task on some ranks.

    Args:
        limit: bytes of a rank; None: any plan fits.
        fixed: fields of the plan that are given.    speed: of a rank.    told: where that comes from.
    """

    def __init__(
        self,
        task: TrainingTask,
        ranks: int,
        limit: int | None,
        fixed: dict[str, Any],
        speed: RankSpeed,
        told: str,
    ) -> None:
        self._task, self._ranks, self._limit, self._fixed = task, ranks, limit, fixed
        self._speed, self._told = speed, told
        self._problems: dict[Any, str] = {}  # of axes that the model does not have
        self._known: dict[Plan, PlanForecast] = {}
        self._needs: list[tuple[Plan, int]] = []  # bytes of what is not state
        self._work: dict[Any, ModelWork] = {}
        self._least: tuple[int, Plan] | None = None

    def choose(self) -> ModelChoice:
        """The fastest plan that fits.

        Raises:
            NoPlanFitsError: there is none.    CaptureError: the model cannot be recorded.
        """
        self._task.graph(ROWS)  # or its error
        priced = sorted(self._priced(), key=lambda pair: (pair[0].total, _simplicity(pair[1])))
        if not priced:
            raise NoPlanFitsError(f"no plan of {self._ranks} ranks can run: {self._why()}")
        fitting: list[PlanForecast] = []
        complete, tried = True, 0
        for time, plan in priced:
            if tried == MOST_TRIED or len(fitting) > SHOWN:
                complete = bool(fitting)
                break
            if self._floor(plan) > (self._limit or 1 << 62):
                continue
            found = self._try(time, plan)
            tried += 1
            if found is not None and not found.peak.exceeded:
                fitting.append(found)
        if not fitting:
            raise NoPlanFitsError(self._nothing(len(priced)))
        chosen, *others = fitting
        refused = self._refused(chosen)
        task = self._task
        return ModelChoice(
            type(task.model).__name__, task.parameters, task.batch, chosen, self._limit, others, refused,
            len(priced), len(self._known), self._told, complete,
        )  # fmt: skip

    def price(self, plan: Plan) -> ModelChoice:
        """One plan, whether it fits or not.

        Raises:
            CaptureError, ValueError: it cannot run; the text says why.
        """
        task, time = self._task, self._time(plan)
        if time is None:
            raise ValueError(f"{plan} cannot run: {self._why(plan)}")
        found = self._dry(time, self._staged(plan))
        return ModelChoice(
            type(task.model).__name__, task.parameters, task.batch, found, self._limit, [], [], 1, 1,
            self._told, True,
        )  # fmt: skip

    # ---- candidates ----

    def _priced(self) -> Iterable[tuple[StepEstimate, Plan]]:
        for plan in plans(self._ranks, self._task.batch, self._fixed, host=self._speed.host):
            time = self._time(plan)
            if time is not None:
                yield time, self._staged(plan)

    def _time(self, plan: Plan) -> StepEstimate | None:
        work = self._work_of(plan)
        return None if work is None else step_time(work, plan, self._task.batch, self._speed)

    def _work_of(self, plan: Plan) -> ModelWork | None:
        """The model in numbers; None: it has no such tensor axis."""
        key = "tensor", plan.tensor, plan.sequence
        if key not in self._work and key not in self._problems:
            try:
                self._work[key] = self._measured(plan)
            except (CaptureError, ValueError) as error:
                self._problems[key] = str(error)
        return self._work.get(key)

    def _measured(self, plan: Plan) -> ModelWork:
        task, rows = self._task, ROWS
        graph = task.graph(rows)
        cut, summed = 0.0, 0
        if plan.tensor > 1:
            found = task.cut(plan.tensor, rows, sequence=plan.sequence)
            cut = found.flops[0] / max(1, found.flops[1])
            ends = {path for path, kind in found.modules.items() if kind != "column"}
            outputs = [n for frame in graph.frames if frame.path in ends for n in frame.outputs]
            summed = sum(graph.values[number].nbytes for number in outputs) // rows
        frames = graph.frames[1:]
        sent = max((graph.values[n].nbytes for f in frames for n in f.outputs[:1] if f.level == 1), default=0)
        units = max(1, len(task.family(task.model, task.pieces).units))
        return ModelWork(
            graph.flops / rows, task.parameters, sent / rows, summed, cut, units, len(graph.nodes)
        )

    def _staged(self, plan: Plan) -> Plan:
        """The plan with its cuts, where the model is a chain of pieces."""
        if plan.pipeline == 1 or plan.cuts is not None:
            return plan
        task = self._task
        family = task.family(task.model, task.pieces)
        if not task.in_pieces(family) or len(family.pieces) < plan.stages:
            return plan
        return replace(plan, cuts=balance(_costs(task.graph(ROWS), task.model, family.pieces), plan.stages))

    # ---- memory ----

    def _try(self, time: StepEstimate, plan: Plan) -> PlanForecast | None:
        """A dry run; None: the plan cannot run."""
        if plan in self._known:
            return self._known[plan]
        axes = _axes(plan)
        if axes in self._problems:
            return None
        try:
            return self._dry(time, plan)
        except (CaptureError, ValueError) as error:
            self._problems[axes] = str(error)
            return None

    def _dry(self, time: StepEstimate, plan: Plan) -> PlanForecast:
        """A dry run; it raises what speaks against it."""
        peaks = DryRun(self._task, plan, self._limit).peaks()
        stage = max(range(len(peaks)), key=lambda at: (peaks[at].exceeded, peaks[at].reserved))
        peak = _checked(peaks[stage], self._limit)
        self._needs.append((plan, peak.parts["activations"] + peak.parts["temporary"]))
        if self._least is None or peak.reserved < self._least[0]:
            self._least = peak.reserved, plan
        found = PlanForecast(plan, time, peak, stage * (plan.ranks // plan.pipeline))
        self._known[plan] = found
        return found

    def _floor(self, plan: Plan) -> float:
        """Bytes that a plan is expected to need at least: its state, and the activations of a leaner one."""
        held = 0.0 if plan.swap else self._task.parameters * 4 / plan.tensor / plan.pipeline
        low = 1 if plan.precision == "f32" else 0.5
        state = 3 * held / plan.shards if plan.zero else 3 * held
        gathered = 0.0 if plan.zero in (0, 3) else held * low
        lean = [
            nbytes
            for other, nbytes in self._needs
            if (other.data, other.tensor, other.pipeline, other.sequence, other.cuts)
            == (plan.data, plan.tensor, plan.pipeline, plan.sequence, plan.cuts)
            and other.micro_batches >= plan.micro_batches
            and RECOMPUTED[other.recompute] >= RECOMPUTED[plan.recompute]
            and plan.pipeline == 1
        ]
        share = 0.5 if plan.tensor > 1 else 1.0  # not all is cut evenly
        return share * (state + gathered) * FLOOR + FLOOR * max(lean, default=0)

    # ---- reasons ----

    def _refused(self, chosen: PlanForecast) -> list[RefusedPlan]:
        found = []
        for plan in neighbours(chosen.plan, self._ranks, self._task.batch, host=self._speed.host):
            time, change = self._time(plan), changes(plan, chosen.plan)
            if any(name in change for name in self._fixed):
                continue
            other = None if time is None else self._try(time, self._staged(plan))
            if other is None:
                found.append(RefusedPlan(change, self._why(plan), 0, 0.0, ""))
            else:
                found.append(refusal(chosen, other))
        return sorted(found, key=lambda each: (bool(each.problem), not each.excess_bytes, each.excess_s))

    def _why(self, plan: Plan | None = None) -> str:
        keys: list[Any] = [*self._problems]
        if plan is not None:
            keys = [("tensor", plan.tensor, plan.sequence), _axes(plan)]
        texts = [self._problems[key] for key in keys if key in self._problems]
        return next(iter(texts), "no axis divides the ranks and the batch")

    def _nothing(self, candidates: int) -> str:
        if self._least is None and self._problems:
            return f"no plan of {self._ranks} ranks can run: {self._why()}"
        if self._least is None:
            return (
                f"none of {candidates} plans of {self._ranks} ranks fits into {self._limit} bytes: "
                "parameters, gradients and moments alone take more. Use more ranks"
            )
        least, plan = self._least
        return (
            f"none of {candidates} plans of {self._ranks} ranks fits into {self._limit} bytes of a rank; the "
            f"leanest that was tried, {plan}, needs {least}. Use more ranks, a smaller batch, or more memory"
        )


def _axes(plan: Plan) -> tuple[Any, ...]:
    """What decides whether a plan can run at all."""
    return "stages", plan.pipeline, plan.tensor, plan.sequence, str(plan.recompute)


def _checked(peak: MemoryPeak, limit: int | None) -> MemoryPeak:
    """A peak of the host's memory beside the limit, which its allocator does not know."""
    if limit is None or peak.exceeded or peak.reserved <= limit:
        return peak
    return peak._replace(exceeded=peak.reserved - limit)


def _simplicity(plan: Plan) -> tuple[Any, ...]:
    """Of plans that take as long, the one with less sharing and fewer axes comes first."""
    return (
        plan.tensor,
        plan.pipeline,
        plan.zero,
        plan.sequence,
        RECOMPUTED[plan.recompute],
        plan.micro_batches,
    )


def _costs(graph: Graph, model: Any, pieces: Any) -> list[float]:
    """The FLOPs of each piece in forward, and the bytes that it makes."""
    paths = {module: path for path, module in model.named_modules()}
    found = []
    for piece in pieces:
        inside = [module for module in piece.modules() if module in paths]
        tops = [paths[module] for module in inside]
        here = [frame for frame in graph.frames if frame.path in tops]
        nodes = {number for frame in here for number in range(frame.first, frame.last)}
        made = [n for number in nodes for n in graph.nodes[number].outputs if n is not None]
        work = sum(graph.nodes[number].flops for number in nodes)
        found.append(1.0 + work + sum(graph.values[n].nbytes for n in made))
    return found
