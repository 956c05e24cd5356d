"""The seconds of a step under a plan, by cause: a traced micro-batch, priced.

On a CPU nothing hides: the ranks fill the cores, so a collective takes its time from compute. With more ranks
than cores a step takes what all ranks compute, shared by the cores. On a GPU collectives of the data axis run
beside backward. In a pipeline each rank runs the actions of its schedule in order, and waits for messages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.parallel.pipeline.schedule import Action, Schedule, StageMessage
from unisono.parallel.prediction import proved_schedule

from . import host_starts as starts
from .exchanges import FEW_BYTES, ROUTED, PricedExchange
from .forecast import StepForecast
from .parameter_work import ParameterWork
from .rank_clock import DataWork, RankClock, mean_of
from .shared_cores import MOST_ACTIONS, ActionWork, shared_time
from .step_parts import StepParts

__all__ = ["StageTime", "step_forecast"]

ROUNDING = 1e-9  # of a sum in another order
CERTAIN = 0.97  # of what other stages take at least: small tensors and units may be cut in other numbers

HIDDEN = 0.5
"""The share of backward during which a GPU's collectives of the data axis run."""

REPLAYED, REPEATED, COMPARED = 3.4, 6.0, 4.0
"""In the time of a small operator: what a stage takes for each item of a recorded program; for each operator
that an earlier stage runs, too; and in a step for each module, whose settings are compared. Source: stages of
a GPT of nine layers with and without a program, where a small operator takes 1.05 us."""

WHOLE = ("norm_backward", "batch_norm_backward")
"""Classes that compute all gradients in each of the two passes of a split backward."""

KEPT = ("product", "batched", "convolution", "attention")
"""Classes whose results recompute="selective" keeps."""


def step_forecast(parts: StepParts) -> StepForecast:
    """Price a step."""
    return _StepPricer(parts).forecast()


