"""Which values are cut along the sequence: each rank has its positions of what computes each by itself.

    norm, dropout, residuals    positions/n on each rank
    all-gather                  where a cut begins, in place of nothing
    attention, MLP              all positions, features/n on each rank
    reduce-scatter              where it ends, in place of an all-reduce

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022
(arXiv:2205.05198). Positions are indices of the program, as features are: an operator that needs all of them
blocks them. Unlike features they are gathered and cut again where a value goes into a module or comes out.
"""

from __future__ import annotations

import math
import re
from typing import NoReturn

from .backward import Backward, Chosen, Positions, Refusal
from .cut import Cut, ModuleMove
from .indices import Dim, Dims, Factor, Index, block_all, mixed, roots, size_of
from .program import Node, Value, drops, refs
from .rules import DRAWS, Rules
from .scopes import ScopedValue, Scopes

PRODUCTS = ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.convolution", "aten.embedding")
ENTER = ModuleMove("enter", 0)
Key = tuple[str, str]


class Stays(Exception):
    """These values are not cut after all. Args: what tells them from others, why."""

    def __init__(self, keys: set[Key], why: str) -> None:
        super().__init__(why)
        self.keys, self.why = keys, why


def settle(choice: Chosen, cut: Cut, stays: dict[Key, str] | None = None) -> ScatteredPositions | None:
    """Find what moves where, and which gradients are sums: fill `cut`.

    Args:
        stays: cut along the sequence, too, but not these -> why. None: nothing is cut so.
    Raises:
        Refusal: an index cannot be cut after all.    Stays: these values cannot.
    """
    layers = frozenset(path for path, kind in cut.modules.items() if kind.startswith("column"))
    scopes = Scopes(choice.graph, choice.opened, layers)
    positions = None if stays is None else ScatteredPositions(choice, cut, scopes, stays)
    check_draws(choice, cut, scopes, positions)
    Backward(choice, cut, scopes, positions).run()
    if positions is not None:
        cut.positions = positions.reasons(cut)
    return positions


