"""The seconds of a step under a plan, by cause: a traced micro-batch, priced.

On a CPU nothing hides: the ranks fill the cores, so a collective takes its time from compute. With more ranks
than cores a step takes what all ranks compute, shared by the cores. On a GPU collectives of the data axis run
beside backward. In a pipeline each rank runs the actions of its schedule in order, and waits for messages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from unisono.parallel.pipeline.schedule import Action, Schedule, StageMessage
from unisono.parallel.prediction import proved_schedule
from unisono.planner.choice_page import PricedCollective

from .collectives import FEW_BYTES, ROUTED, Collectives, PricedExchange
from .forecast import CAUSES, StepForecast
from .operators import MATRIX_KINDS, HostStarts
from .parameter_work import DataWork, ParameterWork
from .step_parts import StepParts

if TYPE_CHECKING:
    from unisono.codecs.codec import Codec

ROUNDING = 1e-9  # of sums in another order
CERTAIN = 0.97  # of what other stages take at least: small tensors and units may be cut in other numbers

HIDDEN = 0.5
"""The share of backward during which a GPU's collectives of the data axis run."""

REPLAYED, REPEATED, COMPARED = 3.4, 6.0, 4.0
"""In the time of a small operator: what a stage takes for each item of a recorded program; for each operator
that an earlier stage runs, too; and in a step for each module, whose settings are compared. Source: stages of
a GPT of nine layers with and without a program, where a small operator takes 1.05 us."""

WHOLE = ("norm_backward", "batch_norm_backward")
"""Classes that compute all gradients in each of the two passes of a split backward."""


def step_forecast(parts: StepParts) -> StepForecast:
    """Price a step."""
    return _StepPricer(parts).forecast()


