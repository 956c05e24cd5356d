"""What a rank does with parameters and gradients in a step, priced: units, replicas, updates, swapping."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from unisono.parallel.replicated_parameters import BUCKET_BYTES

from . import host_starts as starts
from .compressed_gradients import exchange_s
from .rank_clock import DataWork
from .step_parts import ADAM_OPERATORS, StepParts
from .traced_step import NO_UNIT

if TYPE_CHECKING:
    from .step_parts import ParameterSizes

__all__ = ["ParameterWork"]


class ParameterWork:
    """Prices of one plan. All of a stage, on one of its ranks."""

    def __init__(self, parts: StepParts) -> None:
        self._parts, self._plan, self._runtime = parts, parts.plan, parts.runtime
        self._width = 4 if parts.plan.precision == "f32" else 2
        self._reduce_width = 4 if parts.plan.reduce == "f32" else self._width

    def members(self, axis: str) -> list[int]:
        """The ranks of the slowest group of an axis: tensor is the fastest, then shard, replica, pipeline."""
        plan, shards = self._plan, self.shards
        size, stride = {
            "tensor": (plan.tensor, 1),
            "shard": (shards, plan.tensor),
            "replica": (plan.copies // shards, plan.tensor * shards),
            "copies": (plan.copies, plan.tensor),
        }[axis]
        return self._parts.groups.slowest(size, stride)

    @property
    def shards(self) -> int:
        """Ranks that share what data ranks share: those of the context axis do, too."""
        return self._plan.sharers

    def _hooked(self, size: ParameterSizes) -> float:
        """Seconds of the host to gather or to reduce a unit, which is half of what a unit takes."""
        runtime = self._runtime
        each_s = runtime.unit_parameter_s
        if self._plan.precision != "f32":
            each_s = max(0.0, runtime.low_parameter_s + self._parts.shared.low_parameter_s)
        taken = runtime.unit_s + each_s * size.number
        return taken / 2 + self._parts.prices.launch(starts.MOVED + starts.PARAMETER_MOVED * size.number)

    @cached_property
    def _in_backward(self) -> set[str]:
        """Units through which gradients go."""
        return {each.unit for each in self._parts.traced.operators if each.phase == "backward"}

    def passed(self, stage: int) -> float:
        """Seconds of the host for the units of a stage in one pass that neither gathers nor reduces them."""
        units = self._parts.units.get(stage, {}) if self.sharded else {}
        return self._runtime.passed_s / 2 * len(units)

    def _copied(self, nbytes: float) -> float:
        """The copies of it."""
        light, per_byte = self._parts.prices.light, self._runtime.unit_byte_s
        return light(2 * nbytes) if self._parts.prices.queued else per_byte / 2 * nbytes

    def gathered(self, stage: int, *, again: bool = False) -> DataWork:
        """Seconds to gather all units of a stage once.

        Args:
            again: for backward, which begins right after the forward of a root where there is one stage.
        """
        host = compute = communication = 0.0
        for unit, sizes in self._parts.units.get(stage, {}).items():
            if again and unit == NO_UNIT and self._plan.pipeline == 1:
                continue
            if again and not sizes.number and unit not in self._in_backward:
                continue
            size = sizes.whole
            nbytes = size.elements * self._width
            host += self._hooked(size)
            compute += self._copied(nbytes)
            communication += self._parts.reductions.seconds("all_gather", self.members("shard"), nbytes)
        return DataWork(compute, communication, host)

    def reduced(self, stage: int) -> DataWork:
        """Seconds to reduce all gradients of a stage once."""
        if self._plan.zero == 0 and self._plan.precision == "f32":
            return self._replicas_reduced(stage)
        axis = "shard" if self._plan.zero else "replica"
        what = "reduce_scatter" if self._plan.zero else "all_reduce"
        host = compute = communication = 0.0
        for size in self._trained(stage):
            nbytes = size.elements * self._reduce_width
            host += self._hooked(size)
            compute += self._copied(nbytes)
            if self._plan.zero or self._plan.local_steps is None:
                communication += self._parts.reductions.seconds(what, self.members(axis), nbytes)
            if self._plan.zero and self._plan.copies > self.shards and self._plan.local_steps is None:
                part = nbytes / self.shards
                communication += self._parts.reductions.seconds("all_reduce", self.members("replica"), part)
        return DataWork(compute, communication, host)

    def _replicas_reduced(self, stage: int) -> DataWork:
        if self._plan.copies == 1 or self._plan.local_steps is not None:
            return DataWork()
        sizes = self._trained(stage)
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
            communication += self._parts.reductions.seconds("all_reduce", self.members("copies"), size)
        return DataWork(compute, communication, host)

    def _compressed(self, stage: int, axis: str) -> tuple[float, float]:
        """Seconds to average the compressed gradients of a stage: coding, communication."""
        sent = self._parts.compressed[stage]
        return exchange_s(sent, self.members(axis), self._parts.reductions, self._parts.prices)

    def met(self, stage: int) -> DataWork:
        """A step's share of a meeting of replicas."""
        elements = sum(size.elements for size in self._parts.units.get(stage, {}).values()) / self.shards
        steps = self._plan.local_steps or 1
        compute = self._parts.prices.light(9 * 4 * elements)
        if self._parts.compressed:
            coding, communication = self._compressed(stage, "replica")
            return DataWork((compute + coding) / steps, communication / steps)
        communication = self._parts.reductions.seconds("all_reduce", self.members("replica"), 4 * elements)
        return DataWork(compute / steps, communication / steps)

    def swapped(self, stage: int) -> float:
        """Parameters are read for forward and backward, gradients written; all states are read and written.

        Source: as swap.py does it, four bytes of an element each.
        """
        sizes, parts = self._parts.units.get(stage, {}).values(), self._plan.micro_batches
        trained = sum(size.elements for size in sizes)
        read = 2 * parts * sum(size.whole.elements for size in sizes)
        return 4 * (read + trained * (2 * parts - 1 + 4 + 3)) / self._parts.swap_rate

    def accumulated(self, stage: int) -> float:
        """Seconds to add the gradients of one more micro-batch."""
        elements = sum(size.elements for size in self._parts.units.get(stage, {}).values())
        width = self._width
        if self._plan.zero >= 2:
            elements, width = elements // self.shards, self._reduce_width
        return self._parts.prices.light(3 * elements * width)

    def updated(self, stage: int) -> float:
        """Seconds of the optimizer on a rank's share, with what clips and scales gradients."""
        sizes = self._trained(stage)
        held = sum(size.elements for size in sizes)
        every = sum(size.elements for units in self._parts.units.values() for size in units.values())
        if not held:
            return 0.0
        share, parts = held / every * self._parts.spread, 1 / self.shards
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

    def started(self, stage: int) -> float:
        """Seconds of the host for an update that a device runs: its operators, and each parameter."""
        if not self._parts.prices.queued:
            return 0.0
        number = sum(size.number for size in self._parts.units.get(stage, {}).values())
        return self._parts.prices.launch(self._parts.update_operators) + self._runtime.parameter_s * number

    def _trained(self, stage: int) -> list[ParameterSizes]:
        """The units of a stage that have trained parameters."""
        return [size for size in self._parts.units.get(stage, {}).values() if size.number]

    @property
    def sharded(self) -> bool:
        """Whether parameters are gathered for compute, from other ranks or from another type."""
        return self._plan.zero > 0 or self._plan.precision != "f32"
