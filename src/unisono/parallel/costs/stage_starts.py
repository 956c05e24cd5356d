"""Where the stages of a pipeline begin in a traced step."""

from __future__ import annotations

import bisect
from typing import NamedTuple

from .traced_step import ModuleCall, TracedStep

__all__ = ["StageStarts"]


class StageStarts(NamedTuple):
    """Where the stages of a pipeline begin.

    Args:
        starts: (path, which call of it) of each stage but the first.
        sent: bytes of a row that go from each stage to the next; (): the first module's inputs.
        opened: modules that span several stages.
    """

    starts: tuple[tuple[str, int], ...] = ()
    sent: tuple[float, ...] = ()
    opened: frozenset[str] = frozenset()

    def of(self, traced: TracedStep, rows: int) -> tuple[list[int], list[float]]:
        """The stage of each module call, and the bytes from each stage to the next.

        Raises:
            ValueError: a stage begins at a module that a forward does not call.
        """
        first, sent = [], []
        for path, count in self.starts:
            found = next((n for n, call in enumerate(traced.calls) if _begins(call, path, count)), None)
            if found is None:
                raise ValueError(f'StepPredictor: a stage begins at "{path}", which a forward does not call')
            first.append(found)
            sent.append(float(traced.calls[found].nbytes))
        stages = [bisect.bisect_right(first, number) for number in range(len(traced.calls))]
        return stages, [each * rows for each in self.sent] or sent


def _begins(call: ModuleCall, path: str, count: int) -> bool:
    return call.number == count and (call.path == path or call.path.startswith(f"{path}."))
