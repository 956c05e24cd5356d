"""The seconds of a step under a plan, by cause: a traced micro-batch, priced.

On a CPU nothing hides: the ranks fill the cores, so a collective takes its time from compute. With more ranks
than cores a step takes what all ranks compute, shared by the cores. On a GPU collectives of the data axis run
beside backward. In a pipeline each rank runs the actions of its schedule in order, and waits for messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unisono.parallel.pipeline.schedule import Action, Schedule, StageMessage
from unisono.parallel.prediction import proved_schedule
from unisono.parallel.replicated_parameters import BUCKET_BYTES

from .compressed_gradients import exchange_s
from .exchanges import FEW_BYTES, ROUTED
from .forecast import StepForecast
from .rank_clock import DataWork, RankClock, mean_of
from .shared_cores import MOST_ACTIONS, ActionWork, shared_time
from .stage_time import StageTime
from .step_parts import ADAM_OPERATORS, StepParts
from .traced_step import NO_UNIT

if TYPE_CHECKING:
    from .step_parts import ParameterSizes

__all__ = ["step_forecast"]

ROUNDING = 1e-9  # of a sum in another order
CERTAIN = 0.97  # of what other stages take at least: small tensors and units may be cut in other numbers

HIDDEN = 0.5
"""The share of backward during which a GPU's collectives of the data axis run."""

UNIT_LAUNCHES, SAVED_LAUNCHES = 4, 4
"""What the host of a GPU does, in the time of so many operators: for each parameter that a unit gathers or
reduces, and for each operator whose inputs recomputation drops. Source: a profile of H100 hosts,
benchmarks/results/2026-11-26-gpu.md.
"""

KEPT = ("product", "batched", "convolution", "attention")
"""Classes whose results recompute="selective" keeps."""


def step_forecast(parts: StepParts) -> StepForecast:
    """Price a step."""
    return _StepPricer(parts).forecast()


