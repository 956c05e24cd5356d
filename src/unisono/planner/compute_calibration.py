"""What this machine takes for the operators of training: kept beside the calibration of the engine, and read.

A file is of one machine and one version of PyTorch. Where it is missing, damaged or of another one, the
roofline counts; it is never an error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from unisono.engine.costs.machine import cache_file, complaint, identity, read_figures, recall, write_figures
from unisono.engine.environment.env import Settings
from unisono.planner.operator_costs import OperatorCosts, roofline

VERSION = 9
"""Of the file's format."""

MOST_BYTES = 1 << 22
MOST_TIMES = 9
"""Measurements that are kept."""


class RuntimeCosts(msgspec.Struct, frozen=True):
    """What the runtime of parallel training adds to the operators. Seconds on one of the ranks."""

    step_s: float = 1e-4  # a step, on one rank alone
    agree_s: float = 1.5e-4  # more, where ranks agree on the loss
    micro_s: float = 1e-4  # a micro-batch
    parameter_s: float = 6e-6  # a parameter in a bucket of gradients (zero=0)
    bucket_s: float = 8e-5  # a bucket
    unit_s: float = 5e-4  # a unit that is gathered, reduced and resharded once, under zero 1 to 3
    unit_parameter_s: float = 0.0  # more for each of its parameters
    low_parameter_s: float = 0.0  # the same in 16 bits
    passed_s: float = 0.0  # a unit, in a micro-batch that neither gathers nor reduces it
    unit_byte_s: float = 4e-10  # more for each of its bytes: copies into and out of new memory
    recompute_s: float = 1.5e-4  # a unit that backward computes again
    message_s: float = 8e-5  # a message between stages, at one end
    move_s: float = 5e-5  # a collective of the tensor axis


SIGNED = ("sharded_s", "alone_s", "low_parameter_s")
"""Of `SharedSteps`: what may be less than 0, where the sum of costs is too much."""


class SharedSteps(msgspec.Struct, frozen=True):
    """What training together takes beside the sum of its costs, as steps of reference models show it."""

    ranks: int  # of a host, which trained
    scale: float = 1.0  # of operators under plans whose ranks meet at the end of a step
    cut_scale: float = 1.0  # the same where they wait for each other at each operator, under tensor
    stage_scale: float = 1.0  # the same under a pipeline
    step_s: float = 0.0  # seconds more of a step
    sharded_s: float = 0.0  # the same where data ranks share parameters; it may be less than 0
    alone_s: float = 0.0  # the same where no data ranks meet; it may be less than 0
    again_s: float = 0.0  # of each operator that backward computes again and autograd follows
    split_s: float = 0.0  # of each module with weights, in each of the two passes of a split backward
    turn_s: float = 0.0  # of each collective within a step, as those of the tensor axis
    message_s: float = 0.0  # of each end of a message between stages
    replay_s: float = 0.0  # of each operator of forward that runs from a recorded program, as under `context`
    low_parameter_s: float = 0.0  # of each parameter of a gathered unit in 16 bits; it may be less than 0

    def towards(self, other: SharedSteps, ranks: int) -> SharedSteps:
        """For so many ranks, on the line through both: with each rank more, all wait for one more."""
        share = (ranks - self.ranks) / (other.ranks - self.ranks)
        found = {name: getattr(self, name) for name in self.__struct_fields__ if name.endswith("_s")}
        for name, here in found.items():
            least = -1.0 if name in SIGNED else 0.0
            found[name] = max(least, here + share * (getattr(other, name) - here))
        return msgspec.structs.replace(self, ranks=ranks, **found)

    @property
    def sane(self) -> bool:
        """Whether its numbers are those of some machine."""
        seconds = {name: getattr(self, name) for name in self.__struct_fields__ if name.endswith("_s")}
        return (
            self.ranks >= 1
            and all(0.1 < each < 10 for each in (self.scale, self.cut_scale, self.stage_scale))
            and all((-1 if name in SIGNED else 0) <= each < 1 for name, each in seconds.items())
        )


class Measurement(msgspec.Struct, frozen=True):
    """The machine at one time. See `ComputeCalibration`."""

    settings: tuple[OperatorCosts, ...]
    runtime: RuntimeCosts
    shared: tuple[SharedSteps, ...]


_Figures = TypeVar("_Figures", SharedSteps, Measurement)


def middle(measured: Sequence[_Figures]) -> _Figures:
    """The median of each number."""
    return msgspec.convert(_middle([msgspec.to_builtins(each) for each in measured]), type(measured[0]))