class _StepPricer:
    def __init__(self, parts: StepParts) -> None:
        self._parts, self._plan, self._runtime = parts, parts.plan, parts.runtime
        self._parameters = ParameterWork(parts)
        self._stages = [StageTime() for _ in range(parts.plan.stages)]
        self._price_micro_batch()

    # ---- one micro-batch ----

    def _price_micro_batch(self) -> None:
        selective, share = self._plan.recompute == "selective", 1 / self._plan.context
        replayed_s = self._parts.shared.replay_s if self._plan.context > 1 else 0.0
        seconds, shared = self._parts.prices.seconds, self._parts.shared
        for stage in self._stages:
            stage.follow("forward", 0.0, self._parts.prices.launch(starts.BEFORE))
        for operator in self._parts.traced.operators:
            stage = self._stage_of(operator.call)
            taken = seconds(operator, share) + replayed_s * (operator.phase == "forward")
            host = self._parts.prices.host(operator)
            stage.follow(operator.phase, taken, host)
            if operator.phase == "backward":
                stage.backward += taken
                stage.norms += taken * (operator.size.kind in WHOLE)
                stage.host_backward += host
                continue
            stage.forward += taken
            stage.host_forward += host
            if operator.unit and not (selective and operator.size.kind in KEPT):
                stage.units[operator.unit] += taken + shared.again_s * operator.followed
                saved = starts.SAVED * (operator.followed and bool(operator.size.kind))
                stage.host_units += host + self._parts.prices.launch(saved)
        regathers = self._plan.sequence and not self._plan.recompute
        for move in self._parts.traced.moves:
            if move.phase == "regather" and not regathers:
                continue
            stage = self._stage_of(move.call)
            taken = self._parts.collectives.seconds(
                move.collective, self._parameters.members("tensor"), move.nbytes * share
            )
            taken += self._runtime.move_s * self._parts.crowd
            if move.phase == "forward":
                stage.tensor_forward += taken
                stage.tensor_units += taken if move.unit else 0.0
            else:
                stage.tensor_backward += taken
        routed = ROUTED * self._parts.prices.light(FEW_BYTES)
        for exchange in self._parts.exchanges:
            stage = self._stage_of(exchange.call)
            stage.exchanges.append(exchange.charged(self._runtime.move_s * self._parts.crowd))
            if exchange.cause == "experts":
                stage.forward += routed
                stage.backward += routed
        trained = {name for name, value in self._parts.traced.model.named_parameters() if value.requires_grad}
        homes = self._parts.traced.homes
        for call in {name.rpartition(".")[0]: homes[name][0] for name in trained & homes.keys()}.values():
            self._stage_of(call).weighted += 1
        for number, priced in enumerate(self._stages):
            self._add_starts(number, priced)

    def _of_program(self, number: int) -> float:
        """What a stage takes in a micro-batch because it runs a recorded program."""
        starts = self._parts.starts
        if not starts.items:
            return 0.0
        small = REPEATED * starts.repeated[number] + REPLAYED * starts.items[number]
        return small * self._parts.prices.light(FEW_BYTES)

    def _add_starts(self, number: int, stage: StageTime) -> None:
        """What the host of a GPU does for a micro-batch beside its operators."""
        launch, units = self._parts.prices.launch, self._parts.units.get(number, {}).values()
        each = starts.ADDED if self._plan.precision == "f32" else starts.LOW_ADDED
        added = each * sum(size.number for size in units) * (1 - 1 / self._plan.micro_batches)
        stage.host_forward += launch(starts.UNIT_CALLED * len(units)) if self._parameters.sharded else 0.0
        stage.host_forward += launch(starts.BEFORE)
        stage.host_backward += launch(starts.MICRO_BATCH + added)
        stage.host_units += launch(starts.AGAIN * len(stage.units))

    def _stage_of(self, call: int) -> StageTime:
        return self._stages[self._parts.stages[call] if call >= 0 else 0]

    # ---- a step ----

    def forecast(self) -> StepForecast:
        """Run the schedule on paper."""
        schedule = proved_schedule(self._plan, self._plan.micro_batches)
        crowd = self._parts.crowd
        ranks = RankClock.of(schedule, self._parts.slow, queued=self._parts.prices.queued, crowd=crowd)
        self._works: list[list[ActionWork]] = [[] for _ in ranks]
        self._run(schedule, ranks)
        for rank, time in enumerate(ranks):
            self._finish(schedule, rank, time)
        least = CERTAIN * sum(each.least for each in ranks) / len(ranks)
        if crowd > 1.0:
            seconds, span = self._shared(schedule, ranks)
        else:
            seconds = dict(max(ranks, key=lambda each: sum(each.parts.values())).parts)
            span = max(each.clock for each in ranks)
        busy = sum(seconds.values())
        left = span - busy
        seconds["waiting"] = seconds.get("waiting", 0.0) + (left if left > ROUNDING * busy else 0.0)
        return StepForecast(seconds, source=self._parts.source, least_s=least)

    def _shared(self, schedule: Schedule, ranks: Sequence[RankClock]) -> tuple[dict[str, float], float]:
        """The mean seconds by cause, and the whole step, of ranks that share cores."""
        crowd, hosts = self._parts.crowd, self._parts.hosts or (0,) * self._plan.ranks
        if sum(map(len, self._works)) > MOST_ACTIONS:  # a core works for another rank while one waits
            return mean_of([each.slowed(crowd) for each in ranks]), max(each.clock for each in ranks)
        for work, rank in zip(self._works, ranks, strict=True):
            before = [sum(column) for column in zip(*((w.compute, w.other) for w in work), strict=True)]
            compute, other = rank.spent
            work.append(ActionWork(compute - before[0], other - before[1]))  # the end of the step
        each = len(hosts) // schedule.ranks
        copies = [Counter(hosts[place * each : (place + 1) * each]) for place in range(schedule.ranks)]
        cores = max(Counter(hosts).values()) / crowd
        span, slower = shared_time(self._works, copies, cores)
        mean = mean_of([rank.slowed(factor) for rank, factor in zip(ranks, slower, strict=True)])
        return mean, span

    def _run(self, schedule: Schedule, ranks: list[RankClock]) -> None:
        arrived: dict[StageMessage, float] = {}
        for rank, action in schedule.run_order():
            self._act(schedule, action, ranks[rank], arrived)

    def _act(
        self, schedule: Schedule, action: Action, rank: RankClock, arrived: dict[StageMessage, float]
    ) -> None:
        needed, given = schedule.needs(action), schedule.gives(action)
        here, (compute, other) = schedule.rank_of[action.stage], rank.spent
        if needed is not None:
            rank.clock = max(rank.clock, arrived[needed])
            self._message(rank, schedule.rank_of[needed.stage], here, min(needed.stage, action.stage))
        if action.kind == "F":
            self._forward(action.stage, rank, first=action.stage not in rank.stages)
        else:
            self._backward(action, rank)
        if given is not None:
            message, stage = given
            self._message(rank, here, schedule.rank_of[stage], min(stage, action.stage))
            arrived[message] = rank.clock
        spent = rank.spent
        work = ActionWork(spent[0] - compute, spent[1] - other, needed, given and given[0])
        self._works[here].append(work)

    def _message(self, rank: RankClock, sender: int, receiver: int, boundary: int) -> None:
        """One end of a message over the boundary between a stage and the next."""
        if sender == receiver:
            return
        stride, sent = self._plan.ranks // self._plan.pipeline, self._parts.sent
        nbytes = sent[boundary] / self._plan.context if boundary < len(sent) else 0
        one, other = self._parts.groups.farthest(sender * stride, receiver * stride, stride)
        taken = self._parts.reductions.message(one, other, nbytes, stride)
        rank.add("messages", taken + self._runtime.message_s + self._parts.shared.message_s)

    def _forward(self, number: int, rank: RankClock, *, first: bool) -> None:
        stage = self._stages[number]
        rank.stages.add(number)
        rank.add("fixed", 0.0, self._runtime.micro_s)
        rank.add("forward", stage.forward, stage.host_forward, done=stage.done["forward"])
        rank.add("forward", 0.0, self._of_program(number), moves=True)
        rank.add("tensor", stage.tensor_forward)
        for exchange in stage.exchanges:
            rank.add(exchange.cause, exchange.forward_s)
        if self._plan.zero == 3 or (first and self._parameters.sharded):
            self._data(rank, self._parameters.gathered(number))
        else:
            rank.add("fixed", 0.0, self._parameters.passed(number))

    def _backward(self, action: Action, rank: RankClock) -> None:
        stage = self._stages[action.stage]
        half = 0.5 if action.kind in "IW" else 1.0
        if half < 1.0 and action.stage:
            rank.add("backward", self._parts.shared.split_s * stage.weighted + stage.norms / 2, moves=True)
        elif half < 1.0:  # inputs of the model have no gradients: the second pass does all
            half = float(action.kind == "W")
        again = self._plan.recompute is not False and action.kind == "B"
        done = stage.done["backward"] * half
        rank.add("backward", stage.backward * half, stage.host_backward * half, done=done)
        rank.add("tensor", stage.tensor_backward * half + stage.tensor_units * again)
        for exchange in stage.exchanges if action.kind != "W" else ():  # gradients of inputs travel
            rank.add(exchange.cause, exchange.backward_s)
            if self._plan.recompute is True:
                rank.add(exchange.cause, exchange.forward_s)
        if again:
            rank.add("recompute", sum(stage.units.values()), stage.host_units)
            again_s = self._runtime.recompute_s * len(stage.units) + self._parameters.passed(action.stage)
            rank.add("fixed", 0.0, again_s)
        if action.kind != "I":
            count = rank.micros[action.stage] = rank.micros.get(action.stage, 0) + 1
            if count > 1:
                rank.add("backward", self._parameters.accumulated(action.stage))
            if self._plan.zero >= 2:
                self._data(rank, self._parameters.reduced(action.stage))
            elif count < self._plan.micro_batches:
                rank.add("fixed", 0.0, self._parameters.passed(action.stage))
        if action.kind == "B" and self._plan.zero == 3:
            self._data(rank, self._parameters.gathered(action.stage, again=True))

    def _data(self, rank: RankClock, work: DataWork) -> None:
        """Work of the data axis: copies and hooks, and the collectives."""
        rank.add("fixed", work.compute, work.host)
        if self._parts.hides:
            rank.beside += work.communication
        else:
            rank.add("data", work.communication)

    def _finish(self, schedule: Schedule, number: int, rank: RankClock) -> None:
        """What each rank does once a step. The host reads the loss first: it waits for a device."""
        rank.host = max(rank.host, rank.clock)
        rank.add("fixed", 0.0, self._parts.prices.launch(starts.STEP))
        if self._parts.starts.items:
            modules = sum(1 for _ in self._parts.traced.model.modules())
            rank.add("fixed", 0.0, modules * COMPARED * self._parts.prices.light(FEW_BYTES))
        fixed = self._runtime.step_s + self._runtime.agree_s * (self._plan.ranks > 1)
        shared = self._parts.shared
        more = shared.alone_s
        if self._plan.copies > 1:
            more = shared.sharded_s if self._parameters.sharded else shared.step_s
        rank.add("fixed", 0.0, max(0.0, fixed + min(0.0, more)))
        rank.add("waiting", max(0.0, more))
        for stage in (stage for stage, home in enumerate(schedule.rank_of) if home == number):
            if self._plan.zero < 2:
                self._data(rank, self._parameters.reduced(stage))
            rank.add("update", self._parameters.updated(stage), self._parameters.started(stage))
            if self._plan.local_steps is not None:
                self._data(rank, self._parameters.met(stage))
            if self._plan.swap is not None:
                rank.add("swap", self._parameters.swapped(stage))
        buffers = self._parts.buffers
        if buffers.number and self._plan.copies > 1 and self._plan.buffers == "average":
            taken = self._parts.reductions.seconds(
                "all_reduce", self._parameters.members("copies"), 4 * buffers.elements
            )
            rank.add("data", taken)
            rank.add("fixed", self._runtime.parameter_s * buffers.number)
        rank.add("data", max(0.0, rank.beside - HIDDEN * rank.parts.get("backward", 0.0)))


# ---- stages ----


@dataclass
class StageTime:
    """Seconds of one micro-batch on one rank of a stage: compute, and collectives of the tensor axis.

    `host_...`: of the host, where a device computes. `weighted`: modules with weights.
    """

    weighted: int = 0
    norms: float = 0.0  # of backward: what each of two passes computes whole
    forward: float = 0.0
    backward: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0
    host_units: float = 0.0
    units: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # compute of forward, again
    tensor_forward: float = 0.0
    tensor_backward: float = 0.0
    tensor_units: float = 0.0  # in forward, within units
    exchanges: list[PricedExchange] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    done: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def follow(self, phase: str, seconds: float, host: float) -> None:
        """Note when the host has started an operator of a phase, and when an idle device has done it.

        Both count from where the phase begins. A device waits for the host at some places only.
        """
        self.started[phase] += host
        self.done[phase] = max(self.done[phase], self.started[phase]) + seconds
