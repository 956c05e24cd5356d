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
