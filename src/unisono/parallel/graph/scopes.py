"""Values as the modules of a program see them: what a module takes or returns may be another one inside.

    def forward(self, x):            x in "block"
        return x + self.attn(x)      x in "block.attn": the same, or gathered, or cut along the sequence

Where a tensor goes into a module or comes out of it, its forward can be given another one. A view of a value
is thus a value of one module: those of one value form a tree, whose root is where an operator made it.
"""

from __future__ import annotations

from typing import NamedTuple

from .containers import Slot
from .program import Frame, Graph, Node, refs, writes_of

Place = tuple[str, bool, Slot]  # of a module, in or out, where


class Boundary(NamedTuple):
    """Where a value goes into a call of a module (`out`: comes out of it)."""

    frame: int
    out: bool
    slots: tuple[Slot, ...]


class ScopedValue(NamedTuple):
    """A value as one module sees it."""

    number: int
    value: int
    before: int
    inside: int
    boundary: Boundary


class Scopes:
    """All values of a graph as modules see them. The number of a value is that of what its maker sees.

    Args:
        opened: modules that do not run as modules.
        layers: modules whose inputs can be moved in any case.
    Attributes:
        seen: number -> what has crossed a boundary.
        order: these and the operators, as the program comes to them.
    """

    def __init__(self, graph: Graph, opened: frozenset[str], layers: frozenset[str]) -> None:
        self.graph, self._opened, self._layers = graph, opened, layers
        self._fixed = self._unmoved()
        known = -1
        while len(self._fixed) != known:
            known = len(self._fixed)
            self._run()

    def at(self, node: Node, value: int) -> int:
        """The number of a value as an operator takes it."""
        return self._at.get((node.number, value), value)

    def outside(self, value: int) -> int:
        """The number of a value outside all modules, where the model returns it."""
        return self._here.get((value, -1), value)

    def all_of(self, value: int) -> list[int]:
        """Every number of a value."""
        return [value, *(number for number, seen in self.seen.items() if seen.value == value)]

    def group(self, boundary: Boundary) -> list[Place]:
        """What every call of a module does alike: its path, in or out, the slot."""
        path = self.graph.frames[boundary.frame].path
        return [(path, boundary.out, slot) for slot in boundary.slots]

    # ---- which boundaries there are ----

    def _unmoved(self) -> set[Place]:
        """Places that pass what they get, as they do where a module returns what it took."""
        found = set[Place]()
        written = {
            self.graph.values[given].storage: node.number
            for node in self.graph.nodes
            for given, _ in writes_of(node)
        }
        for frame in self.graph.frames:
            for out, values in ((False, frame.inputs), (True, frame.outputs)):
                if out or frame.path not in self._layers:
                    found |= {
                        (frame.path, out, slot)
                        for slot, number in zip(frame.slots[out], values, strict=True)
                        if self._passes(frame, number, written, out=out)
                    }
        return found

    def _passes(self, frame: Frame, number: int, written: dict[int, int], *, out: bool) -> bool:
        value = self.graph.values[number]
        return (
            not frame.path
            or frame.path in self._opened
            or frame.hooked
            or (frame.first, frame.last) != (frame.begin, frame.end)  # a hook sees what others see
            or not value.differentiable
            or number in (frame.inputs if out else frame.outputs)
            or written.get(value.storage, -1) >= (frame.end if out else frame.begin)
            or (out and value.node < frame.begin)
        )

    def _run(self) -> None:
        self.seen: dict[int, ScopedValue] = {}
        self.order: list[Node | ScopedValue] = []
        self._here: dict[tuple[int, int], int] = {}  # (value, call of a module) -> its number
        self._at: dict[tuple[int, int], int] = {}  # (operator, value) -> the number that it takes
        self._around: dict[int, tuple[int, ...]] = {}  # call of a module -> those around it
        frames, inside, at = self.graph.frames, list[Frame](), 0
        for frame in [*frames, None]:
            while inside and (frame is None or inside[-1].level >= frame.level):
                closed = inside.pop()
                at = self._until(at, closed.last)
                self._cross(closed, True, closed.number, inside[-1].number if inside else -1)
            at = self._until(at, len(self.graph.nodes) if frame is None else frame.first)
            if frame is not None:
                outer = inside[-1].number if inside else -1
                self._around[frame.number] = tuple(each.number for each in reversed(inside))
                inside.append(frame)
                self._cross(frame, False, outer, frame.number)

    def _until(self, at: int, stop: int) -> int:
        for node in self.graph.nodes[at:stop]:
            self.order.append(node)
            inside = node.frames[-1] if node.frames else -1
            for number in node.outputs:
                if number is not None:
                    self._here.setdefault((number, inside), number)
            for ref in refs([node.args, node.named]):
                self._at[node.number, ref.value] = self._found(ref.value, inside)
        return max(at, stop)

    def _found(self, value: int, inside: int) -> int:
        """The number of a value in a call of a module, or in the next one around it that has it."""
        chain = (inside, *self._around[inside], -1) if inside >= 0 else (-1,)
        return next((self._here[value, each] for each in chain if (value, each) in self._here), value)

    def _cross(self, frame: Frame, out: bool, source: int, goal: int) -> None:
        values = frame.outputs if out else frame.inputs
        for value in dict.fromkeys(values):
            before = self._found(value, source)
            pairs = zip(frame.slots[out], values, strict=True)
            boundary = Boundary(frame.number, out, tuple(slot for slot, number in pairs if number == value))
            if self._fixed & set(self.group(boundary)):
                self._here.setdefault((value, goal), before)
            elif (value, goal) not in self._here:
                number = len(self.graph.values) + len(self.seen)
                self._here[value, goal] = number
                self.seen[number] = ScopedValue(number, value, before, goal, boundary)
                self.order.append(self.seen[number])
            else:  # two modules return it, and others cannot know from which
                self._fixed |= set(self.group(boundary))