def _middle(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _middle([each[key] for each in values]) for key in first}
    if isinstance(first, (list, tuple)):
        return [_middle(column) for column in zip(*values, strict=True)]
    same = all(each == first for each in values)
    return first if same else statistics.median(values)


class ComputeCalibration(msgspec.Struct, frozen=True):
    """A machine in training."""

    machine: str  # which one, see `engine.costs.machine.identity`; "" where nothing was measured
    torch: str  # the version of PyTorch that was measured
    measured: str  # when
    cores: int  # that processes may use
    settings: tuple[OperatorCosts, ...]  # one for each number of ranks that shared the cores, fewest first
    runtime: RuntimeCosts = RuntimeCosts()
    shared: tuple[SharedSteps, ...] = ()  # the same for steps; (): not measured
    # All measurements, oldest first, of which `settings`, `runtime` and `shared` are the medians.
    times: tuple[Measurement, ...] = ()
    version: int = VERSION

    @property
    def sane(self) -> bool:
        """Whether its numbers are those of some machine."""
        parts = bool(self.settings) and all(each.sane for each in self.settings)
        parts = parts and all(each.sane for each in self.shared)
        runtime = msgspec.structs.astuple(self.runtime)
        return self.cores >= 1 and parts and all(0 <= each < 10 for each in runtime)

    @property
    def measured_here(self) -> bool:
        """Whether these are measured numbers."""
        return bool(self.machine)

    def with_time(self, found: Measurement) -> ComputeCalibration:
        """The same with one measurement more."""
        times = (*self.times, found)[-MOST_TIMES:]
        now = middle(times)
        return msgspec.structs.replace(
            self, settings=now.settings, runtime=now.runtime, shared=now.shared, times=times
        )

    def of(self, ranks: int) -> tuple[OperatorCosts, float, float]:
        """What operators take while `ranks` of a host compute: (costs of the nearest setting, factor, crowd).

        Returns:
            factor: for a rank that has other threads than the setting.
            crowd: ranks per core where they are more, at least 1: so many times a rank's own seconds pass.
        """
        threads = max(1, self.cores // ranks)
        nearest = min(self.settings, key=lambda each: (abs(each.threads - threads), abs(each.ranks - ranks)))
        return nearest, nearest.threads / threads, max(1.0, ranks / self.cores)

    def together(self, ranks: int) -> SharedSteps:
        """What steps of `ranks` of a host take beside their costs; a rank alone waits for nobody.

        Between measured numbers of ranks, and beyond them, seconds are on a line; fewer ranks pay as the
        fewest that were measured, which had a core each.
        """
        if ranks == 1 or not self.shared:
            return SharedSteps(ranks)
        nearest, *others = sorted(self.shared, key=lambda each: abs(math.log(each.ranks / ranks)))
        fewest = min(each.ranks for each in self.shared)
        return nearest.towards(others[0], ranks) if others and ranks > fewest else nearest


_decode = msgspec.json.Decoder(ComputeCalibration).decode


class LoadedCompute(msgspec.Struct, frozen=True):
    """A calibration and where it comes from; `note` says why a file was ignored."""

    calibration: ComputeCalibration
    source: str
    note: str = ""


def compute_file(settings: Settings, torch: str) -> Path | None:
    """Where the figures of this machine and version are kept; None: UNISONO_CALIBRATION=none.

    Raises:
        OSError: this user has no home directory.
    """
    file = cache_file(settings)
    return None if file is None else file.with_name(f"compute-{torch}-{file.name}")


def recall_compute(settings: Settings, torch: str) -> LoadedCompute:
    """The figures of this machine: from the file, otherwise the roofline. Never raises."""
    note = ""
    try:
        file = compute_file(settings, torch)
        found = None
        if file is not None:
            found, note = read_figures(file, _decode, MOST_BYTES)
        if found is not None:
            ours = (found.version, found.machine, found.torch) == (VERSION, identity(), torch)
            note = complaint(str(file), ours=ours, sane=found.sane)
            if not note:
                return LoadedCompute(found, str(file))
    except OSError as error:
        note = str(error)
    machine = recall(settings).calibration
    every = tuple(roofline(machine, ranks) for ranks in sorted({1, machine.cores}))
    return LoadedCompute(ComputeCalibration("", torch, "", machine.cores, every), "a roofline", note)


def keep_compute(calibration: ComputeCalibration, file: Path) -> None:
    """Write the figures atomically, readable by this user only.

    Raises:
        OSError: they cannot be written.
    """
    write_figures(msgspec.json.encode(calibration), file)
