"""Where the gradients of a cut program are sums over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from .cut import Cut
from .indices import Index, roots
from .program import Graph, Node, Ref, refs, writes_of
from .rules import Rules

__all__ = ["Backward", "Refusal"]


class Refusal(Exception):
    """An index cannot be cut after all. Args: the index, why."""

    def __init__(self, index: Index, why: str) -> None:
        super().__init__(why)
        self.index, self.why = index, why


class Chosen(Protocol):
    """The indices that are cut, and the program that they belong to."""

    graph: Graph
    rules: Rules
    chosen: set[Index]
    opened: frozenset[str]

    def cuts(self, number: int) -> set[Index]:
        """The chosen indices of a value."""
        ...

    def first(self, indices: set[Index]) -> Index:
        """Of some chosen indices, that of the first parameter."""
        ...


class Backward:
    """Where gradients are parts: of what is whole, and is used with values that are cut.

    A use gives a whole value its whole gradient, or this rank's part of it. Parts must be summed: at the
    parameter, or where a module returned the value. A value with uses of both kinds cannot be summed.
    """

    def __init__(self, choice: Chosen, cut: Cut) -> None:
        self._choice, self._graph, self._cut = choice, choice.graph, cut
        self._aliased = self._aliases()
        self._needs = self._trained()
        self._uses: dict[int, set[bool]] = {}  # value -> whether uses give parts
        self._why: dict[int, tuple[Index, str]] = {}
        self._returned: dict[int, str] = {}  # value -> the innermost module with parameters that returned it
        self._users: dict[int, list[int]] = {}
        for node in self._graph.nodes:
            for ref in self._inputs(node):
                self._users.setdefault(ref.value, []).append(node.number)
        for frame in self._graph.frames:  # inner ones come later
            for number in frame.outputs:
                after = all(user >= frame.end for user in self._users.get(number, ()))
                if (
                    frame.path
                    and after
                    and frame.path not in choice.opened
                    and frame.begin <= self._graph.values[number].node < frame.end
                ):
                    self._returned[number] = frame.path

    def _aliases(self) -> dict[int, list[Ref]]:
        """Operators that read what was written through another view -> the values after these writes."""
        found: dict[int, list[Ref]] = {}
        written: dict[int, list[int]] = {}  # storage -> values after writes
        values = self._graph.values
        for node in self._graph.nodes:
            given = [*refs(node.args), *refs(node.named)]
            for ref in given if written else ():
                after = written.get(values[ref.value].storage, ())
                found.setdefault(node.number, []).extend(Ref(n) for n in after if n > ref.value)
            for before, after_it in writes_of(node):
                written.setdefault(values[before].storage, []).append(after_it)
        return found

    def _inputs(self, node: Node) -> Iterator[Ref]:
        given = [*refs(node.args), *refs(node.named), *self._aliased.get(node.number, ())]
        yield from dict.fromkeys(given)

    def _trained(self) -> set[int]:
        """Values with a gradient."""
        found = {
            value.number
            for value in self._graph.values
            if value.kind == "parameter" and value.requires_grad and value.dtype.is_floating_point
        }
        for node in self._graph.nodes:
            if node.name != "aten.detach" and any(r.value in found for r in self._inputs(node)):
                found.update(
                    number
                    for number in node.outputs
                    if number is not None and self._graph.values[number].dtype.is_floating_point
                )
        return found

    def run(self) -> None:
        """Fill `cut.sums` and `cut.enters`.

        Raises:
            Refusal: a value would need both kinds of gradient.
        """
        for number in (*self._graph.outputs, *self._graph.kept):
            self._uses.setdefault(number, set()).add(False)
        for node in reversed(self._graph.nodes):
            self._node(node)
        for name, number in self._graph.names.items():
            if name not in self._cut.dims and number in self._needs and self._settled(number):
                self._cut.sums.append(name)
        for frame in self._graph.frames:  # a module that runs more than once returns the same kind each time
            if frame.path in self._cut.enters:
                for number in frame.outputs:
                    if False in self._uses.get(number, ()):
                        index = next(index for index, _ in self._why.values())
                        raise Refusal(
                            index, f'"{frame.path}" runs more than once, for whole and for cut values'
                        )

    def _node(self, node: Node) -> None:
        choice = self._choice
        produced = {index for number in node.outputs if number is not None for index in choice.cuts(number)}
        summed = {
            index
            for each in choice.rules.contractions
            if each.node is node
            for index in roots([each.dim]) & choice.chosen
        }
        inside = choice.graph.module_of(node)
        kind = self._cut.modules.get(inside, "")
        if (
            node.frames
            and not (frame := choice.graph.frames[node.frames[-1]]).begin <= node.number < frame.end
        ):
            kind = ""  # a hook of the module, which sees what others see
        parts = {
            self._settled(n) for n in node.outputs if n is not None and n in self._needs and self._uses.get(n)
        }
        for ref in self._inputs(node):
            if ref.value not in self._needs or choice.cuts(ref.value):
                continue
            uses = self._uses.setdefault(ref.value, set())
            if kind:  # the layer sums the gradient of its input; its bias is added once
                uses.add(False)
            elif produced or summed:
                uses.add(True)
                self._why.setdefault(ref.value, (choice.first(produced or summed), node.line))
            else:
                for part in parts:
                    uses.add(part)
                    if part:
                        outputs = [n for n in node.outputs if n in self._why]
                        self._why.setdefault(ref.value, self._why[outputs[0]])

    def _settled(self, number: int) -> bool:
        """Whether the gradient that reaches this value from above it is a part."""
        uses = self._uses.get(number, set())
        if len(uses) == 2:
            index, line = self._why[number]
            raise Refusal(
                index, f"a value is used both whole and with cut ones, at {line}, so its gradient is no sum"
            )
        if True not in uses:
            return False
        path = self._returned.get(number)
        if path is not None:
            if path not in self._cut.enters:
                self._cut.enters.append(path)
            return False
        return True
