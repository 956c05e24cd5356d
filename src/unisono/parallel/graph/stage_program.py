"""What each stage of a pipeline runs: calls of modules as they are, and operators between them.

    stage 0   wte, wpe, add, h.0, h.1          sends the hidden values
    stage 1   h.2, h.3, ln_f, view, lm_head    receives them, returns the result

A module that spans stages is open: what it does by itself runs operator by operator, with the shapes of the
recording. All others are called. What follows from inputs and buffers alone, such as a mask, is computed in
every stage that needs it; all other values travel from stage to stage as far as they are needed.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from .noted_call import CHECKS
from .program import Frame, Graph, Node, refs, writes_of
from .rules import DRAWS
from .stage_choice import LIMIT_VALUES, StageError, StageStart, closed_because, place_of

__all__ = ["Item", "Stage", "StageProgram"]


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
        places: the operators with which they begin.
        stages: one after the other.
        surely_used: values that have a gradient if the loss takes any tensor of the result. Others may have
            none: a module takes them for nothing, or for one of several tensors.
        unused: names of parameters that no stage needs.
        open: modules (paths) that span stages.
        written: memory that some operator writes in place.
    Raises:
        StageError: the program cannot be cut there.
    """

    def __init__(
        self, graph: Graph, model: nn.Module, starts: Sequence[StageStart], *, operators: bool = False
    ) -> None:
        self.graph, self.starts = graph, list(starts)
        self.written = {graph.values[before].storage for node in graph.nodes for before, _ in writes_of(node)}
        self.places = [place_of(graph, start) for start in starts]
        if self.places != sorted(set(self.places)):
            raise StageError(f"{graph.model} calls the modules with which stages begin in another order")
        names = {id(value): name for name, value in reversed([*model.named_parameters()])}
        self._held = {
            path: frozenset(names[id(value)] for value in module.parameters())
            for path, module in model.named_modules(remove_duplicate=False)
        }
        self._open = {
            frame.number
            for frame in graph.frames
            if operators or any(frame.first < place < frame.last for place in self.places)
        }
        while leaks := self._build():
            self._open |= leaks
        self.open = frozenset(graph.frames[number].path for number in self._open)
        for number in () if operators else sorted(self._open):
            frame = graph.frames[number]
            if why := closed_because(graph, frame):
                raise StageError(
                    f'"{frame.path}" ({frame.kind}) would run in two stages, and cannot: {why}. Write '
                    "pieces=[...]"
                )
        for item in self._items:
            for storage in item.writes:
                line = graph.nodes[item.first].line
                if graph.values[storage].kind == "input":
                    raise StageError(f"{graph.model} writes into its input, which every stage has, at {line}")
                if graph.values[storage].kind == "constant" and item.frame is None:
                    raise StageError(f"{graph.model} writes into a tensor that is not its own, at {line}")
        self.stages = self._cut()
        self.surely_used = self._surely_used()
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
            self._items.append(self._operator(node) if call is None else self._call(graph.frames[call]))
            at = at + 1 if call is None else graph.frames[call].last
        self._bind()
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

    def _operator(self, node: Node) -> Item:
        values = self.graph.values
        given = [ref.value for ref in refs((node.args, node.named))]
        reads = frozenset(
            number for number in given if values[number].node >= 0 or values[number].kind == "input"
        )
        parameters = frozenset(values[number].name for number in given if values[number].kind == "parameter")
        writes = frozenset(values[before].storage for before, _ in writes_of(node))
        makes = tuple(number for number in node.outputs if number is not None)
        free = not parameters and node.name not in DRAWS and not self._writes_state(writes)
        return Item(node.number, None, node, reads, makes, [], writes, parameters, free)

    def _call(self, frame: Frame) -> Item:
        graph, values = self.graph, self.graph.values
        nodes = graph.nodes[frame.first : frame.last]
        inside = {number for node in nodes for number in node.outputs}
        reads, writes, parameters, renames = set(frame.inputs), set(), set(self._held[frame.path]), []
        known: dict[int, int] = {}  # value after writes -> the value outside that is this tensor
        free = True
        for node in nodes:
            for ref in refs((node.args, node.named)):
                value = values[ref.value]
                if value.kind == "parameter":
                    parameters.add(value.name)
                elif ref.value not in inside and value.kind in ("input", "operator"):
                    reads.add(ref.value)
            for before, after in writes_of(node):
                writes.add(values[before].storage)
                source = known.get(before, before if before not in inside else None)
                if source is not None and after != before:
                    known[after] = source
                    renames.append((source, after))
            free = free and node.name not in DRAWS
        reads = {number for number in reads if values[number].kind in ("input", "operator")}
        makes = dict.fromkeys([*frame.outputs, *(after for _, after in renames)])
        free = free and not parameters and not self._writes_state(writes)
        return Item(
            frame.first, frame, None, frozenset(reads), tuple(n for n in makes if n in inside), renames,
            frozenset(writes), frozenset(parameters), free,
        )  # fmt: skip

    def _writes_state(self, storages: Iterator[int] | set[int] | frozenset[int]) -> bool:
        return any(self.graph.values[storage].kind in ("buffer", "parameter") for storage in storages)

    def _bind(self) -> None:
        """What depends on a value that is not free is not free, nor is what shares memory with one."""
        values = self.graph.values
        while True:
            bound = {number for item in self._items if not item.free for number in item.makes}
            storages = {values[number].storage for number in bound}
            storages |= {storage for item in self._items if not item.free for storage in item.writes}
            moved = False
            for item in self._items:
                mine = {values[number].storage for number in item.makes} | item.writes
                if item.free and (item.reads & bound or mine & storages):
                    item.free, moved = False, True
            if not moved:
                return

    # ---- stages ----

    def _cut(self) -> list[Stage]:
        graph, values = self.graph, self.graph.values
        bounds = [0, *self.places, len(graph.nodes)]
        needed = {number for number in graph.outputs if self._travels(number)}
        stages: list[Stage] = []
        written: set[int] = set()  # memory that is written in this stage or a later one
        for stage in reversed(range(len(bounds) - 1)):
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

    def _surely_used(self) -> frozenset[int]:
        values = self.graph.values
        results = [number for number in self.graph.outputs if values[number].differentiable]
        used = [self._used_for(number) for number in dict.fromkeys(results)]
        return frozenset[int]().union(*used[:1]).intersection(*used[1:])

    def _used_for(self, result: int) -> set[int]:
        """Values from which a tensor of the result follows, by operators that pass gradients on."""
        values = self.graph.values
        used, storages = {result}, {values[result].storage}
        for node in reversed(self.graph.nodes):
            given = {ref.value for ref in refs((node.args, node.named))}
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
            state = self._writes_state(item.writes)
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
            if not calls & set(node.frames) and not free & {node.number, *self._firsts(node)}:
                raise StageError(
                    f'{self.graph.model} keeps a tensor in "{attribute}", at {node.line}. In a pipeline the '
                    "loss "
                    "would not see it: return it from the model"
                )

    def _firsts(self, node: Node) -> list[int]:
        return [self.graph.frames[number].first for number in node.frames]

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
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    @functools.cached_property
    def digest(self) -> str:
        """What all ranks must have alike, as a short text."""
        graph = self.graph
        flat = [
            (node.name, [graph.values[n].shape for n in node.outputs if n is not None])
            for node in graph.nodes
        ]
        told = repr((flat, [(stage.comes, stage.goes) for stage in self.stages]))
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