class ScatteredPositions:
    """The values of a cut program that each rank has its positions of.

    Args:
        stays: values that are not cut, and why.
    Attributes:
        indivisible: positions that the ranks do not divide, and that nothing else blocks; 0: none.
    """

    def __init__(self, choice: Chosen, cut: Cut, scopes: Scopes, stays: dict[Key, str]) -> None:
        self._graph, self._base, self._cut, self._scopes = choice.graph, choice.rules, cut, scopes
        self._stays = stays
        self._kinds = _sequences(choice, cut)
        self._rules = _PositionRules(choice, cut, scopes, self._kinds)
        self._rules.all()
        self._chosen = set[Index]()
        kinds = self._rules.positions()
        self._indices = {number: roots(dims) & kinds for number, dims in self._rules.dims.items()}
        self._chosen = self._reached(kinds)

    # ---- what others ask ----

    def scattered(self, number: int) -> bool:
        """Whether each rank has its positions of this ScopedValue only."""
        return bool(self._of(number) & self._chosen)

    def dim(self, value: int) -> int:
        """The dim of the positions of a value, which is not part of a product."""
        return _dim_of(self._base.dims[value], self._kinds) or 0

    def taken(self, node: Node, value: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`shape`, of a value that an operator takes, with this rank's positions."""
        dims = self._rules.dims[self._scopes.at(node, value)]
        return tuple(
            size * self._local(dim) // max(size_of(dim), 1) for size, dim in zip(shape, dims, strict=True)
        )

    def stay(self, number: int, other: int, why: str) -> NoReturn:
        """Raise Stays for what these two are with, or else for what is cut where an operator takes one."""
        indices = (self._of(number) | self._of(other)) & self._chosen
        for node in self._graph.nodes if not indices else ():
            here = self._numbers(node)
            if number in here:
                indices |= {index for each in here for index in self._of(each)} & self._chosen
        raise Stays(self._keys(indices or self._chosen), why)

    def before(self, node: Node) -> set[Key]:
        """The last values that are cut before an operator ends."""
        last = set[Index]()
        for each in self._scopes.order:
            numbers = [each.number] if isinstance(each, ScopedValue) else self._numbers(each)
            last = {index for n in numbers for index in self._of(n)} & self._chosen or last
            if each is node and last:
                break
        return self._keys(last or self._chosen)

    def only(self, cut: Cut, other: Cut) -> None:
        """Raise Stays for what goes where `other` moves nothing alike."""
        wanted = other.forward_moves()
        for seen in self._scopes.seen.values():
            for path, out, place in self._scopes.group(seen.boundary):
                here = cut.forward_moves().get(path, {}).get((out, place))
                if here is not None and here != wanted.get(path, {}).get((out, place)):
                    self.stay(seen.number, seen.before, f'"{path}" moves other values on the sample')

    def _keys(self, indices: set[Index]) -> set[Key]:
        return {self._key(number) for number, here in self._indices.items() if here & indices}

    # ---- the choice ----

    def _of(self, number: int) -> set[Index]:
        return self._indices[number]

    def _local(self, dim: Dim) -> int:
        return sum(
            math.prod(
                factor.size // self._cut.parts if factor.index.root() in self._chosen else factor.size
                for factor in segment
            )
            for segment in dim
        )

    def _key(self, number: int) -> Key:
        """What a value has in common with that of another layer, or of another batch."""
        seen = self._scopes.seen.get(number)
        if seen is None and self._graph.values[number].node < 0:
            return "given", self._graph.values[number].name
        if seen is None:
            node = self._graph.nodes[self._graph.values[number].node]
            return "made", re.sub(r"\b\d+\b", "*", f"{self._graph.module_of(node)}: {node.name} {node.line}")
        path = self._graph.frames[seen.boundary.frame].path
        return "out" if seen.boundary.out else "in", re.sub(r"\b\d+\b", "*", f"{path} {seen.boundary.slots}")

    def _numbers(self, node: Node) -> list[int]:
        made = node.made
        return [*made, *(self._scopes.at(node, n) for n in node.taken)]

    def _reached(self, kinds: set[Index]) -> set[Index]:
        """What nothing blocks, and values go to from the end of a cut."""
        for number, indices in self._indices.items():
            for index in indices if self._stays else ():
                index.why = index.why or self._stays.get(self._key(number), "")
        links = self._links()
        left = [index for begin, index, _ in links if begin is None and not index.why]
        self.indivisible = next((index.unit for index in left if index.unit % self._cut.parts), 0)
        for index in kinds:
            if index.unit % self._cut.parts:
                index.why = index.why or f"{self._cut.parts} does not divide {index.unit} positions"
        found = set[Index]()
        while left:
            index = left.pop()
            if index not in found:
                found.add(index)
                left += [b for a, b, _ in links if a is index and not b.why]
                left += [a for a, b, _ in links if b is index and a is not None and not a.why]
        return self._without_passing(found, links)

    def _links(self) -> list[tuple[Index | None, Index, ScopedValue]]:
        """(positions before, after) each boundary; None: the end of a cut."""
        found = list[tuple[Index | None, Index, ScopedValue]]()
        for seen in self._scopes.seen.values():
            after = self._of(seen.number)
            path = self._graph.frames[seen.boundary.frame].path
            ends = seen.boundary.out and self._cut.modules.get(path) in ("row", "vocabulary")
            for index in after:
                before = [None] if ends else list[Index | None](self._of(seen.before))
                found += [(each, index, seen) for each in before if each is not index]
        return found

    def _without_passing(
        self, found: set[Index], links: list[tuple[Index | None, Index, ScopedValue]]
    ) -> set[Index]:
        """Gather once what only goes on to several cuts."""
        touched = {i for node in self._graph.nodes for n in self._numbers(node) for i in self._of(n)}
        while True:
            after = {index: [b for a, b, _ in links if a is index] for index in found - touched}
            passing = {i for i, below in after.items() if below and not found & set(below)}
            if not passing:
                return found
            found = found - passing

    def reasons(self, cut: Cut) -> list[tuple[str, str]]:
        """(module, text): where all positions are computed, and why. Given the moves of `cut`."""
        found = dict[str, set[str]]()
        for before, index, seen in self._links():
            path, out, place = self._scopes.group(seen.boundary)[0]
            ends = before is None and index not in self._chosen
            if ends or cut.moves.get(path, {}).get((out, place), ENTER).kind == "gather":
                what = "all positions after it" if out else "it takes all positions"
                found.setdefault(path, set()).add(f"{what}, because {index.why or 'only cuts follow'}")
        return [(path, min(texts)) for path, texts in found.items()]  # the same one in every run


def _sequences(choice: Chosen, cut: Cut) -> set[Index]:
    """The indices of positions: dims of what a cut ends with, other than features and rows of the batch."""
    graph, dims = choice.graph, choice.rules.dims
    rows = {i for v in graph.values if v.kind == "input" and v.shape for i in roots(dims[v.number][:1])}
    found = set[Index]()
    for frame in graph.frames:
        if cut.modules.get(frame.path) in ("row", "vocabulary"):
            for number in frame.outputs[:1]:
                factors = [f for dim in dims[number][:-1] for segment in dim for f in segment]
                found |= set([f.index.root() for f in factors if f.index.root() not in rows][:1])
    return found


def _dim_of(dims: Dims, kinds: set[Index]) -> int | None:
    """The one dim that is positions and nothing else."""
    here = [at for at, dim in enumerate(dims) if roots([dim]) & kinds]
    if len(here) != 1 or len(dims[here[0]]) != 1 or len(dims[here[0]][0]) != 1:
        return None
    return here[0]


class _PositionRules(Rules):
    """The rules, for positions: an index ends where a value goes into a module or comes out of it."""

    def __init__(self, choice: Chosen, cut: Cut, scopes: Scopes, kinds: set[Index]) -> None:
        base = choice.rules
        super().__init__(choice.graph, base.vocabulary, base.gathered)
        self._choice, self._base, self._cut, self._scopes, self._kinds = choice, base, cut, scopes, kinds
        self._positions = set[Index]()
        self._node: Node | None = None

    def positions(self) -> set[Index]:
        """All indices of positions."""
        self._positions = {index.root() for index in self._positions}
        return self._positions

    def of(self, ref: object) -> Dims:
        number: int = ref.value  # type: ignore[attr-defined]
        return self.dims[number if self._node is None else self._scopes.at(self._node, number)]

    def begin(self, value: Value) -> None:
        name = f'"{value.name}"' if value.name else f"the model's {value.kind}"
        super().begin(value)
        block_all(self.dims[value.number], f"it is a dimension of {name}, which is no module's output")
        self._note(value.number, value.number)

    def all(self) -> None:
        for value in self.graph.values:
            if value.node < 0:
                self.begin(value)
        for each in self._scopes.order:
            if isinstance(each, ScopedValue):
                self._cross(each)
            else:
                self._node = each
                self.run(each)
                self._block(each)
                self._node = None
        graph = self.graph
        for number in graph.outputs:
            block_all(self.dims[self._scopes.outside(number)], "the model returns it")
        kept = [*graph.own_backward, *graph.taken_by_functions, *graph.kept, *graph.rebound.values()]
        for number in {every for value in kept for every in self._scopes.all_of(value)}:
            block_all(self.dims[number], "the program keeps it, or takes it in a function of its own")

    def _note(self, number: int, value: int) -> None:
        """Positions are where the whole program has them."""
        for here, there in zip(self.dims[number], self._base.dims[value], strict=True):
            if [[f.size for f in s] for s in here] == [[f.size for f in s] for s in there]:
                for one, other in zip(here, there, strict=True):
                    self._positions |= {
                        a.index.root()
                        for a, b in zip(one, other, strict=True)
                        if b.index.root() in self._kinds
                    }

    def _cross(self, seen: ScopedValue) -> None:
        dims = self.dims[seen.before]
        base = self._base.dims[seen.value]
        if _dim_of(base, self._kinds) is not None:
            dims = [
                tuple(tuple(Factor(Index(f.size), f.size) for f in segment) for segment in dim)
                for dim in base
            ]
        self.dims[seen.number] = dims
        self._note(seen.number, seen.value)

    def _block(self, node: Node) -> None:
        made = node.made
        for number in made:
            self._note(number, number)
        given = node.taken
        dims = [dim for n in made for dim in self.dims[n]]
        dims += [dim for n in given for dim in self.dims[self._scopes.at(node, n)]]
        layers = [
            self.graph.frames[f].path for f in node.frames if self.graph.frames[f].path in self._cut.modules
        ]
        if layers:
            block_all(dims, f'"{layers[0]}" is cut')
        elif any(self._choice.cuts(number) for number in [*made, *given]):
            block_all(dims, f"{node.name} computes features that are cut, at {node.line}")
        elif node.name in PRODUCTS or node.name.startswith("aten._scaled_dot_product"):
            block_all(dims, f"{node.name} takes a matrix that is whole, at {node.line}")
        elif any(self.graph.module_of(node) == path for path in self._choice.opened):
            block_all(dims, "it goes between modules of which stages of the pipeline are made")
        mine = [roots([dim]) & self.positions() for n in made for dim in self.dims[n]]
        if len(set().union(*mine)) > 1:
            block_all(dims, f"it has positions of two kinds, at {node.line}")


# ---- draws ----


def check_draws(choice: Chosen, cut: Cut, scopes: Scopes, positions: Positions | None = None) -> None:
    """Check that a cut draws for parts within cut regions, and for whole values outside: see generators.py.
    Modules that draw for this rank's positions go into `cut.draws`.

    Raises:
        Refusal: it does not.
        Stays: a module draws for positions, and does other things.
    """
    graph = choice.graph
    events: dict[int, list[str]] = {}
    for frame in graph.frames:
        kind = cut.modules.get(frame.path)
        if kind == "row":
            events.setdefault(frame.begin, []).append("end")
        elif kind == "column":
            events.setdefault(frame.end, []).append("begin")
    own = False
    for node in graph.nodes:
        for event in events.get(node.number, ()):
            own = event == "begin"
        attention = node.name.startswith("aten._scaled_dot_product")
        if node.name in DRAWS or (attention and drops(node.op, node.args, node.named)):
            here = {index for number in node.made for index in choice.cuts(number)}
            here |= {index for ref in refs(node.args) for index in choice.cuts(ref.value)}
            numbers = [scopes.at(node, n) for n in node.taken]
            numbers += node.made
            if positions is not None and (found := [n for n in numbers if positions.scattered(n)]):
                path = graph.module_of(node)
                if not path or any(frame.inside for frame in graph.frames if frame.path == path):
                    why = (
                        f"{node.name} draws for each position, and not in a module of its own, at {node.line}"
                    )
                    positions.stay(found[0], found[0], why)
                if path not in cut.draws:
                    cut.draws.append(path)
            elif bool(here) != own or any(
                mixed(choice.rules.dims[number], choice.chosen)
                for number in node.outputs
                if number is not None
            ):
                index = choice.first(here or choice.chosen)
                why = f"random numbers are drawn for whole values beside cut ones, at {node.line}"
                raise Refusal(index, why)
