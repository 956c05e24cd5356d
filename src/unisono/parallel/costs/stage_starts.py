"""Where the stages of a pipeline begin in a traced step."""

from __future__ import annotations

import bisect
from typing import NamedTuple

from unisono.errors import UnfitError
from unisono.parallel.graph.stage_program import StageProgram

from .trace import ModuleCall, TracedStep

__all__ = ["StageStarts"]


class StageStarts(NamedTuple):
    """Where the stages of a pipeline begin.

    Args:
        starts: (path, which call of it) of each stage but the first.
        sent: bytes of a row that go from each stage to the next; (): the first module's inputs.
        opened: modules that span several stages.
        items: that each stage runs of a recorded program; (): stages are pieces.
        repeated: of the operators of each stage, those that an earlier one runs too, such as masks.
    """

    starts: tuple[tuple[str, int], ...] = ()
    sent: tuple[float, ...] = ()
    opened: frozenset[str] = frozenset()
    items: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()

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
