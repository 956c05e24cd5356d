"""Where the stages of a pipeline begin: at calls of modules where few bytes flow, so that stages cost alike.

A stage is everything that the program does from one such call to the next. What a module that spans two
stages does by itself runs operator by operator; the modules within it are called as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from unisono.errors import UnfitError

from .containers import strange_in
from .noted_call import ModuleOp
from .program import HOOKS, Frame, Graph, Node, Ref, refs, writes_of
from .rules import DRAWS

__all__ = [
    "LIMIT_VALUES",
    "StageError",
    "StageStart",
    "choose_starts",
    "closed_because",
    "free_nodes",
    "place_of",
]

LIMIT_VALUES = 64  # that one message carries
FLOPS_PER_BYTE = 10.0  # what a byte between stages costs
PLACES = 200  # that are compared


class StageError(UnfitError):
    """A program cannot be cut into stages; the text names the module and says what to write."""


class StageStart(NamedTuple):
    """A stage begins where the module at `path` is called for the call-th time, from 0."""

    path: str
    call: int


def closed_because(graph: Graph, frame: Frame) -> str:
    """Why the program of this module cannot run operator by operator; empty: it can."""
    inside = [node for node in graph.nodes[frame.first : frame.last] if node.frames[-1] == frame.number]
    if frame.number in graph.own_backward.values():
        return "it runs a torch.autograd.Function of its own"
    if any(name.rpartition(".")[0] == frame.path for name in graph.rebound):
        return "it puts other tensors in place of its buffers"
    if any(call.function in HOOKS and call.frame == frame.number for call in graph.calls):
        return "it registers a hook on a tensor while it runs"
    for node in inside:
        if isinstance(node.op, ModuleOp):
            return f"it is one operator of the program, at {node.line}"
        if node.name == "aten.as_strided":
            return f"as_strided depends on strides, at {node.line}"
        if any(_is_buffer(graph, given) for given, _ in writes_of(node)):
            return f"it writes into a buffer, at {node.line}"
        strange = next(strange_in((node.args, node.named), Ref), None)
        if strange is not None:
            return f"{node.name} takes a {type(strange).__name__}, at {node.line}"
        for ref in refs((node.args, node.named)):
            if graph.values[ref.value].kind == "constant" and graph.constants.get(ref.value) is None:
                return (
                    f"{node.name} takes a tensor that is neither the model's nor written down, at {node.line}"
                )
    for child in graph.frames[frame.number + 1 : frame.number + 1 + frame.inside]:
        if child.level == frame.level + 1:
            strange = next(strange_in(child.arguments, Ref), None)
            if strange is not None:
                return f'it gives "{child.path}" a {type(strange).__name__}'
            if child.autocast:
                return f'it calls "{child.path}" under autocast'
    return ""


def _is_buffer(graph: Graph, number: int) -> bool:
    return graph.values[graph.values[number].storage].kind in ("buffer", "parameter")


def free_nodes(graph: Graph) -> set[int]:
    """Operators whose results follow from inputs, buffers and constants alone: any stage can compute them."""
    bound: set[int] = set()  # values that do not
    found: set[int] = set()
    for node in graph.nodes:
        given = [ref.value for ref in refs((node.args, node.named))]
        writes = [before for before, _ in writes_of(node)]
        if (
            any(number in bound or graph.values[number].kind == "parameter" for number in given)
            or node.name in DRAWS
            or any(_is_buffer(graph, number) for number in writes)
        ):
            bound.update(number for number in node.outputs if number is not None)
        else:
            found.add(node.number)
    storages = {graph.values[number].storage for number in bound}
    values = graph.values
    while True:  # what shares memory with a bound value is bound
        lost = {
            number
            for number in found
            if any(out is not None and values[out].storage in storages for out in graph.nodes[number].outputs)
            or any(ref.value in bound for ref in refs((graph.nodes[number].args, graph.nodes[number].named)))
        }
        if not lost:
            return found
        found -= lost
        outputs = {out for number in lost for out in graph.nodes[number].outputs if out is not None}
        bound |= outputs
        storages |= {values[out].storage for out in outputs}


class _CrossingValues:
    """What crosses each place of a program: bytes, values, and whether memory that is written later does."""

    def __init__(self, graph: Graph) -> None:
        size = len(graph.nodes) + 1
        self.bytes, self.values, self.broken = [0] * (size + 1), [0] * (size + 1), [False] * (size + 1)
        free = free_nodes(graph)
        last = self._last_uses(graph, free)
        written: dict[int, int] = {}
        for node in graph.nodes:
            for before, _ in writes_of(node):
                written[graph.values[before].storage] = node.number
        crossing: dict[int, list[tuple[int, int]]] = {}
        for number, stop in last.items():
            value = graph.values[number]
            begin = value.node + 1
            self.bytes[begin] += value.nbytes
            self.bytes[stop + 1] -= value.nbytes
            self.values[begin] += 1
            self.values[stop + 1] -= 1
            if value.storage in written:
                crossing.setdefault(value.storage, []).append((begin, stop))
        self.bytes, self.values = [*itertools.accumulate(self.bytes)], [*itertools.accumulate(self.values)]
        for storage, spans in crossing.items():
            for (a, b), (c, d) in itertools.combinations(sorted(spans), 2):
                self._break(max(a, c), min(b, d, written[storage]))

    def _break(self, first: int, last: int) -> None:
        for place in range(first, last + 1):
            self.broken[place] = True

    @staticmethod
    def _last_uses(graph: Graph, free: set[int]) -> dict[int, int]:
        """Value that an operator made, and that is not free -> the last operator that takes it."""
        found: dict[int, int] = {}
        for node in graph.nodes:
            if node.number not in free:
                found.update((ref.value, node.number) for ref in refs((node.args, node.named)))
        found |= dict.fromkeys(graph.outputs, len(graph.nodes))
        made = {out for node in graph.nodes if node.number not in free for out in node.outputs}
        return {number: last for number, last in found.items() if number in made}


def choose_starts(graph: Graph, stages: int) -> list[StageStart]:
    """Choose where all stages but the first begin.

    Raises:
        StageError: the program has too few places where a stage can begin.
    """
    flow, reasons = _CrossingValues(graph), dict[int, str]()
    places: dict[int, StageStart] = {}
    calls: dict[str, int] = {}
    for frame in graph.frames:
        call = calls.setdefault(frame.path, 0)
        calls[frame.path] += 1
        place = frame.first
        if not 0 < place < frame.last or place in places or flow.broken[place]:
            continue
        around = [graph.frames[number] for number in graph.nodes[place].frames]
        spanning = [outer for outer in around if outer.first < place]
        for outer in spanning:
            if outer.number not in reasons:
                reasons[outer.number] = closed_because(graph, outer)
        if not any(reasons[outer.number] for outer in spanning) and flow.values[place] <= LIMIT_VALUES:
            places[place] = StageStart(frame.path, call)
    if len(places) < stages - 1:
        said = dict.fromkeys(
            f'"{graph.frames[at].path}" stays whole: {why}' for at, why in reasons.items() if why
        )
        raise StageError(
            f"pipeline: {graph.model} has {len(places)} places where a stage can begin, too few for {stages} "
            f"stages{'. ' if said else ''}{'; '.join([*said][:3])}. Take fewer stages, or write pieces=[...]"
        )
    return [places[place] for place in _balanced(graph, flow, sorted(places), stages)]


def _balanced(graph: Graph, flow: _CrossingValues, places: list[int], stages: int) -> list[int]:
    """The places whose dearest stage is cheapest; of those that cost alike, the ones with fewest bytes."""
    costs = [0.0, *itertools.accumulate(map(_cost, _nodes(graph)))]
    total = costs[-1] or 1.0
    if len(places) > PLACES:
        step = total / PLACES
        best: dict[int, int] = {}
        for place in places:
            at = int(costs[place] / step)
            if at not in best or flow.bytes[place] < flow.bytes[best[at]]:
                best[at] = place
        places = [*best.values()] if len(best) >= stages - 1 else places
    bounds = [0, *places, len(graph.nodes)]
    sent = [0.0, *(FLOPS_PER_BYTE * flow.bytes[place] for place in places), 0.0]
    # of the stages so far that end at a bound: (their dearest cost, bytes), the bound before
    here = {0: ((0.0, 0.0), [0])}
    for _ in range(stages - 1):
        found: dict[int, tuple[tuple[float, float], list[int]]] = {}
        for end in range(1, len(bounds) - 1):
            for begin, (so_far, way) in here.items():
                if begin < end:
                    cost = costs[bounds[end]] - costs[bounds[begin]] + sent[begin] + sent[end]
                    key = max(so_far[0], cost), so_far[1] + sent[end]
                    if end not in found or key < found[end][0]:
                        found[end] = key, [*way, end]
        here = found
    last = len(bounds) - 1

    def whole(item: tuple[int, tuple[tuple[float, float], list[int]]]) -> tuple[float, float]:
        begin, (so_far, _) = item
        return max(so_far[0], costs[-1] - costs[bounds[begin]] + sent[begin] + sent[last]), so_far[1]

    _, (_, way) = min(here.items(), key=whole)
    return [bounds[at] for at in way[1:]]


def _nodes(graph: Graph) -> Iterator[tuple[Graph, Node]]:
    return ((graph, node) for node in graph.nodes)


def _cost(pair: tuple[Graph, Node]) -> float:
    graph, node = pair
    made = sum(graph.values[number].nbytes for number in node.outputs if number is not None)
    return node.flops + made


def place_of(graph: Graph, start: StageStart) -> int:
    """The operator with which a stage begins in this program.

    Raises:
        StageError: the program does not call the module so often.
    """
    found = [frame for frame in graph.frames if frame.path == start.path]
    if start.call >= len(found) or found[start.call].first >= found[start.call].last:
        raise StageError(
            f'a stage begins where {graph.model} calls "{start.path}" for the {start.call + 1}. time, and '
            "this "
            "batch runs another program, which does not. Write parallelize(..., sample=inputs of a batch)"
        )
    return found[start.call].first
