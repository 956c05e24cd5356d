"""What is needed to price a step under a plan: where its stages begin, and what it costs."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from unisono.errors import UnfitError
from unisono.parallel.replicated_parameters import BUCKET_BYTES
from unisono.planner.choice_page import PricedCollective

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from unisono.codecs.codec import Codec
    from unisono.parallel.graph.stage_program import StageProgram
    from unisono.parallel.plan import Plan
    from unisono.planner.compute_calibration import RuntimeCosts, SharedSteps

    from .collectives import Collectives, PricedExchange, RankGroups
    from .operators import OperatorPrices
    from .trace import ModuleCall, TracedMove, TracedStep


class StageStarts(NamedTuple):
    """Where the stages of a pipeline begin."""

    starts: tuple[tuple[str, int], ...] = ()  # (path, which call of it) of each stage but the first
    sent: tuple[float, ...] = ()  # bytes of a row from each stage to the next; (): the first module's inputs
    opened: frozenset[str] = frozenset()  # modules that span several stages
    items: tuple[int, ...] = ()  # that each stage runs of a recorded program; (): stages are pieces
    repeated: tuple[int, ...] = ()  # operators of each stage that an earlier one runs too, such as masks

    @classmethod
    def of_program(cls, program: StageProgram, rows: int) -> StageStarts:
        """Those of a program that was recorded with so many rows."""
        values, stages = program.graph.values, program.stages
        sent = [sum(values[number].nbytes for number in stage.goes) / rows for stage in stages[:-1]]
        run: set[int] = set()
        repeated = []
        for stage in stages:
            repeated.append(sum(item.last - item.first for item in stage.items if item.first in run))
            run.update(item.first for item in stage.items)
        return cls(
            tuple((start.path, start.call) for start in program.starts), tuple(sent), program.open,
            tuple(len(stage.items) for stage in stages), tuple(repeated),
        )  # fmt: skip

    def of(self, traced: TracedStep, rows: int) -> tuple[list[int], list[float]]:
        """The stage of each module call, and the bytes from each stage to the next.

        Raises:
            ValueError: a stage begins at a module that a forward does not call.
        """
        first, sent = [], []
        for path, count in self.starts:
            found = next((n for n, call in enumerate(traced.calls) if _begins(call, path, count)), None)
            if found is None:
                raise UnfitError(f'StepPredictor: a stage begins at "{path}", which a forward does not call')
            first.append(found)
            sent.append(float(traced.calls[found].nbytes))
        stages = [bisect.bisect_right(first, number) for number in range(len(traced.calls))]
        return stages, [each * rows for each in self.sent] or sent


def _begins(call: ModuleCall, path: str, count: int) -> bool:
    return call.number == count and (call.path == path or call.path.startswith(f"{path}."))


ADAM_OPERATORS = 12
WHOLE_MODEL = StageStarts()


class HostPrices(NamedTuple):
    """What a job on some hosts pays."""

    collectives: Collectives  # what ranks wait for within a step, as those of the tensor axis
    reductions: Collectives  # of the data axis, whose turns are in `shared`; and messages
    operators: OperatorPrices
    crowd: float  # ranks of a host per core, at least 1
    shared: SharedSteps  # what ranks that train together take beside the sum of their costs
    groups: RankGroups  # which group of an axis a step waits for


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


class CompressedGradients(NamedTuple):
    """What a rank sends of the gradients of a stage."""

    exact: int  # elements in f32
    coded: Mapping[Codec, int]  # codec -> elements
    matrices: Sequence[tuple[int, int, int]]  # rows, columns and rank of those of low rank
    factors: Codec | None  # their codec; None: f32

    @property
    def buckets(self) -> int:
        """Of gradients in f32."""
        whole = self.exact + sum(self.coded.values()) + sum(n * m for n, m, _ in self.matrices)
        return max(1, -(-4 * whole // BUCKET_BYTES))


@dataclass
class StepParts:
    """What is needed to price a plan."""

    plan: Plan
    traced: TracedStep  # a micro-batch
    stages: Sequence[int]  # the stage of each of its module calls
    sent: Sequence[float]  # bytes from each stage to the next, in forward
    update_s: float | None  # the optimizer on a rank's share of all parameters; None: as Adam's
    units: dict[int, dict[str, ParameterSizes]]  # stage -> unit -> its parameters; "": those in no unit
    buffers: ParameterSizes
    host: HostPrices
    runtime: RuntimeCosts
    hides: bool = False  # collectives of the data axis run beside backward
    source: str = ""
    exchanges: Sequence[PricedExchange] = ()  # of the context axis and the expert axis
    spread: float = 1.0  # the share of the parameters that a rank has where experts are spread
    swap_rate: float = 1e9  # bytes per second that are swapped
    compressed: Mapping[int, CompressedGradients] = field(default_factory=dict)  # stage -> what it sends
    slow: Sequence[float] = ()  # of each rank of the pipeline, its compute beside its host's; (): once
    update_operators: int = ADAM_OPERATORS  # of it
    hosts: Sequence[int] = ()  # of each rank; (): all are on one
    starts: StageStarts = WHOLE_MODEL  # where stages begin, and what they run of a recorded program

    def moves(self) -> Iterator[tuple[TracedMove, PricedCollective]]:
        """The collectives of the tensor axis in a micro-batch, priced."""
        plan, members = self.plan, self.host.groups.slowest(self.plan.tensor, 1)
        regathers = plan.sequence and not plan.recompute
        for move in self.traced.moves:
            if move.phase != "regather" or regathers:
                nbytes = move.nbytes / plan.context
                taken = self.host.collectives.seconds(move.collective, members, nbytes)
                yield move, PricedCollective(move.collective, "tensor", len(members), nbytes, 1.0, taken)