class _StepPricer:
    def __init__(self, parts: StepParts) -> None:
        self._parts, self._plan, self._runtime, self._host = parts, parts.plan, parts.runtime, parts.host
        self._parameters = ParameterWork(parts)
        self._stages = [StageTime() for _ in range(parts.plan.stages)]
        self._price_micro_batch()

    # ---- one micro-batch ----

    def _price_micro_batch(self) -> None:
        selective, share = self._plan.recompute == "selective", 1 / self._plan.context
        replayed_s = self._host.shared.replay_s if self._plan.context > 1 else 0.0
        seconds, shared = self._host.operators.seconds, self._host.shared
        for stage in self._stages:
            stage.follow("forward", 0.0, self._host.operators.launch(HostStarts.BEFORE))
        for operator in self._parts.traced.operators:
            stage = self._stage_of(operator.call)
            taken = seconds(operator, share) + replayed_s * (operator.phase == "forward")
            host = self._host.operators.host(operator)
            stage.follow(operator.phase, taken, host)
            if operator.phase == "backward":
                stage.backward += taken
                stage.norms += taken * (operator.size.kind in WHOLE)
                stage.host_backward += host
                continue
            stage.forward += taken
            stage.host_forward += host
            if operator.unit and not (selective and operator.size.kind in MATRIX_KINDS):
                stage.units[operator.unit] += taken + shared.again_s * operator.followed
                saved = HostStarts.SAVED * (operator.followed and bool(operator.size.kind))
                stage.host_units += host + self._host.operators.launch(saved)
        for move, priced in self._parts.moves():
            stage = self._stage_of(move.call)
            taken = priced.seconds + self._runtime.move_s * self._host.crowd
            if move.phase == "forward":
                stage.tensor_forward += taken
                stage.tensor_units += taken if move.unit else 0.0
            else:
                stage.tensor_backward += taken
        routed = ROUTED * self._host.operators.light(FEW_BYTES)
        for exchange in self._parts.exchanges:
            stage = self._stage_of(exchange.call)
            stage.exchanges.append(exchange.charged(self._runtime.move_s * self._host.crowd))
            if exchange.cause == "experts":
                stage.forward += routed
                stage.backward += routed
        trained = {name for name, value in self._parts.traced.model.named_parameters() if value.requires_grad}
        homes = self._parts.traced.homes
        for call in {name.rpartition(".")[0]: homes[name][0] for name in trained & homes.keys()}.values():
            self._stage_of(call).weighted += 1
        for number, stage in enumerate(self._stages):
            self._add_starts(number, stage)

    def _of_program(self, number: int) -> float:
        """What a stage takes in a micro-batch because it runs a recorded program."""
        starts = self._parts.starts
        if not starts.items:
            return 0.0
        small = REPEATED * starts.repeated[number] + REPLAYED * starts.items[number]
        return small * self._host.operators.light(FEW_BYTES)

    def _add_starts(self, number: int, stage: StageTime) -> None:
        """What the host of a GPU does for a micro-batch beside its operators."""
        launch, units = self._host.operators.launch, self._parts.units.get(number, {}).values()
        each = HostStarts.ADDED if self._plan.precision == "f32" else HostStarts.LOW_ADDED
        added = each * sum(size.number for size in units) * (1 - 1 / self._plan.micro_batches)
        stage.host_forward += launch(HostStarts.UNIT_CALLED * len(units)) if self._parameters.sharded else 0.0
        stage.host_forward += launch(HostStarts.BEFORE)
        stage.host_backward += launch(HostStarts.MICRO_BATCH + added)
        stage.host_units += launch(HostStarts.AGAIN * len(stage.units))

    def _stage_of(self, call: int) -> StageTime:
        return self._stages[self._parts.stages[call] if call >= 0 else 0]

    # ---- a step ----

    def forecast(self) -> StepForecast:
        """Run the schedule on paper."""
        schedule = proved_schedule(self._plan, self._plan.micro_batches)
        crowd = self._host.crowd
        ranks = RankClock.of(schedule, self._parts.slow, queued=self._host.operators.queued, crowd=crowd)
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
        crowd, hosts = self._host.crowd, self._parts.hosts or (0,) * self._plan.ranks
        if sum(map(len, self._works)) > MOST_ACTIONS:  # a core works for another rank while one waits
            return _mean_of([each.slowed(crowd) for each in ranks]), max(each.clock for each in ranks)
        for work, rank in zip(self._works, ranks, strict=True):
            before = [sum(column) for column in zip(*((w.compute, w.other) for w in work), strict=True)]
            compute, other = rank.spent
            work.append(ActionWork(compute - before[0], other - before[1]))  # the end of the step
        each = len(hosts) // schedule.ranks
        copies = [Counter(hosts[place * each : (place + 1) * each]) for place in range(schedule.ranks)]
        cores = max(Counter(hosts).values()) / crowd
        span, slower = shared_time(self._works, copies, cores)
        mean = _mean_of([rank.slowed(factor) for rank, factor in zip(ranks, slower, strict=True)])
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
        one, other = self._host.groups.farthest(sender * stride, receiver * stride, stride)
        taken = self._host.reductions.message(one, other, nbytes, stride)
        rank.add("messages", taken + self._runtime.message_s + self._host.shared.message_s)

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
            rank.add("backward", self._host.shared.split_s * stage.weighted + stage.norms / 2, moves=True)
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
            if self._plan.reduces_early:
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
        rank.add("fixed", 0.0, self._host.operators.launch(HostStarts.STEP))
        if self._parts.starts.items:
            modules = sum(1 for _ in self._parts.traced.model.modules())
            rank.add("fixed", 0.0, modules * COMPARED * self._host.operators.light(FEW_BYTES))
        fixed = self._runtime.step_s + self._runtime.agree_s * (self._plan.ranks > 1)
        shared = self._host.shared
        more = shared.alone_s
        if self._plan.copies > 1:
            more = shared.sharded_s if self._parameters.sharded else shared.step_s
        rank.add("fixed", 0.0, max(0.0, fixed + min(0.0, more)))
        rank.add("waiting", max(0.0, more))
        for stage in (stage for stage, home in enumerate(schedule.rank_of) if home == number):
            if not self._plan.reduces_early:
                self._data(rank, self._parameters.reduced(stage))
            rank.add("update", self._parameters.updated(stage), self._parameters.started(stage))
            if self._plan.local_steps is not None:
                self._data(rank, self._parameters.met(stage))
            if self._plan.swap is not None:
                rank.add("swap", self._parameters.swapped(stage))
        buffers = self._parts.buffers
        if buffers.number and self._plan.copies > 1 and self._plan.buffers == "average":
            taken = self._host.reductions.seconds(
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


# ---- the clock of a rank ----

MOVED = ("messages", "waiting", "data")
"""Causes that depend on where the stages of a pipeline begin, and on their order."""


@dataclass
class RankClock:
    """One rank of the pipeline: its clock, and its seconds by cause."""

    clock: float = 0.0
    queued: bool = False  # the host only starts what a device runs
    host: float = 0.0  # the clock of that host
    parts: dict[str, float] = field(default_factory=dict)
    stages: set[int] = field(default_factory=set)  # that have run
    micros: dict[int, int] = field(default_factory=dict)  # stage -> gradients that it has
    beside: float = 0.0  # seconds of collectives that run beside backward
    slow: float = 1.0  # its seconds of compute beside those that are added
    fastest: float = 1.0  # the same of the rank that takes least
    least: float = 0.0  # seconds that are spent on any rank, where none is slower than the fastest one
    crowd: float = 1.0  # ranks that share a core

    @classmethod
    def of(
        cls, schedule: Schedule, slow: Sequence[float] = (), *, queued: bool = False, crowd: float = 1.0
    ) -> list[RankClock]:
        """One for each rank."""
        slow = slow or [1.0] * schedule.ranks
        return [cls(slow=each, queued=queued, fastest=min(slow), crowd=crowd) for each in slow]

    def add(
        self, cause: str, seconds: float, host: float = 0.0, *, done: float = 0.0, moves: bool = False
    ) -> None:
        """Spend time.

        Args:
            host: seconds of the host, during which a device goes on with what is queued.
            done: seconds after which a device has done it, which was idle when the host began.
            moves: they depend on where stages begin.
        """
        compute = CAUSES[cause] == "compute"
        if cause not in MOVED and not moves:
            least = seconds * self.fastest if compute else seconds
            least += 0.0 if self.queued else host
            self.least += least * self.crowd if compute else least
        seconds *= self.slow if compute else 1.0
        before, began = self.clock, self.host
        self.host += host
        if self.queued:
            self.clock = max(before + seconds, self.host, began + done)
        else:
            self.clock = before + seconds + host
        seconds = self.clock - before
        self.parts[cause] = self.parts.get(cause, 0.0) + seconds

    @property
    def spent(self) -> tuple[float, float]:
        """Seconds so far: of compute, of all else."""
        compute = sum(taken for cause, taken in self.parts.items() if CAUSES[cause] == "compute")
        return compute, sum(self.parts.values()) - compute

    def slowed(self, factor: float) -> dict[str, float]:
        """The parts where compute takes so many times as long; collectives are priced so already."""
        return {
            cause: taken * (factor if CAUSES[cause] == "compute" else 1.0)
            for cause, taken in self.parts.items()
        }


def _mean_of(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    causes = dict.fromkeys(cause for each in parts for cause in each)
    return {cause: sum(each.get(cause, 0.0) for each in parts) / len(parts) for cause in causes}


# ---- ranks that share cores ----

MOST_ACTIONS = 5000
"""Of all ranks: a longer schedule is not run here."""


class ActionWork(NamedTuple):
    """One action of a rank: it waits for a message, computes, and may send one."""

    compute: float  # seconds on a core of its own
    other: float  # seconds that do not get longer, as those of messages
    needs: Hashable = None
    gives: Hashable = None


class _Rank:
    def __init__(self, order: Sequence[ActionWork]) -> None:
        self.left = list(reversed(order))
        self.compute = self.other = 0.0  # of the action under way
        self.running = False
        self.spent = 0.0  # in compute

    def begin(self, arrived: set[Hashable]) -> None:
        if not self.running and self.left and (self.left[-1].needs is None or self.left[-1].needs in arrived):
            self.running, self.compute, self.other = True, self.left[-1].compute, self.left[-1].other

    def advance(self, seconds: float, rate: float, arrived: set[Hashable]) -> None:
        """Go on for so long; an action that ends may give its message."""
        if self.compute > 0:
            self.spent += seconds
            self.compute = _less(self.compute, seconds * rate)
        else:
            self.other = _less(self.other, seconds)
        if self.compute == self.other == 0.0:
            self.running = False
            gives = self.left.pop().gives
            if gives is not None:
                arrived.add(gives)


def _less(left: float, done: float) -> float:
    """What is left; nothing where only rounding is."""
    return 0.0 if left - done <= ROUNDING * done else left - done


def shared_time(
    orders: Sequence[Sequence[ActionWork]], copies: Sequence[Mapping[int, int]], cores: float
) -> tuple[float, list[float]]:
    """Run the orders of all ranks of a pipeline, which share cores: one that waits takes none.

    Args:
        copies: of each, host -> how many ranks of the job do the same there at the same time.
        cores: of each host.
    Returns:
        when the last rank has finished, and how many times as long each computed as on its own core.
    Example: two ranks that wait for nothing and compute a second each take two seconds on one core.
    """
    ranks, arrived, now = [_Rank(order) for order in orders], set[Hashable](), 0.0
    while True:
        for rank in ranks:
            rank.begin(arrived)
        running = [number for number, rank in enumerate(ranks) if rank.running]
        if not running:
            break
        load: Counter[int] = Counter()
        for number in running:
            if ranks[number].compute > 0:
                load.update(copies[number])
        rates = {
            number: min((min(1.0, cores / load[host]) for host in copies[number] if load[host]), default=1.0)
            for number in running
        }
        until = min(
            ranks[number].compute / rates[number] if ranks[number].compute > 0 else ranks[number].other
            for number in running
        )
        for number in running:
            ranks[number].advance(until, rates[number], arrived)
        now += until
    whole = [sum(each.compute for each in order) for order in orders]
    slower = [rank.spent / alone if alone else 1.0 for rank, alone in zip(ranks, whole, strict=True)]
    return now, slower


# ---- its collectives ----


class _LoggedCosts:
    """Prices of the data axis and of messages, and what was priced."""

    def __init__(self, costs: Collectives) -> None:
        self._costs = costs
        self.found: list[PricedCollective] = []

    def seconds(self, collective: str, members: Sequence[int], nbytes: float) -> float:
        return self._note(collective, members, nbytes, self._costs.seconds(collective, members, nbytes))

    def coded(self, members: Sequence[int], nbytes: float, codec: Codec) -> float:
        taken = self._costs.coded(members, nbytes, codec)
        return self._note(f"all_reduce in {codec.label}", members, nbytes, taken)

    def message(self, sender: int, receiver: int, nbytes: float, beside: int = 1) -> float:
        taken = self._costs.message(sender, receiver, nbytes, beside)
        return self._note("message", (sender, receiver), nbytes, taken)

    def _note(self, collective: str, members: Sequence[int], nbytes: float, taken: float) -> float:
        axis = "pipeline" if collective == "message" else "data"
        if len(members) > 1:
            self.found.append(PricedCollective(collective, axis, len(members), nbytes, 1.0, taken))
        return taken


def collective_calls(parts: StepParts) -> list[PricedCollective]:
    """The collectives and messages of a step on one rank, what takes longest first."""
    plan, costs = parts.plan, _LoggedCosts(parts.host.reductions)
    parts.host = parts.host._replace(reductions=costs)  # type: ignore[arg-type]
    step_forecast(parts)
    meetings = plan.local_steps or 1
    calls = [each.times(1.0 if each.axis == "pipeline" else 1 / meetings) for each in costs.found]
    for move, priced in parts.moves():
        again = bool(plan.recompute) and move.phase == "forward" and bool(move.unit)
        calls.append(priced.times(plan.micro_batches * (1.0 + again)))
    for exchange in parts.exchanges:
        times = plan.micro_batches * (1 + (plan.recompute is True))
        calls += [each.times(times) for each in exchange.forward]
        calls += [each.times(plan.micro_batches) for each in exchange.backward]
    alike: dict[tuple[str, str, int], list[tuple[float, ...]]] = defaultdict(list)
    for each in calls:
        alike[each[:3]].append((each.nbytes, each.calls, each.seconds))
    found = [PricedCollective(*kind, *map(sum, zip(*parts, strict=True))) for kind, parts in alike.items()]
    return sorted((each.times(1 / plan.pipeline) for each in found), key=lambda each: -each.seconds)