class _StepPricer:
    def __init__(self, parts: StepParts) -> None:
        self._parts, self._plan, self._runtime = parts, parts.plan, parts.runtime
        self._width = 4 if parts.plan.precision == "f32" else 2
        self._reduce_width = 4 if parts.plan.reduce == "f32" else self._width
        self._stages = [StageTime() for _ in range(parts.plan.stages)]
        self._price_micro_batch()

    # ---- one micro-batch ----

    def _price_micro_batch(self) -> None:
        selective, share = self._plan.recompute == "selective", 1 / self._plan.context
        replayed_s = self._parts.shared.replay_s if self._plan.context > 1 else 0.0
        seconds, shared = self._parts.prices.seconds, self._parts.shared
        for operator in self._parts.traced.operators:
            stage = self._stage_of(operator.call)
            taken = seconds(operator, share) + replayed_s * (operator.phase == "forward")
            host = self._parts.prices.host(operator)
            stage.followed += operator.followed
            if operator.phase == "backward":
                stage.backward += taken
                stage.host_backward += host
                continue
            stage.forward += taken
            stage.host_forward += host
            if operator.unit and not (selective and operator.size.kind in KEPT):
                stage.units[operator.unit] += taken + shared.again_s * operator.followed
                saved = SAVED_LAUNCHES * (operator.followed and bool(operator.size.kind))
                stage.host_units += host + self._parts.prices.launch(saved)
        regathers = self._plan.sequence and not self._plan.recompute
        for move in self._parts.traced.moves:
            if move.phase == "regather" and not regathers:
                continue
            stage = self._stage_of(move.call)
            taken = self._parts.collectives.seconds(
                move.collective, self._members("tensor"), move.nbytes * share
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

    def _stage_of(self, call: int) -> StageTime:
        return self._stages[self._parts.stages[call] if call >= 0 else 0]

    def _members(self, axis: str) -> list[int]:
        """The ranks of rank 0's group of an axis: tensor is the fastest, then shard, replica, pipeline."""
        plan, shards = self._plan, self._shards
        size, stride = {
            "tensor": (plan.tensor, 1),
            "shard": (shards, plan.tensor),
            "replica": (plan.copies // shards, plan.tensor * shards),
            "copies": (plan.copies, plan.tensor),
        }[axis]
        return [place * stride for place in range(size)]

    @property
    def _shards(self) -> int:
        """Ranks that share what data ranks share: those of the context axis do, too."""
        return self._plan.shards * self._plan.context if self._plan.zero else 1

    # ---- parameters ----

    def _hooked(self, size: ParameterSizes) -> float:
        """Seconds of the host to gather or to reduce a unit, which is half of what a unit takes."""
        runtime = self._runtime
        each_s = runtime.unit_parameter_s if self._plan.precision == "f32" else runtime.low_parameter_s
        taken = runtime.unit_s + max(0.0, each_s + self._parts.shared.unit_parameter_s) * size.number
        return taken / 2 + self._parts.prices.launch(UNIT_LAUNCHES * size.number)

    def _passed(self, stage: int) -> float:
        """Seconds of the host for the units of a stage in one pass that neither gathers nor reduces them."""
        units = self._parts.units.get(stage, {}) if self._sharded else {}
        return self._runtime.passed_s / 2 * len(units)

    def _copied(self, nbytes: float) -> float:
        """The copies of it."""
        light, per_byte = self._parts.prices.light, self._runtime.unit_byte_s
        return light(2 * nbytes) if self._parts.prices.queued else per_byte / 2 * nbytes

    def _gathered(self, stage: int, *, again: bool = False) -> DataWork:
        """Seconds to gather all units of a stage once.

        Args:
            again: for backward, which begins right after the forward of a root where there is one stage.
        """
        host = compute = communication = 0.0
        for unit, size in self._parts.units.get(stage, {}).items():
            if again and unit == NO_UNIT and self._plan.pipeline == 1:
                continue
            nbytes = size.elements * self._width
            host += self._hooked(size)
            compute += self._copied(nbytes)
            communication += self._parts.reductions.seconds("all_gather", self._members("shard"), nbytes)
        return DataWork(compute, communication, host)

    def _reduced(self, stage: int) -> DataWork:
        """Seconds to reduce all gradients of a stage once."""
        if self._plan.zero == 0 and self._plan.precision == "f32":
            return self._replicas_reduced(stage)
        axis = "shard" if self._plan.zero else "replica"
        what = "reduce_scatter" if self._plan.zero else "all_reduce"
        host = compute = communication = 0.0
        for size in self._parts.units.get(stage, {}).values():
            nbytes = size.elements * self._reduce_width
            host += self._hooked(size)
            compute += self._copied(nbytes)
            if self._plan.zero or self._plan.local_steps is None:
                communication += self._parts.reductions.seconds(what, self._members(axis), nbytes)
            if self._plan.zero and self._plan.copies > self._shards and self._plan.local_steps is None:
                part = nbytes / self._shards
                communication += self._parts.reductions.seconds("all_reduce", self._members("replica"), part)
        return DataWork(compute, communication, host)

    def _replicas_reduced(self, stage: int) -> DataWork:
        if self._plan.copies == 1 or self._plan.local_steps is not None:
            return DataWork()
        sizes = self._parts.units.get(stage, {}).values()
        nbytes = 4 * sum(size.elements for size in sizes)
        whole, rest = divmod(nbytes, BUCKET_BYTES)
        compute = self._parts.prices.light(2 * nbytes)
        host = self._runtime.parameter_s * sum(size.number for size in sizes)
        if self._parts.compressed:
            coding, communication = self._compressed(stage, "copies")
            return DataWork(compute + coding, communication, host)
        communication = 0.0
        for size in [BUCKET_BYTES] * int(whole) + [rest] * bool(rest):
            host += self._runtime.bucket_s
            communication += self._parts.reductions.seconds("all_reduce", self._members("copies"), size)
        return DataWork(compute, communication, host)

    def _compressed(self, stage: int, axis: str) -> tuple[float, float]:
        """Seconds to average the compressed gradients of a stage: coding, communication."""
        sent = self._parts.compressed[stage]
        return exchange_s(sent, self._members(axis), self._parts.reductions, self._parts.prices)

    def _met(self, stage: int) -> DataWork:
        """A step's share of a meeting of replicas."""
        elements = sum(size.elements for size in self._parts.units.get(stage, {}).values()) / self._shards
        steps = self._plan.local_steps or 1
        compute = self._parts.prices.light(9 * 4 * elements)
        if self._parts.compressed:
            coding, communication = self._compressed(stage, "replica")
            return DataWork((compute + coding) / steps, communication / steps)
        communication = self._parts.reductions.seconds("all_reduce", self._members("replica"), 4 * elements)
        return DataWork(compute / steps, communication / steps)

    def _swapped(self, stage: int) -> float:
        """Parameters are read for forward and backward, gradients written; all states are read and written.

        Source: as swap.py does it, four bytes of an element each.
        """
        elements = sum(size.elements for size in self._parts.units.get(stage, {}).values())
        parts = self._plan.micro_batches
        return 4 * elements * (2 * parts + 2 * parts - 1 + 4 + 3) / self._parts.swap_rate

    def _accumulated(self, stage: int) -> float:
        """Seconds to add the gradients of one more micro-batch."""
        elements = sum(size.elements for size in self._parts.units.get(stage, {}).values())
        width = self._width
        if self._plan.zero >= 2:
            elements, width = elements // self._shards, self._reduce_width
        return self._parts.prices.light(3 * elements * width)

    def _updated(self, stage: int) -> float:
        sizes = self._parts.units.get(stage, {}).values()
        held = sum(size.elements for size in sizes)
        every = sum(size.elements for units in self._parts.units.values() for size in units.values())
        if not held:
            return 0.0
        share, parts = held / every * self._parts.spread, 1 / self._shards
        if self._parts.update_s is None:  # as Adam: two moments
            taken = ADAM_OPERATORS * sum(
                self._parts.prices.light(10 * size.elements * parts / size.number) * size.number
                for size in sizes
            )
        else:
            taken = share * self._parts.update_s
        if self._plan.clip is not None or self._plan.precision == "fp16":
            taken += self._parts.prices.light(12 * held * parts) + self._runtime.parameter_s * sum(
                s.number for s in sizes
            )
        return taken

    def _started(self, stage: int) -> float:
        """Seconds of the host for an update that a device runs: its operators, and each parameter."""
        if not self._parts.prices.queued:
            return 0.0
        number = sum(size.number for size in self._parts.units.get(stage, {}).values())
        return self._parts.prices.launch(self._parts.update_operators) + self._runtime.parameter_s * number

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
        left = [list(order) for order in schedule.orders]
        while any(left):
            for rank, order in enumerate(left):
                while order:
                    needed = schedule.needs(order[0])
                    if needed is not None and needed not in arrived:
                        break
                    self._act(schedule, order.pop(0), ranks[rank], arrived)

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
        taken = self._parts.reductions.message(sender * stride, receiver * stride, nbytes, stride)
        rank.add("messages", taken + self._runtime.message_s + self._parts.shared.message_s)

    def _forward(self, number: int, rank: RankClock, *, first: bool) -> None:
        stage = self._stages[number]
        rank.stages.add(number)
        rank.add("fixed", 0.0, self._runtime.micro_s)
        rank.add("forward", stage.forward, stage.host_forward)
        rank.add("tensor", stage.tensor_forward)
        for exchange in stage.exchanges:
            rank.add(exchange.cause, exchange.forward_s)
        if self._plan.zero == 3 or (first and self._sharded):
            self._data(rank, self._gathered(number))
        else:
            rank.add("fixed", 0.0, self._passed(number))

    def _backward(self, action: Action, rank: RankClock) -> None:
        stage = self._stages[action.stage]
        half = 0.5 if action.kind in "IW" else 1.0
        if half < 1.0:
            rank.add("backward", self._parts.shared.split_s * stage.followed)
        again = self._plan.recompute is not False and action.kind == "B"
        rank.add("backward", stage.backward * half, stage.host_backward * half)
        rank.add("tensor", stage.tensor_backward * half + stage.tensor_units * again)
        for exchange in stage.exchanges if action.kind != "W" else ():  # gradients of inputs travel
            rank.add(exchange.cause, exchange.backward_s)
            if self._plan.recompute is True:
                rank.add(exchange.cause, exchange.forward_s)
        if again:
            rank.add("recompute", sum(stage.units.values()), stage.host_units)
            again_s = self._runtime.recompute_s * len(stage.units) + self._passed(action.stage)
            rank.add("fixed", 0.0, again_s)
        if action.kind != "I":
            count = rank.micros[action.stage] = rank.micros.get(action.stage, 0) + 1
            if count > 1:
                rank.add("backward", self._accumulated(action.stage))
            if self._plan.zero >= 2:
                self._data(rank, self._reduced(action.stage))
            elif count < self._plan.micro_batches:
                rank.add("fixed", 0.0, self._passed(action.stage))
        if action.kind == "B" and self._plan.zero == 3:
            self._data(rank, self._gathered(action.stage, again=True))

    @property
    def _sharded(self) -> bool:
        return self._plan.zero > 0 or self._plan.precision != "f32"

    def _data(self, rank: RankClock, work: DataWork) -> None:
        """Work of the data axis: copies and hooks, and the collectives."""
        rank.add("fixed", work.compute, work.host)
        if self._parts.hides:
            rank.beside += work.communication
        else:
            rank.add("data", work.communication)

    def _finish(self, schedule: Schedule, number: int, rank: RankClock) -> None:
        """What each rank does once a step."""
        fixed = self._runtime.step_s + self._runtime.agree_s * (self._plan.ranks > 1)
        shared = self._parts.shared
        more = shared.alone_s
        if self._plan.copies > 1:
            more = shared.sharded_s if self._sharded else shared.step_s
        rank.add("fixed", 0.0, max(0.0, fixed + min(0.0, more)))
        rank.add("waiting", max(0.0, more))
        for stage in (stage for stage, home in enumerate(schedule.rank_of) if home == number):
            if self._plan.zero < 2:
                self._data(rank, self._reduced(stage))
            rank.add("update", self._updated(stage), self._started(stage))
            if self._plan.local_steps is not None:
                self._data(rank, self._met(stage))
            if self._plan.swap is not None:
                rank.add("swap", self._swapped(stage))
        buffers = self._parts.buffers
        if buffers.number and self._plan.copies > 1 and self._plan.buffers == "average":
            taken = self._parts.reductions.seconds(
                "all_reduce", self._members("copies"), 4 * buffers.elements
            )
            rank.add("data", taken)
            rank.add("fixed", self._runtime.parameter_s * buffers.number)
        rank.add("data", max(0.0, rank.beside - HIDDEN * rank.parts.get("backward", 0.0)))
