"""What a step is said to take, before it runs: seconds by cause, and bytes; and a run beside it.

A difference of the first steps is told once, with its largest cause.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from unisono.parallel.profiled_step import ProfiledStep, profile_step

CAUSES = {
    "forward": "compute",
    "backward": "compute",
    "recompute": "compute",
    "update": "compute",
    "fixed": "compute",
    "tensor": "communication",
    "context": "communication",
    "experts": "communication",
    "data": "communication",
    "messages": "communication",
    "swap": "waiting",
    "waiting": "waiting",
}
"""Each cause, and how a run can tell it apart. `fixed`: the runtime beside operators and collectives."""

MOST = 1e12
"""Seconds of a cause."""


@dataclass(frozen=True)
class StepForecast:
    """A forecast of a step on the rank that has most to do.

    Attributes:
        seconds: of each of CAUSES; their sum is the step. Causes that are missing count 0.
        memory_bytes: of the fullest rank, as the device's allocator counts them; None: nothing is said.
        source: where the costs are from, such as the file of a calibration.
        least_s: with other stages or another schedule, ranks of a pipeline do not take less; 0: not known.
    Raises:
        TypeError, ValueError: an unknown cause, or a number that is none.
    Example: StepForecast({"forward": 0.1, "backward": 0.2, "data": 0.05}).total is 0.35.
    """

    seconds: Mapping[str, float]
    memory_bytes: int | None = None
    source: str = ""
    least_s: float = 0.0
    _kinds: Mapping[str, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, Mapping):
            raise TypeError(
                f"StepForecast: seconds is a {type(self.seconds).__name__}, expected a dict by cause"
            )
        found = dict.fromkeys(CAUSES.values(), 0.0)
        for name, value in self.seconds.items():
            if name not in CAUSES:
                raise ValueError(f"StepForecast: no cause {name!r}, expected one of {', '.join(CAUSES)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"StepForecast: {name} is {value!r}, expected seconds")
            if not 0 <= value <= MOST:
                raise ValueError(f"StepForecast: {name} is {value} seconds")
            found[CAUSES[name]] += value
        if not sum(found.values()) > 0:
            raise ValueError("StepForecast: a step of 0 seconds")
        memory: object = self.memory_bytes
        if memory is not None and (type(memory) is not int or memory < 1):
            raise ValueError(f"StepForecast: memory_bytes is {memory!r}, expected a number of bytes or None")
        object.__setattr__(self, "_kinds", found)

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self._kinds.values())

    @property
    def kinds(self) -> dict[str, float]:
        """Seconds of compute, communication and waiting, which a run measures."""
        return dict(self._kinds)

    def __str__(self) -> str:
        parts = sorted(self.seconds.items(), key=lambda item: -item[1])
        return f"{self.total * 1e3:.4g} ms: " + ", ".join(
            f"{name} {value * 1e3:.3g}" for name, value in parts if value
        )


# ---- the first steps of a run ----

WARM, MEASURED = 2, 5
"""Steps that are left out, as they allocate and record; and steps whose median counts."""

FAR = 0.2
"""A step or a peak of memory that differs by more than this share of the forecast is told."""


class ForecastWarning(UserWarning):
    """A run differs from the forecast of its plan."""


class ForecastCheck:
    """Times the first steps of rank 0. Where they differ from the forecast, one more step runs under the
    profiler, which tells compute from communication and from waiting for other stages.

    Args:
        forecast: what was said.
        device: of the run; "cuda" has a peak of memory.
        far: a difference of more than this share is told.
    Attributes:
        done: nothing is left to do.
    """

    def __init__(self, forecast: StepForecast, device: str, far: float = FAR) -> None:
        self._forecast, self._device, self._limit = forecast, device, far
        self._taken: list[float] = []
        self._peak_before: int | None = None  # of this process, before the first step
        self.done = False

    def step(self, train: Callable[[], float]) -> float:
        """Run a step that is a whole one; return its loss."""
        if self._peak_before is None:
            self._peak_before = self._peak()
        if len(self._taken) == WARM + MEASURED:
            loss, trace = profile_step(train)
            self._tell(trace)
            return loss
        began = time.perf_counter()
        loss = train()
        self._taken.append(time.perf_counter() - began)
        if len(self._taken) == WARM + MEASURED and not self._far:
            self._tell(None)
        return loss

    @property
    def _seconds(self) -> float:
        return statistics.median(self._taken[WARM:])

    @property
    def _far(self) -> bool:
        return abs(self._seconds / self._forecast.total - 1) > self._limit

    def _tell(self, trace: ProfiledStep | None) -> None:
        """Say what differs, if anything does."""
        self.done = True
        told = [] if trace is None else [self._about_time(trace)]
        told += self._about_memory()
        if told:
            warnings.warn("; ".join(told), ForecastWarning, stacklevel=4)

    def _about_time(self, trace: ProfiledStep) -> str:
        """Example: a step takes 41 ms, 38% more than the 30 ms of its forecast. The largest cause is ..."""
        said, took = self._forecast.total, self._seconds
        communication, waiting = trace.shares()
        found = {
            "compute": (1 - communication - waiting) * took,
            "communication": communication * took,
            "waiting": waiting * took,
        }
        kinds = self._forecast.kinds
        sign = 1 if took > said else -1
        largest = max(found, key=lambda kind: sign * (found[kind] - kinds[kind]))
        parts = ", ".join(f"{kind} {_ms(found[kind])} of {_ms(kinds[kind])}" for kind in found)
        source = f" (costs: {self._forecast.source})" if self._forecast.source else ""
        return (
            f"a step takes {_ms(took)}, {abs(took / said - 1):.0%} {'more' if sign > 0 else 'less'} than the "
            f"{_ms(said)} of its forecast{source}. The largest cause is {largest}; measured of forecast: "
            f"{parts}. Waits for slower ranks within collectives count as communication"
        )

    def _peak(self) -> int:
        """Bytes of a CUDA device that this process had at most so far; 0: there is none."""
        return torch.cuda.max_memory_allocated() if self._device == "cuda" else 0

    def _about_memory(self) -> list[str]:
        said, peak = self._forecast.memory_bytes, self._peak()
        if said is None or not peak or abs(peak / said - 1) <= self._limit:
            return []
        if peak == self._peak_before and peak > said:  # that was before the steps, whose peak is lower
            return []
        more = "more" if peak > said else "less"
        text = (
            f"memory: the peak of rank 0 is {peak / 2**20:.4g} MiB, {abs(peak / said - 1):.0%} {more} than "
            f"the {said / 2**20:.4g} MiB of the forecast"
        )
        return [text]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def check_prediction(prediction: Any, *, elastic: bool) -> None:
    """Raise TypeError or ValueError where no run can be compared with this."""
    if prediction is None:
        return
    if not isinstance(prediction, StepForecast):
        raise TypeError(
            f"parallelize: prediction is a {type(prediction).__name__}, expected a StepForecast or None"
        )
    if elastic:
        raise ValueError(
            "parallelize: prediction= is of one number of ranks, and Plan(elastic=True) changes it: leave "
            "out one of them"
        )
