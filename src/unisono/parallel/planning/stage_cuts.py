"""Where the stages of a chain of pieces begin: by the work of pieces, the speed of ranks and their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.parallel.pipeline.schedule import schedule
from unisono.parallel.pipeline.stages import balance

if TYPE_CHECKING:
    from unisono.parallel.graph.program import Graph
    from unisono.parallel.plan import Plan

    from .machine import JobMachine
    from .task import TrainingTask

__all__ = ["ROWS", "StageCuts"]

ROWS = 2  # of the recorded program


class PieceCosts(NamedTuple):
    """Of each piece: FLOPs and bytes of its forward, and the bytes that it makes."""

    work: list[float]
    made: list[float]


class StageCuts:
    """Cuts of the model of a task."""

    def __init__(self, task: TrainingTask) -> None:
        self._task = task
        self._pieces: PieceCosts | None = None
        self._known: dict[Any, list[tuple[int, ...]]] = {}

    def of(self, plan: Plan, machine: JobMachine) -> list[tuple[int, ...]]:
        """Cuts whose stages take alike long, and cuts that fill the memory of ranks alike; [] without pieces.

        1F1B keeps p - rank micro-batches on each of its p ranks: its first stages get fewer pieces then.
        """
        places = machine.of_places(plan)
        key = plan.pipeline, plan.schedule, plan.chunks, tuple(places)
        if key not in self._known:
            self._known[key] = self._found(plan, places)
        return self._known[key]

    def _found(self, plan: Plan, places: list[tuple[int, float]]) -> list[tuple[int, ...]]:
        pieces = self._costs()
        if len(pieces.work) < plan.stages:
            return []
        home = schedule(plan.schedule, plan.pipeline, 1, plan.chunks).rank_of
        fast = balance(pieces.work, plan.stages, [1 / places[rank][1] for rank in home])
        kept = [plan.pipeline - rank if plan.schedule == "1f1b" else 1 for rank in home]
        lean = [count / places[rank][0] for count, rank in zip(kept, home, strict=True)]
        small = balance(pieces.made, plan.stages, [each / max(lean) for each in lean])
        return [*dict.fromkeys((fast, small))]

    def _costs(self) -> PieceCosts:
        if self._pieces is None:
            task = self._task
            pieces = task.structure(task.model, task.pieces).pieces
            self._pieces = PieceCosts([], [])
            if pieces:
                self._pieces = _costs(task.graph(ROWS), task.model, pieces)
        return self._pieces


def _costs(graph: Graph, model: Any, pieces: Any) -> PieceCosts:
    paths = {module: path for path, module in model.named_modules()}
    found = PieceCosts([], [])
    for piece in pieces:
        inside = [module for module in piece.modules() if module in paths]
        tops = [paths[module] for module in inside]
        here = [frame for frame in graph.frames if frame.path in tops]
        nodes = {number for frame in here for number in range(frame.first, frame.last)}
        outputs = [n for number in nodes for n in graph.nodes[number].outputs if n is not None]
        made = sum(graph.values[n].nbytes for n in outputs)
        found.work.append(1.0 + sum(graph.nodes[number].flops for number in nodes) + made)
        found.made.append(1.0 + made)
    return found
