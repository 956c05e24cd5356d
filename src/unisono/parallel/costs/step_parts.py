"""What is needed to price a step under a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from unisono.planner.compute_calibration import SharedSteps

from .rank_groups import RankGroups
from .stage_starts import StageStarts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from unisono.parallel.plan import Plan
    from unisono.planner.compute_calibration import RuntimeCosts

    from .compressed_gradients import CompressedGradients
    from .exchanges import PricedExchange
    from .hardware_prices import Collectives
    from .operator_prices import OperatorPrices
    from .trace import TracedStep

__all__ = ["ADAM_OPERATORS", "ParameterSizes", "StepParts"]

ADAM_OPERATORS = 12
ALONE = SharedSteps(1)  # nobody trains beside it
WHOLE_MODEL = StageStarts()
ON_ONE_HOST = RankGroups()


class ParameterSizes(NamedTuple):
    """Parameters of one unit on one rank: how many are trained, their elements, and the same of frozen ones.

    Frozen ones are gathered, too; they have no gradients and no updates.
    """

    number: int = 0
    elements: int = 0
    frozen: int = 0
    frozen_elements: int = 0

    def plus(self, elements: int, *, trained: bool) -> ParameterSizes:
        """With one more."""
        if trained:
            return self._replace(number=self.number + 1, elements=self.elements + elements)
        return self._replace(frozen=self.frozen + 1, frozen_elements=self.frozen_elements + elements)

    @property
    def whole(self) -> ParameterSizes:
        """As if all were trained: what is gathered."""
        return ParameterSizes(self.number + self.frozen, self.elements + self.frozen_elements)


@dataclass
class StepParts:
    """What is needed to price a plan.

    Attributes:
        traced: a micro-batch.
        stages: the stage of each of its module calls.  sent: bytes from each stage to the next, in forward.
        update_s: the optimizer on a rank's share of all parameters; None: as Adam's.
        update_operators: of it.
        units: stage -> unit -> its parameters. "" is the unit of all that is in no other.
        collectives: what ranks wait for within a step, as those of the tensor axis.  reductions: those of the
            data axis, whose units and steps have their turns in `shared`; and messages.
        crowd: ranks of a host per core, at least 1.  hosts: of each rank; (): all are on one.
        hides: collectives of the data axis run beside backward.
        exchanges: of the context axis and the expert axis.
        spread: the share of the parameters that a rank has where experts are spread.
        swap_rate: bytes per second that are swapped.
        shared: what ranks that train together take beside the sum of their costs.
        compressed: stage -> what it sends of its gradients; empty: whole gradients.
        starts: where stages begin, and what they run of a recorded program.
        groups: which group of an axis a step waits for.
        slow: of each rank of the pipeline, its seconds of compute beside those of `prices`; (): once.
    """

    plan: Plan
    traced: TracedStep
    stages: Sequence[int]
    sent: Sequence[float]
    update_s: float | None
    units: dict[int, dict[str, ParameterSizes]]
    buffers: ParameterSizes
    prices: OperatorPrices
    runtime: RuntimeCosts
    collectives: Collectives
    reductions: Collectives
    crowd: float = 1.0
    hides: bool = False
    source: str = ""
    exchanges: Sequence[PricedExchange] = ()
    spread: float = 1.0
    swap_rate: float = 1e9
    shared: SharedSteps = ALONE
    compressed: Mapping[int, CompressedGradients] = field(default_factory=dict)
    slow: Sequence[float] = ()
    update_operators: int = ADAM_OPERATORS
    hosts: Sequence[int] = ()
    starts: StageStarts = WHOLE_MODEL
    groups: RankGroups = ON_ONE_HOST
