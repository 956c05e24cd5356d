"""The stages of a pipeline, cut from a recorded program: where they begin, and what each one runs.

    stage 0   wte, wpe, add, h.0, h.1          sends the hidden values
    stage 1   h.2, h.3, ln_f, view, lm_head    receives them, returns the result

They begin at calls of modules where few bytes flow, so that stages cost alike. A stage is everything that the
program does from one such call to the next: calls of modules as they are, and operators between them. A
module that spans stages is open: what it does by itself runs operator by operator, with the shapes of the
recording. All others are called. What follows from inputs and buffers alone, such as a mask, is computed in
every stage that needs it; all other values travel from stage to stage as far as they are needed.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from unisono.errors import UnfitError

from .containers import mapped, strange_in, tensors_in
from .executor import ForwardCall, RunningModel, RunStep, Values, call_of, operator
from .noted_call import CHECKS, ModuleOp, left_in_parts
from .program import HOOKS, Frame, Graph, Node, Ref, columns, refs, replayed, writes_of, written_in
from .rules import DRAWS

# ---- where stages begin ----


LIMIT_VALUES = 64  # that one message carries
FLOPS_PER_BYTE = 10.0  # what a byte between stages costs
PLACES = 200  # that are compared


class StageError(UnfitError):
    """A program cannot be cut into stages; the text names the module and says what to write."""


class StageStart(NamedTuple):
    """A stage begins where the module at `path` is called for the call-th time, from 0."""

    path: str
    call: int


def _closed_because(graph: Graph, frame: Frame) -> str:
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


def _free_nodes(graph: Graph, held: Collection[int] = ()) -> set[int]:
    """Operators whose results follow from inputs, buffers and constants alone: any stage can compute them.

    Args:
        held: operators of modules with parameters, which only one stage has.
    """
    bound: set[int] = set()  # values that do not
    found: set[int] = set()
    for node in graph.nodes:
        given = node.taken
        writes = [before for before, _ in writes_of(node)]
        if (
            any(number in bound or graph.values[number].kind == "parameter" for number in given)
            or node.name in DRAWS
            or node.number in held
            or any(_is_buffer(graph, number) for number in writes)
        ):
            bound.update(number for number in node.made)
        else:
            found.add(node.number)
    storages = {graph.values[number].storage for number in bound}
    values = graph.values
    while True:  # what shares memory with a bound value is bound
        lost = {
            number
            for number in found
            if any(out is not None and values[out].storage in storages for out in graph.nodes[number].outputs)
            or not bound.isdisjoint(graph.nodes[number].taken)
        }
        if not lost:
            return found
        found -= lost
        outputs = {out for number in lost for out in graph.nodes[number].made}
        bound |= outputs
        storages |= {values[out].storage for out in outputs}


class _CrossingValues:
    """What crosses each place of a program: bytes, values, and whether memory that is written later does."""

    def __init__(self, graph: Graph) -> None:
        size = len(graph.nodes) + 1
        self.bytes, self.values, self.broken = [0] * (size + 1), [0] * (size + 1), [False] * (size + 1)
        free = _free_nodes(graph)
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
                for place in range(max(a, c), min(b, d, written[storage]) + 1):
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
                reasons[outer.number] = _closed_because(graph, outer)
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
    made = [sum(graph.values[out].nbytes for out in node.made) for node in graph.nodes]
    each = (node.flops + nbytes for node, nbytes in zip(graph.nodes, made, strict=True))
    costs = [0.0, *itertools.accumulate(map(float, each))]
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

    def cost(first: int, stop: int, _stage: int) -> tuple[float, float]:
        return costs[bounds[stop]] - costs[bounds[first]] + sent[first] + sent[stop], sent[stop]

    return [bounds[at] for at in even_cuts(len(bounds) - 1, stages, cost)]


def even_cuts(
    pieces: int, stages: int, cost: Callable[[int, int, int], tuple[float, float]]
) -> tuple[int, ...]:
    """Cut pieces into runs whose largest cost is smallest; return the first piece of each but the first.

    Args:
        cost: of pieces [first, stop) in a stage, and what is added up to choose among cuts that cost alike.
    """

    @functools.cache
    def best(first: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        if left == 1:
            return *cost(first, pieces, stages - 1), ()
        found = []
        for cut in range(first + 1, pieces - left + 2):
            (here, more), (largest, rest, cuts) = cost(first, cut, stages - left), best(cut, left - 1)
            found.append((max(here, largest), rest + more, (cut, *cuts)))
        return min(found)

    return best(0, stages)[2]


def _place_of(graph: Graph, start: StageStart) -> int:
    """The operator with which a stage begins in this program.

    Raises:
        StageError: the program does not call the module so often.
    """
    found = [frame for frame in graph.frames if frame.path == start.path]
    if start.call >= len(found) or found[start.call].first >= found[start.call].last:
        raise StageError(
            f'a stage begins where {graph.model} calls "{start.path}" for the {start.call + 1}. time, and '
            "this batch runs another program, which does not. Write parallelize(..., sample=inputs of a "
            "batch)"
        )
    return found[start.call].first


# ---- what each stage runs ----


@dataclass
class Item:
    """One call of a module, or one operator.

    Attributes:
        first: its first operator.
        frame: the call; None: it is the operator `node`.
        reads, makes: values that it takes, and that are there afterwards.
        renames: (value, value after a write in place) of what a module writes into.
        writes: memory that it writes into.
        parameters: names of those that it has.
        free: any stage can compute it.
    """

    first: int
    frame: Frame | None
    node: Node | None
    reads: frozenset[int]
    makes: tuple[int, ...]
    renames: list[tuple[int, int]] = field(default_factory=list)
    writes: frozenset[int] = frozenset()
    parameters: frozenset[str] = frozenset()
    free: bool = False

    @property
    def last(self) -> int:
        """The operator after it."""
        return self.first + 1 if self.frame is None else self.frame.last


@dataclass
class Stage:
    """One stage.

    Attributes:
        items: in order.
        comes, goes: values that it receives and sends.
        fresh: of those that come, the ones whose memory is written later.
        result: values that the model returns; on the last stage.
        returned: names of parameters among them.
    """

    items: list[Item]
    comes: list[int]
    goes: list[int]
    fresh: frozenset[int] = frozenset()
    result: frozenset[int] = frozenset()
    returned: frozenset[str] = frozenset()

    @property
    def calls(self) -> list[str]:
        """The modules (paths) that it calls."""
        return list(dict.fromkeys(item.frame.path for item in self.items if item.frame is not None))

    @property
    def parameters(self) -> set[str]:
        """Names of the parameters that it needs."""
        return {name for item in self.items for name in item.parameters} | self.returned


class StageProgram:
    """All stages of one recorded program.

    Args:
        model: of the graph, or a copy of it: its modules tell which parameters each has.
        operators: everything runs operator by operator, and no module is called.
    Attributes:
        starts: where the stages but the first begin.
        bounds: the operators with which they begin, and the end.
        stages: one after the other.
        surely_used: values that have a gradient if the loss takes any tensor of the result. Others may have
            none: a module takes them for nothing, or for one of several tensors.
        unused: names of parameters that no stage needs.
        open: modules (paths) that span stages.
        written: memory that some operator writes in place.
        ends_with_loss: the program returns the loss of the model's output.
    Raises:
        StageError: the program cannot be cut there.
    """

    ends_with_loss = False

    def __init__(
        self, graph: Graph, model: nn.Module, starts: Sequence[StageStart], *, operators: bool = False
    ) -> None:
        self.graph, self.starts = graph, list(starts)
        self.written = written_in(graph)
        places = [_place_of(graph, start) for start in starts]
        self.bounds = [0, *places, len(graph.nodes)]
        if places != sorted(set(places)):
            raise StageError(f"{graph.model} calls the modules with which stages begin in another order")
        names = {id(value): name for name, value in reversed([*model.named_parameters()])}
        self._held = {
            path: frozenset(names[id(value)] for value in module.parameters())
            for path, module in model.named_modules(remove_duplicate=False)
        }
        self._open = {
            frame.number
            for frame in graph.frames
            if operators or any(frame.first < place < frame.last for place in places)
        }
        while leaks := self._build():
            self._open |= leaks
        self.open = frozenset(graph.frames[number].path for number in self._open)
        for number in () if operators else sorted(self._open):
            frame = graph.frames[number]
            if why := _closed_because(graph, frame):
                raise StageError(
                    f'"{frame.path}" ({frame.kind}) would run in two stages, and cannot: {why}. Write '
                    "pieces=[...]"
                )
        for item in self._items:
            for storage in item.writes:
                line = graph.nodes[item.first].line
                if graph.values[storage].kind == "input" and places:
                    raise StageError(f"{graph.model} writes into its input, which every stage has, at {line}")
                if graph.values[storage].kind == "constant" and item.frame is None:
                    raise StageError(f"{graph.model} writes into a tensor that is not its own, at {line}")
        self.stages = self._cut()
        self._steps: dict[int, list[RunStep]] = {}
        results = [number for number in graph.outputs if graph.values[number].differentiable]
        used = [self._used_for(number) for number in dict.fromkeys(results)]
        self.surely_used = frozenset[int]().union(*used[:1]).intersection(*used[1:])
        self.unused = frozenset(names.values()).difference(*(stage.parameters for stage in self.stages))
        self._check_kept()

    # ---- items ----

    def _build(self) -> set[int]:
        """Make the items; return calls of modules that have to be open, because values pass them by."""
        graph = self.graph
        self._items: list[Item] = []
        at = 0
        while at < len(graph.nodes):
            node = graph.nodes[at]
            call = next((number for number in node.frames if number not in self._open), None)
            self._items.append(self._item(node, None if call is None else graph.frames[call]))
            at = self._items[-1].last
        calls = [item for item in self._items if item.frame is not None and item.parameters]
        free = _free_nodes(graph, {number for item in calls for number in range(item.first, item.last)})
        for item in self._items:
            item.free = free.issuperset(range(item.first, item.last))
        makers = {number: item for item in self._items for number in item.makes}
        leaks = set()
        for item in self._items:
            for number in item.reads:
                if number not in makers and graph.values[number].node >= 0:
                    leaks.add(self._inside(graph.values[number].node))
            if item.frame is not None and item.reads - set(item.frame.inputs):
                leaks.add(item.frame.number)  # it takes a value that is no argument
        for number in (*graph.outputs, *graph.kept):
            if number not in makers and graph.values[number].node >= 0 and number not in graph.kept:
                leaks.add(self._inside(graph.values[number].node))
        return leaks

    def _inside(self, node: int) -> int:
        return next(number for number in self.graph.nodes[node].frames if number not in self._open)

    def _item(self, node: Node, frame: Frame | None) -> Item:
        """The call of a module that begins with an operator, or the operator."""
        values, first = self.graph.values, node.number
        nodes = [node] if frame is None else self.graph.nodes[first : frame.last]
        inside = {number for node in nodes for number in node.outputs}
        reads, writes, renames = set[int](), set[int](), list[tuple[int, int]]()
        parameters, makes = set[str](), node.made
        if frame is not None:
            parameters, makes = set(self._held[frame.path]), list(frame.outputs)
            reads = {number for number in frame.inputs if values[number].kind in ("input", "operator")}
        known: dict[int, int] = {}  # value after writes -> the value outside that is this tensor
        for each in nodes:
            for ref in refs((each.args, each.named)):
                value = values[ref.value]
                if value.kind == "parameter":
                    parameters.add(value.name)
                elif ref.value not in inside and value.kind in ("input", "operator"):
                    reads.add(ref.value)
            for before, after in writes_of(each):
                writes.add(values[before].storage)
                source = known.get(before, before if before not in inside else None)
                if source is not None and after != before and frame is not None:
                    known[after] = source
                    renames.append((source, after))
        makes = [number for number in (*makes, *(after for _, after in renames)) if number in inside]
        return Item(
            first, frame, node if frame is None else None, frozenset(reads), tuple(dict.fromkeys(makes)),
            renames, frozenset(writes), frozenset(parameters),
        )  # fmt: skip

    # ---- stages ----

    def _cut(self) -> list[Stage]:
        graph, values, bounds = self.graph, self.graph.values, self.bounds
        needed = {number for number in graph.outputs if self._travels(number)}
        stages: list[Stage] = []
        written: set[int] = set()  # memory that is written in this stage or a later one
        for stage in reversed(range(len(bounds) - 1)):
            if why := left_in_parts(graph.nodes[bounds[stage] : bounds[stage + 1]], ()):
                raise StageError(f"{graph.model}, stage {stage}, to which values come whole: {why}")
            goes = [] if stage == len(bounds) - 2 else sorted(needed)
            kept, comes = self._needed(needed, bounds[stage], bounds[stage + 1])
            written |= {storage for item in kept for storage in item.writes}
            shared = [values[number].storage for number in comes if values[number].storage in written]
            if stage and (len(comes) > LIMIT_VALUES or len(set(shared)) < len(shared)):
                raise StageError(
                    f"{graph.model} cannot begin a stage at {graph.nodes[bounds[stage]].line}: it would "
                    f"receive {len(comes)} values (at most {LIMIT_VALUES}), or two views of memory that is "
                    "written later"
                )
            fresh = frozenset(number for number in comes if values[number].storage in written)
            result = frozenset(graph.outputs) if stage == len(bounds) - 2 else frozenset[int]()
            returned = frozenset(values[n].name for n in result if values[n].kind == "parameter")
            stages.insert(0, Stage(kept, sorted(comes), goes, fresh, result, returned))
            needed = comes
        if needed:
            line = graph.nodes[values[min(needed)].node].line
            raise StageError(f"{graph.model}: a value is needed before it is made, at {line}")
        return stages

    def _used_for(self, result: int) -> set[int]:
        """Values from which a tensor of the result follows, by operators that pass gradients on."""
        values = self.graph.values
        used, storages = {result}, {values[result].storage}
        for node in reversed(self.graph.nodes):
            given = {*node.taken}
            writes = any(values[before].storage in storages for before, _ in writes_of(node))
            detaches = node.name == "aten.detach" and not self.graph.taken_by_functions & given
            makes = used.intersection(node.outputs) if node.grad and not detaches else ()
            if writes or any(values[number].differentiable for number in makes):
                used |= given
                storages |= {values[number].storage for number in given}
        return used

    def _travels(self, number: int) -> bool:
        return self.graph.values[number].node >= 0

    def _needed(self, wanted: set[int], first: int, stop: int) -> tuple[list[Item], set[int]]:
        """The items that a stage runs for the values `wanted`, and the values that must come for them."""
        values = self.graph.values
        left, kept = set(wanted), list[Item]()
        storages = {values[number].storage for number in left}
        for item in reversed(self._items):
            own = not item.free and first <= item.first < stop
            if item.first >= stop or not (own or item.free):
                continue
            state = any(_is_buffer(self.graph, storage) for storage in item.writes)
            checks = item.node is not None and item.node.name in CHECKS and first <= item.first
            if (
                checks
                or left.intersection(item.makes)
                or (own and item.frame is not None)
                or state
                or item.writes & storages
            ):
                kept.insert(0, item)
                left -= set(item.makes)
                left |= {number for number in item.reads if self._travels(number)}
                storages |= {values[number].storage for number in item.reads}
        return kept, left

    def _check_kept(self) -> None:
        """What the program keeps in attributes, a loss may take: it must be on the last stage."""
        last = self.stages[-1].items
        calls = {item.frame.number for item in last if item.frame is not None}
        free = {item.first for item in self._items if item.free}
        for number, attribute in self.graph.kept.items():
            node = self.graph.nodes[self.graph.values[number].node]
            firsts = {node.number, *(self.graph.frames[at].first for at in node.frames)}
            if not calls & set(node.frames) and not free & firsts:
                raise StageError(
                    f'{self.graph.model} keeps a tensor in "{attribute}", at {node.line}. In a pipeline the '
                    "loss would not see it: return it from the model"
                )

    # ---- runs ----

    def forward(self, root: Any, number: int, came: Sequence[Tensor], inputs: Any, targets: Any) -> Any:
        """What a stage sends, or what the program returns; `root` has the stages of this rank.

        Args:
            came: from the stage before.
        """
        del targets
        return root(number, came, inputs, ForwardCall(functools.partial(self.run, number)))

    def run(
        self,
        number: int,
        model: RunningModel,
        came: Sequence[Tensor],
        inputs: Any,
        seed: int | None = None,
    ) -> Any:
        """The same, on the part of the model that has the stage."""
        here, values = self.stages[number], Values(self.graph, model, seed)
        values.update(zip(self._inputs, tensors_in(inputs), strict=True))
        values.update(zip(here.comes, came, strict=True))
        values.update((n, values[n].clone()) for n in here.fresh)
        if number not in self._steps:
            self._steps[number] = self._prepared(here, self.bounds[number : number + 2])
        values.run(self._steps[number])
        if number + 1 == len(self.stages):
            return mapped(self.graph.result, values.resolve, Ref)
        return tuple(values[n].view_as(values[n]) if n in here.comes else values[n] for n in here.goes)

    @functools.cached_property
    def _inputs(self) -> list[int]:
        return [value.number for value in self.graph.values if value.kind == "input"]

    def _prepared(self, stage: Stage, _bounds: Sequence[int]) -> list[RunStep]:
        """The steps of a stage."""
        found, last = list[RunStep](), dict[int, int]()
        last |= {number: item.first for item in stage.items for number in item.reads}
        last |= dict.fromkeys((*stage.goes, *stage.result), len(self.graph.nodes))
        for item in stage.items:
            if item.frame is None:
                node = self.graph.nodes[item.first]
                found.append(operator(node, replayed(node, self.graph, self.written)))
            else:
                found.append(call_of(item.frame, self.graph, item.renames))
            found[-1].drops = [n for n in {*item.reads, *item.makes} if last.get(n, -1) < item.last]
        return found

    def sends_unused(self, number: int) -> bool:
        """Whether a stage sends what may have no gradient."""
        values = self.graph.values
        return any(values[n].differentiable and n not in self.surely_used for n in self.stages[number].goes)

    def __str__(self) -> str:
        """A table: what each stage runs, and what it sends for the rows of the sample."""
        graph = self.graph
        sizes = {name: math.prod(graph.values[number].shape) for name, number in graph.names.items()}
        begins = ["the beginning", *(f"{start.path} (call {start.call + 1})" for start in self.starts)]
        rows = [("stage", "from", "calls", "operators", "parameters", "GFLOP", "values sent", "MB sent")]
        for number, (begin, stage) in enumerate(zip(begins, self.stages, strict=True)):
            nodes = [
                node
                for item in stage.items
                for node in ([item.node] if item.node else graph.nodes[item.first : item.last])
            ]
            held = sum(sizes.get(name, 0) for name in stage.parameters)
            sent = sum(graph.values[value].nbytes for value in stage.goes)
            rows.append(
                (
                    str(number), begin, str(sum(item.frame is not None for item in stage.items)),
                    str(sum(item.node is not None for item in stage.items)), f"{held:,}",
                    f"{sum(node.flops for node in nodes) / 1e9:.4g}", str(len(stage.goes)),
                    f"{sent / 1e6:.4g}",
                )
            )  # fmt: skip
        return columns(rows)

    @functools.cached_property
    def digest(self) -> str:
        """What all ranks must have alike, as a short text."""
        flat = [(node.name, [self._told(n) for n in node.made]) for node in self.graph.nodes]
        told = repr((flat, [(stage.comes, stage.goes) for stage in self.stages]))
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    def _told(self, number: int) -> Any:
        return self.graph.values[number].shape, self.graph.values[number].dtype
