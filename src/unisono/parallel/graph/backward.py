"""Where the gradients of a cut program are sums over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from .cut import Cut, ModuleMove
from .indices import Index, mixed, roots
from .noted_call import ModuleOp, WholeOp
from .program import Frame, Graph, Node, Ref, refs, writes_of
from .rules import Rules
from .scopes import Place, ScopedValue, Scopes


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


class Positions(Protocol):
    """The values that are cut along the sequence."""

    def scattered(self, number: int) -> bool:
        """Whether this ScopedValue is one."""
        ...

    def dim(self, value: int) -> int:
        """The dim of the positions of a value."""
        ...

    def stay(self, number: int, other: int, why: str) -> None:
        """Raise an error: what these two are with is not cut."""
        ...


class Backward:
    """Where gradients are parts: of what is whole, and is used with values that are cut.

    A use gives a whole value its whole gradient, or this rank's part of it. Parts must be summed: at the
    parameter, or where the value goes into a module or comes out of it, as early in the program as all later
    uses give parts. So the query, the key and the value of one input take one sum. A value with uses of both
    kinds, and no module between them, cannot be summed.

    A value with cut segments beside whole ones (torch.cat makes it) is cut; what is said of it here is said
    of its whole segments:

        cat([a whole, b cut]) -> m -> split -> a', b'    a' is used whole: so are m and a

    Args:
        positions: the values that are cut along the sequence, where there are any.
    """

    def __init__(self, choice: Chosen, cut: Cut, scopes: Scopes, positions: Positions | None = None) -> None:
        self._choice, self._graph, self._cut, self._scopes = choice, choice.graph, cut, scopes
        self._positions = positions
        self._aliased = self._aliases()
        self._called = {node.op.path for node in self._graph.nodes if isinstance(node.op, ModuleOp)}
        self._needs = self._trained()
        self._here: set[Place] = set()  # sums that an earlier one does not replace
        self._later: set[Place] = set()  # where no sum replaces later ones
        self._forget()

    def _forget(self) -> None:
        self._uses: dict[int, set[bool]] = {}  # number -> whether uses give parts
        self._waiting: dict[
            int, list[ScopedValue]
        ] = {}  # number -> uses by modules that give parts, not summed yet
        self._parts: dict[int, bool] = {}
        self._why: dict[int, tuple[Index, str]] = {}
        self._kinds: dict[int, str] = {}  # number of a ScopedValue -> its move

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

    def _check_hooks(self, node: Node, frame: Frame, kind: str, given: set[int]) -> None:
        """Refuse a column layer that takes what a hook has made of its input: nothing sums that gradient."""
        values, choice = self._graph.values, self._choice
        for ref in self._inputs(node) if kind.startswith("column") else ():
            made = values[ref.value].node
            elsewhere = made >= 0 and not frame.begin <= made < frame.end
            if (
                elsewhere
                and ref.value in self._needs
                and ref.value not in given
                and not choice.cuts(ref.value)
            ):
                body = self._graph.nodes[frame.begin : frame.end]
                cut = {index for one in body for n in one.made for index in choice.cuts(n)}
                why = f"a hook changes what the layer takes, at {node.line}"
                raise Refusal(choice.first(cut or choice.chosen), why)

    def _written_views(self, node: Node, given: set[int]) -> set[int]:
        """What an operator takes of `given` through views that were written since: gradients go there."""
        values = self._graph.values
        storages = {values[number].storage for number in given}
        after = (ref.value for ref in self._aliased.get(node.number, ()))
        return {number for number in after if values[number].storage in storages}

    def _inputs(self, node: Node) -> Iterator[Ref]:
        given = [*refs(node.args), *refs(node.named), *self._aliased.get(node.number, ())]
        yield from dict.fromkeys(given)

    def _trained(self) -> set[int]:
        found = {
            value.number
            for value in self._graph.values
            if value.kind == "parameter" and value.requires_grad and value.differentiable
        }
        for node in self._graph.nodes:
            inputs = [ref.value for ref in self._inputs(node)]
            ends = node.name == "aten.detach" and not self._graph.taken_by_functions & set(inputs)
            if not ends and any(value in found for value in inputs):
                found.update(
                    number
                    for number in node.outputs
                    if number is not None and self._graph.values[number].differentiable
                )
        return found

    def run(self) -> None:
        """Fill `cut.sums` and `cut.moves`.

        Raises:
            Refusal: a value would need both kinds of gradient.
            Stays: so would one that is cut along the sequence.
        """
        for _ in range(len(self._graph.frames) + 2):
            self._forget()
            sums = self._sums()
            uneven = self._uneven()
            known = len(self._here) + len(self._later)
            for number, seen in self._scopes.seen.items():
                if self._kinds.get(number) == "enter":
                    places = uneven & set(self._scopes.group(seen.boundary))
                    kept = self._here if True in self._uses.get(number, ()) else self._later
                    kept |= places
            if len(self._here) + len(self._later) == known:
                break
        if uneven:
            self._refuse_uneven(uneven)
        self._cut.sums += sums
        for number, kind in self._kinds.items():
            seen = self._scopes.seen[number]
            dim = 0 if self._positions is None or kind == "enter" else self._positions.dim(seen.value)
            for path, out, slot in self._scopes.group(seen.boundary):
                self._cut.moves.setdefault(path, {})[out, slot] = ModuleMove(kind, dim)

    def _sums(self) -> list[str]:
        for number in (*self._graph.outputs, *self._graph.kept):
            self._uses.setdefault(self._scopes.outside(number), set()).add(False)
        for each in reversed(self._scopes.order):
            if isinstance(each, ScopedValue):
                self._cross(each)
            else:
                self._node(each)
        return [
            name
            for name, number in self._graph.names.items()
            if name not in self._cut.dims and number in self._needs and self._settled(number)
        ]

    def _uneven(self) -> set[Place]:
        """Places where calls of one module would move what they get in different ways."""
        kinds: dict[Place, set[str | None]] = {}
        for number, seen in self._scopes.seen.items():
            cut = seen.value in self._needs and bool(self._choice.cuts(seen.value))
            kind = self._kinds.get(number, "" if cut or self._known(number) else None)
            for place in self._scopes.group(seen.boundary):
                kinds.setdefault(place, set()).add(kind)
        return {  # what has no gradient may enter
            place for place, several in kinds.items() if len(several - {None}) > 1
            or (None in several and several - {None, "", "enter"})
        }  # fmt: skip

    def _refuse_uneven(self, uneven: set[Place]) -> None:
        path = min(path for path, *_ in uneven)  # the same one in every run
        why = f'"{path}" runs more than once, for whole and for cut values'
        if self._positions is not None:
            for number, seen in self._scopes.seen.items():
                if uneven & set(self._scopes.group(seen.boundary)):
                    self._positions.stay(number, seen.before, why)
        raise Refusal(next(index for index, _ in self._why.values()), why)

    def _cross(self, seen: ScopedValue) -> None:
        """Where a value crosses the boundary of a module."""
        number, before, boundary = seen.number, seen.before, seen.boundary
        path = self._graph.frames[boundary.frame].path
        kind = self._cut.modules.get(path, "whole" if path in self._called else "")
        here, there = self._scattered(before), self._scattered(number)
        if self._mixed(seen.value) and self._known(number):
            self._take(before, {self._settled(number)}, number)
            return
        trained = seen.value in self._needs and not self._choice.cuts(seen.value)
        part = trained and self._settled(number)
        if boundary.out and kind:  # what is inside belongs to the layer
            ends = "scatter" if kind in ("row", "vocabulary") else "slice"
            self._kinds |= {number: ends} if there else {number: "enter"} if part else {}
            return
        if not trained:
            self._kinds |= {number: "slice" if there else "gather"} if here != there else {}
            return
        uses = self._uses.setdefault(before, set())
        if here != there:
            self._kinds[number] = "slice" if there else "gather, sum" if part else "gather"
            uses.add(False)
        elif not part:
            if self._known(number):
                uses.add(False)
        elif self._here & set(self._scopes.group(boundary)):
            self._kinds[number] = "enter"
            uses.add(False)
        else:
            self._waiting.setdefault(before, []).append(seen)
            self._why.setdefault(before, self._why[number])

    def _scattered(self, number: int) -> bool:
        return self._positions is not None and self._positions.scattered(number)

    def _node(self, node: Node) -> None:
        choice = self._choice
        produced = {index for number in node.made for index in choice.cuts(number)}
        summed = {
            index
            for each in choice.rules.contractions
            if each.node is node
            for index in roots([each.dim]) & choice.chosen
        }
        kind, given = "", set[int]()
        if node.frames:
            frame = choice.graph.frames[node.frames[-1]]
            if frame.begin <= node.number < frame.end:  # a hook of the module sees what others see
                kind, given = self._cut.modules.get(frame.path, ""), set(frame.inputs)
                given |= self._written_views(node, given)
                self._check_hooks(node, frame, kind, given)
        outputs = [n for n in node.made if n in self._needs and self._known(n)]
        parts = {self._settled(n) for n in outputs}
        inputs = [(ref.value, self._scopes.at(node, ref.value)) for ref in self._inputs(node)]
        if kind and True in parts:
            number = next(n for n in outputs if n in self._why)
            index, line = self._why[number]
            raise Refusal(index, f"each rank uses the output of a layer for its part, at {line}")
        scattered = any(map(self._scattered, [*outputs, *(number for _, number in inputs)]))
        joins = node.name == "aten.cat" and bool(produced)  # what is whole becomes a segment of its own
        for value, number in inputs:
            if value not in self._needs or (choice.cuts(value) and not self._mixed(value)):
                continue
            uses = self._uses.setdefault(number, set())
            if kind.startswith("column") and value in given:
                uses.add(True)
                cut = produced or choice.chosen
                self._why.setdefault(number, (choice.first(cut), node.line))
            elif (
                kind or isinstance(node.op, WholeOp) or self._scattered(number)
            ):  # the bias of a layer is added once; own positions are all
                uses.add(False)
            elif (produced or summed or scattered) and not (joins or self._mixed(value)):
                uses.add(True)
                self._why.setdefault(number, (choice.first(produced or summed or choice.chosen), node.line))
                self._take(number, {self._settled(n) for n in outputs if self._mixed(n)}, *outputs)
            else:
                self._take(number, parts, *outputs)

    def _take(self, number: int, parts: set[bool], *outputs: int) -> None:
        """Note that uses give a value these gradients, which are those of what is made of it."""
        self._uses.setdefault(number, set()).update(parts)
        if True in parts:
            self._why.setdefault(number, next(self._why[n] for n in outputs if n in self._why))

    def _mixed(self, value: int) -> bool:
        """Whether it has cut segments and whole ones."""
        return mixed(self._choice.rules.dims[value], self._choice.chosen)

    def _replaces(self, number: int) -> bool:
        """Whether one sum, here or before, may take the place of those that are waiting."""
        seen = self._scopes.seen.get(number)
        return seen is not None and not self._later & set(self._scopes.group(seen.boundary))

    def _known(self, number: int) -> bool:
        return bool(self._uses.get(number) or self._waiting.get(number))

    def _settled(self, number: int) -> bool:
        """Whether the gradient that reaches this value from above it is a part."""
        if number not in self._parts:
            self._parts[number] = self._settle(number)
        return self._parts[number]

    def _settle(self, number: int) -> bool:
        uses, waiting = self._uses.get(number, set()), self._waiting.get(number, [])
        if len(uses) == 2:
            index, line = self._why[number]
            why = f"a value is used both whole and with cut ones, at {line}, so its gradient is no sum"
            if self._positions is not None:
                self._positions.stay(number, number, why)
            raise Refusal(index, why)
        if True in uses or (waiting and False not in uses and self._replaces(number)):
            return True
        for seen in waiting:
            self._kinds[seen.number] = "enter"
        return False
