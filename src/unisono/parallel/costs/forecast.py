"""What a step is said to take, before it runs: seconds by cause, and bytes. Plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CAUSES", "StepForecast"]

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
