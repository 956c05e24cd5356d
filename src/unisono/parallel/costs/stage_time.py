"""Seconds of one micro-batch on one rank of a stage."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from .exchanges import PricedExchange

__all__ = ["StageTime"]


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
