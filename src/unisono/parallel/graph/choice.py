"""Chooses a cut: which indices of the recorded program are cut, so that the model computes the same.

| | |
|---|---|
| may be cut | an index that nothing blocks, whose sizes the parts divide, and that ends in layers that sum |
| cut together | all its dims: weights, biases, bare parameters, buffers |
| not together | two indices of one value: there is one axis; the one with more FLOPs is cut |
| forward | a layer whose input features are cut sums its outputs |
| backward | what is whole and meets a cut value gets a part of its gradient on each rank: it is summed |
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

from torch import nn

from .backward import Refusal
from .capture import STATE
from .containers import tensors_in
from .cut import Cut
from .fused import (
    NO_SUM,
    NOT_NAMED,
    Hints,
    Layer,
    can_split_heads,
    has_hooks,
    is_product,
    layer_of,
    named_dim,
)
from .indices import Dim, Index, Segment, block, block_all, repeated, roots
from .program import Graph, Node, refs
from .rules import Rules
from .sequence import settle

GENERAL = ("it is a dimension of the model's input", "the cut leaves it whole")  # other reasons tell more
SEGMENTS = 9  # a layer whose output is split further is no few things in one


class SplitChoice:
    """The cut of one graph.

    Args:
        graph: of `model`, whose modules tell which layers can sum.
        banned: (parameter, dim) -> why it must not be cut.
        opened: modules that span stages of a pipeline.
    Attributes:
        modules: of the model, by path.
        chosen: the indices that are cut.
        cut: what to do.
    """

    def __init__(
        self,
        graph: Graph,
        model: nn.Module,
        parts: int,
        hints: Hints,
        banned: dict[tuple[str, int], str],
        opened: frozenset[str] = frozenset(),
    ) -> None:
        self.graph, self._model, self.parts, self._hints = graph, model, parts, hints
        self.rules = Rules(graph, set(hints.vocabulary), set(hints.gathered))
        self.rules.all()
        self.modules = dict(model.named_modules())
        self._owners: dict[str, list[str]] = {}  # name of a parameter -> modules that have it
        self._first: dict[int, str] = {}
        for path, module in self.modules.items():
            own = [
                *module.named_parameters(recurse=False, remove_duplicate=False),
                *module.named_buffers(recurse=False, remove_duplicate=False),
            ]
            for leaf, value in own:
                name = self._first.setdefault(id(value), f"{path}.{leaf}".lstrip("."))
                self._owners.setdefault(name, []).append(path)
        self._held = [  # (name, dim, index) of every dim of parameters and buffers
            (name, dim, next(iter(found)))
            for name, number in graph.names.items()
            for dim, each in enumerate(self.rules.dims[number])
            if (found := roots([each]))
        ]
        for (name, dim), why in banned.items():
            if name in graph.names:  # a part of a layer may be one with the others again
                block(self.rules.dims[graph.names[name]][dim], why)
        for number in graph.outputs:
            block_all(self.rules.dims[number], "the model returns it")
        for numbers, why in (
            (graph.own_backward, "a torch.autograd.Function of the program's own returns it"),
            (graph.taken_by_functions, "a torch.autograd.Function of the program's own takes it"),
            (graph.kept, "the model keeps it in an attribute"),
            (graph.rebound.values(), "the program puts it in place of a buffer"),
            ((graph.names[name] for name in graph.rebound), "the program puts another tensor in its place"),
        ):
            for number in numbers:
                block_all(self.rules.dims[number], why)
        self.opened = opened
        self._check_opened()
        self._check_copies()
        self._check_uses()
        self._check_contractions()
        self._check_repeated()
        self._check_sizes()
        self.chosen: set[Index] = set()
        self.cut = self._choose()

    # ---- what blocks an index ----

    def _check_opened(self) -> None:
        """What a module that spans stages takes, makes, and gets from the modules in it, is whole."""
        graph, around = self.graph, list[str]()
        numbers: set[int] = set()
        for node in graph.nodes if self.opened else ():
            if graph.module_of(node) in self.opened:
                numbers.update(node.taken)
                numbers.update(number for number in node.made)
        for frame in graph.frames if self.opened else ():
            del around[frame.level :]
            if around and around[-1] in self.opened:
                numbers.update([*frame.inputs, *frame.outputs])
            around.append(frame.path)
        for number in numbers:
            block_all(
                self.rules.dims[number], "it goes between modules of which stages of the pipeline are made"
            )

    def _check_copies(self) -> None:
        """A parameter that is also in a list of a module stays there as it was before the cut."""
        for path, module in self.modules.items():
            for leaf, thing in vars(module).items():
                for tensor in tensors_in(thing) if leaf not in STATE else ():
                    name = self._first.get(id(tensor))
                    if name is not None:
                        why = f'"{name}" is also in the attribute "{f"{path}.{leaf}".lstrip(".")}"'
                        block_all(self.rules.dims[self.graph.names[name]], why)

    def _check_uses(self) -> None:
        """A parameter is a part only while the module that has it runs."""
        uses: dict[int, list[Node]] = {}
        for node in self.graph.nodes:
            for ref in {*refs(node.args), *refs(node.named)}:
                uses.setdefault(ref.value, []).append(node)
        self._outside: set[str] = set()
        for name, number in self.graph.names.items():
            owners = set(self._owners[name])
            for node in uses.get(number, ()):
                if not any(self._runs_in(node, owner) for owner in owners):
                    self._outside.add(name)
                    for dim in self.rules.dims[number]:
                        block(dim, f'"{name}" is used outside its module, at {node.line}')

    def _runs_in(self, node: Node, path: str) -> bool:
        """Whether the forward of the module at `path` runs this operator, now and in a recomputation."""
        again = node.number in self.graph.recomputed
        for number in reversed(node.frames):
            frame = self.graph.frames[number]
            if frame.path == path:
                return frame.begin <= node.number < frame.end and not again
            again = again or frame.recomputed
        return False

    def _check_contractions(self) -> None:
        """Only layers sum their outputs."""
        for contraction in self.rules.contractions:
            node = contraction.node
            if not self._sums(node, contraction.dim):
                block(contraction.dim, f"{node.name} sums over it and is not a layer, at {node.line}")

    def _check_repeated(self) -> None:
        """No value has one index in two of its dims: a rank would have a block of its diagonal only."""
        values, nodes = self.graph.values, self.graph.nodes
        for number, dims in self.rules.dims.items():
            for index in repeated(dims):
                made = values[number].node
                where = f", at {nodes[made].line}" if made >= 0 else ""
                index.why = index.why or f"two dimensions of one value are the same{where}"

    def _sums(self, node: Node, dim: Dim) -> bool:
        path = self.graph.module_of(node)
        layer, number = self.layer(path), self.graph.names.get(self._name(path, "weight"))
        if layer is None or layer.input_dim is None or number is None:
            return False
        weight = roots([self.rules.dims[number][layer.input_dim]])
        return weight <= roots([dim]) and all(index.why for index in roots([dim]) - weight)

    def layer(self, path: str) -> Layer | None:
        """The dims of a layer. A subclass of Linear is one, if its program has nothing but the product."""
        module = self.modules[path]
        known = layer_of(module)
        if known is not None or not isinstance(module, nn.Linear) or "forward" in vars(module):
            return known
        found = [frame for frame in self.graph.frames if frame.path == path]
        names = self.graph.names
        weight, bias = (names.get(self._name(path, leaf)) for leaf in ("weight", "bias"))
        return Layer(0, 1) if found and all(is_product(self.graph, f, weight, bias) for f in found) else None

    def named(self, path: str, kind: str) -> set[Index]:
        """The indices of what this kind cuts of a layer; empty: it is no such layer, or never runs."""
        number = self.graph.names.get(self._name(path, "weight"))
        dim = named_dim(self.modules[path], self.layer(path), kind)
        return set() if number is None or dim is None else roots([self.rules.dims[number][dim]])

    def _name(self, path: str, leaf: str) -> str:
        """The name of a module's parameter; that of the first place where it is tied."""
        return self._first.get(id(getattr(self.modules[path], leaf, None)), "")

    def _check_sizes(self) -> None:
        for name, dim, index in self._held:
            unit = index.root().unit
            if unit % self.parts and not index.root().why:
                index.root().why = (
                    f'{self.parts} does not divide {unit}, which dimension {dim} of "{name}" and what is '
                    "made of it have in common"
                )

    # ---- the choice ----

    def _choose(self) -> Cut:
        work, together = self._work(), self._together()
        held = dict.fromkeys(index.root() for _, _, index in self._held)  # in the order of the parameters
        self._order = {index: place for place, index in enumerate(held)}
        ends = {index for each in self.rules.contractions for index in roots([each.dim])} | self._hinted()
        given = {index for each in (self._hints.kinds or {}).items() for index in self.named(*each)}
        for index in sorted(
            (index for index in held if not index.why), key=lambda index: -work.get(index, 0)
        ):
            if given and index not in given:
                index.why = NOT_NAMED
                continue
            if index not in ends:
                index.why = NO_SUM
                continue
            self._take(index, together)
        while True:
            try:
                return self._made()
            except Refusal as refusal:
                self.chosen.discard(refusal.index)
                refusal.index.why = refusal.why

    def _hinted(self) -> set[Index]:
        """Output features of layers that are gathered, and rows of embeddings."""
        found: set[Index] = set()
        for name, dim, index in self._held:
            for path in self._owners[name]:
                layer = self.layer(path) if path in self._hints.gathered else None
                rows = path in self._hints.vocabulary and dim == 0
                if rows or (layer is not None and dim == layer.output_dim):
                    found.add(index.root())
        return found

    def _take(self, index: Index, together: dict[Index, dict[Index, int]]) -> None:
        numbers = [number for other, number in together.get(index, {}).items() if other in self.chosen]
        if not numbers:
            self.chosen.add(index)
            return
        value = self.graph.values[min(numbers)]  # the same one in every run
        what = f'"{value.name}"' if value.name else "a value"
        index.why = f"another dimension of {what} is cut already"

    def _together(self) -> dict[Index, dict[Index, int]]:
        """Indices that some value has both of, with that value; parameters first."""
        found: dict[Index, dict[Index, int]] = {}
        for number, dims in self.rules.dims.items():
            here = {index for index in roots(dims) if not index.why}
            for index in here if len(here) > 1 else ():
                for other in here - {index}:
                    found.setdefault(index, {}).setdefault(other, number)
        return found

    def _work(self) -> dict[Index, int]:
        """FLOPs of the operators that each index is in."""
        found: dict[Index, int] = {}
        contracted: dict[int, set[Index]] = {}
        for each in self.rules.contractions:
            contracted.setdefault(each.node.number, set()).update(roots([each.dim]))
        for node in self.graph.nodes:
            inside = set(contracted.get(node.number, ()))
            for ref in {*refs(node.args), *refs(node.named)}:
                inside |= roots(self.rules.dims[ref.value])
            for index in inside:
                found[index] = found.get(index, 0) + node.flops
        return found

    def first(self, indices: set[Index]) -> Index:
        """Of some chosen indices, that of the first parameter."""
        return min(indices, key=lambda index: self._order[index])

    def runs(self, path: str) -> bool:
        """Whether the module at `path` is called."""
        return any(frame.path == path for frame in self.graph.frames)

    def held(self, indices: set[Index]) -> list[tuple[str, int]]:
        """The dims of parameters and buffers that have one of these indices."""
        return [(name, dim) for name, dim, index in self._held if index.root() in indices]

    def cuts(self, number: int) -> set[Index]:
        """The chosen indices of a value."""
        return roots(self.rules.dims[number]) & self.chosen

    def local(self, number: int) -> tuple[int, ...]:
        """The shape of a value on one rank."""
        return tuple(sum(map(self.local_size, dim)) for dim in self.rules.dims[number])

    def local_size(self, segment: Segment) -> int:
        """The size of a segment of a dim on one rank."""
        chosen = self.chosen
        return math.prod(f.size // self.parts if f.index.root() in chosen else f.size for f in segment)

    def _made(self) -> Cut:
        cut = Cut(self.parts)
        for name, dim, index in self._held:
            if index.root() in self.chosen:
                cut.dims[name] = dim
        for name, dim in cut.dims.items():
            for path in self._owners[name]:
                if kind := self._kind(path, name, dim):
                    cut.modules[path] = kind
        settle(self, cut)
        values = self.graph.values
        sizes = {
            n: math.prod(values[v].shape)
            for n, v in self.graph.names.items()
            if values[v].kind == "parameter"
        }
        cut.parameters = sum(size for name, size in sizes.items() if name in cut.dims), sum(sizes.values())
        cut.flops = self._cut_flops(), self.graph.flops
        cut.whole = self._whole(cut)
        return cut

    def _kind(self, path: str, name: str, dim: int) -> str:
        layer = self.layer(path)
        if layer is None or name != self._name(path, "weight"):
            return ""
        if path in self._hints.vocabulary and dim == 0:
            return "vocabulary"
        if dim == layer.input_dim:
            return "row"
        return "column, gathered" if path in self._hints.gathered else "column"

    def _cut_flops(self) -> int:
        contracted = {each.node.number for each in self.rules.contractions if roots([each.dim]) & self.chosen}
        return sum(
            node.flops
            for node in self.graph.nodes
            if node.number in contracted
            or any(self.cuts(number) for number in node.made)
            or any(self.cuts(ref.value) for ref in refs(node.args))
        )

    def _whole(self, cut: Cut) -> list[tuple[str, str]]:
        """Matrices that are not cut; the reason is that of the dim that fewest others share."""
        found: dict[str, str] = {}
        held = Counter(index.root() for _, _, index in self._held)
        for name, number in self.graph.names.items():
            value = self.graph.values[number]
            if value.kind == "parameter" and len(value.shape) > 1 and name not in cut.dims:
                reasons = [(held[index], index.why) for index in roots(self.rules.dims[number]) if index.why]
                reasons.sort(key=lambda pair: (pair[1] in GENERAL, *pair))  # ties are the same in every run
                found[name] = reasons[0][1] if reasons else "nothing uses it"
        return list(found.items())

    # ---- fused layers ----

    def fused(self) -> dict[str, list[int]]:
        """Layers that would have to be several: their output is split. Path -> output features of each."""
        found: dict[str, list[int]] = {}
        for path, module in self.modules.items():
            if can_split_heads(module) and self.runs(path) and module.num_heads % self.parts == 0:
                names = [self._first[id(parameter)] for parameter in module.parameters()]
                if all(len(self._owners[name]) == 1 for name in names):  # its parameters are its own
                    found[path] = []
            layer = layer_of(module)
            if (
                layer is None
                or layer.input_dim is None
                or not hasattr(module, "weight")
                or module.weight.dim() != 2
                or has_hooks(module)
            ):
                continue
            name = self._name(path, "weight")
            number = self.graph.names.get(name)
            if number is None or len(self._owners[name]) > 1 or name in self._outside or not self.runs(path):
                continue
            size = module.weight.shape[layer.output_dim or 0]
            for index in roots([self.rules.dims[number][layer.output_dim or 0]]):
                bounds = sorted(
                    size * above // below for above, below in index.marks if size * above % below == 0
                )
                if index.why and 0 < len(bounds) == len(index.marks) < SEGMENTS:
                    edges = [0, *bounds, size]
                    found[path] = [stop - first for first, stop in itertools.pairwise(edges)]
        return found
