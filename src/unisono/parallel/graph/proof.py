"""From a model and a sample to a cut that is proved: record, choose, run the parts, until both agree."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from unisono.parallel.program_state import ModuleSettings
from unisono.torch_internals.training import module_at

from .capture import CaptureError, Recorder, Shapes
from .choice import SplitChoice
from .cut import Cut
from .fused import NO_SUM, NOT_NAMED, Hints, Split, layer_of, of_parts, split_
from .local import compare
from .local_model import ProgramMismatch
from .program import Node
from .sequence import Key, Stays, settle

Forward = Callable[[nn.Module, Any, Any], Any]  # model, pieces, inputs -> output
LESS_TELLING = (NOT_NAMED, NO_SUM, "it is a dimension of the model's input", "")  # other reasons tell more
LARGE = 0.05  # of all parameters: a layer or table as large is cut although its output has to be gathered
ROUNDS = 40


def prove(
    model: nn.Module | Shapes,
    sample: Any,
    parts: int,
    *,
    forward: Forward | None = None,
    kinds: dict[str, str] | None = None,
    opened: frozenset[str] = frozenset(),
    only: Cut | None = None,
    sequence: bool = False,
) -> Cut:
    """Choose the cut of `model` that the program on `sample` proves; at worst it cuts nothing.

    Args:
        model: or its copy without values, with what goes with it.
        forward: runs a copy of the model, and of what goes with it, on inputs; None: calls the model.
        kinds: the caller's cuts, path of a module -> how it is cut, or "whole". If all are "whole", they are
            exceptions from what the program decides; else nothing else is cut.
        opened: modules that span stages of a pipeline: what they do by themselves is whole.
        only: nothing else than this cut does is cut.
        sequence: what computes position by position is cut along the sequence.
    Raises:
        CaptureError: the model cannot be recorded, or not cut as `kinds` say, or `parts` does not divide its
            sequences.
    """
    shapes = model if isinstance(model, Shapes) else Shapes(model)
    kinds = kinds or {}
    given = {path: kind for path, kind in kinds.items() if kind != "whole"}
    search = _ProofSearch(shapes, sample, parts, forward, opened, given)
    for name, value in [*shapes.model.named_parameters(), *shapes.model.named_buffers()]:
        if kinds.get(name.rpartition(".")[0]) == "whole":
            why = f'cuts= says that "{name.rpartition(".")[0]}" is whole'
            search.banned |= {(name, dim): why for dim in range(value.dim())}
    cut = search.run() if only is None else search.again(only)
    if given and only is None:
        search.check_given()
    return search.scattered(only) if sequence and cut.dims else cut


class _ProofSearch:
    def __init__(
        self,
        shapes: Shapes,
        sample: Any,
        parts: int,
        forward: Forward | None,
        opened: frozenset[str],
        given: dict[str, str],
    ) -> None:
        self._opened, self._given = opened, given
        self._uncut, self._sample, self._parts, self._forward = shapes, sample, parts, forward
        self._fused: dict[str, list[int]] = {}
        self._tried: set[str] = set()  # fused layers that gain nothing
        if given:  # no other layer becomes several than those named, and attention around them
            around = {path.rpartition(".")[0] for path in given}
            self._tried = {path for path, _ in shapes.model.named_modules()} - given.keys() - around
        self.banned: dict[tuple[str, int], str] = {}
        self._gathered: set[str] = set()
        self._kept: set[str] = set()  # split in the model already

    def again(self, cut: Cut) -> Cut:
        """What of `cut` holds for this program."""
        self._fused, self._kept = dict(cut.fused), set(cut.fused)
        self._tried = {path for path, _ in self._uncut.model.named_modules()}
        self._gathered = {path for path, kind in cut.modules.items() if kind == "column, gathered"}
        for name, value in [*self._shapes().model.named_parameters(), *self._shapes().model.named_buffers()]:
            for dim in range(value.dim()):
                if cut.dims.get(name) != dim:
                    self.banned[name, dim] = "the cut leaves it whole"
        return self.run()

    def run(self) -> Cut:
        choice = self._recorded()
        for _ in range(ROUNDS):
            fused = {path: sizes for path, sizes in choice.fused().items() if path not in self._tried}
            if fused:
                choice = self._split(choice, fused)
                continue
            useless = [
                path
                for path in self._fused
                if path not in self._kept and not any(name.startswith(f"{path}.") for name in choice.cut.dims)
            ]
            if useless:
                self._fused = {path: sizes for path, sizes in self._fused.items() if path not in useless}
                choice = self._recorded()
                continue
            gathered = set() if self._given else self._large(choice) - self._gathered - self._tried
            if gathered:
                self._gathered |= gathered
                choice = self._choose(choice.graph)
                continue
            try:
                shapes = self._shapes()
                compare(choice, shapes, self._sample, self._run(shapes))
            except ProgramMismatch as mismatch:
                self._ban(choice, mismatch)
                choice = self._choose(choice.graph)
                continue
            choice.cut.fused = dict(self._fused)
            self._proved = choice
            return choice.cut
        if self._given:
            raise CaptureError("the search for a cut as cuts= says did not end: leave it out", final=True)
        return Cut(self._parts, whole=[("", "the search for a cut did not end")])

    def check_given(self) -> None:
        """Raise CaptureError unless `run` has cut the caller's layers, each as it says, and no other one."""
        choice, kinds = self._proved, of_parts(self._copy, self._given)
        refused = {
            path: " and ".join(dict.fromkeys(index.why for index in choice.named(path, kind) if index.why))
            for path, kind in kinds.items()
            if choice.cut.modules.get(path) != kind
        }
        if refused:
            path = min(refused, key=lambda path: refused[path] in LESS_TELLING)
            raise CaptureError(_refusal(choice, path, kinds[path], refused[path]), final=True)
        for path, kind in choice.cut.modules.items():
            if path not in kinds:
                above = path.rpartition(".")[0]
                known = above if isinstance(choice.modules[above], Split) else path
                raise CaptureError(
                    f'cuts= does not name "{known}", which shares features with a layer that it names, and '
                    f'so is cut, too. Write cuts={{..., "{known}": "{kind}"}}',
                    final=True,
                )

    def scattered(self, only: Cut | None) -> Cut:
        """The cut that `run` has found, and along the sequence what its program proves."""
        choice, stays, positions = self._proved, dict[Key, str](), None
        for _ in range(ROUNDS):
            try:
                choice.cut = replace(choice.cut, sums=[], moves={}, draws=[])
                positions = settle(choice, choice.cut, stays)
                assert positions is not None
                if positions.indivisible:
                    raise CaptureError(
                        f"Plan(sequence=True): tensor={self._parts} does not divide {positions.indivisible} "
                        f"positions. Pad the sequences to a multiple of {self._parts}, or leave out "
                        "sequence=",
                        final=True,
                    )
                if only is not None:
                    positions.only(choice.cut, only)
                shapes = self._shapes()
                compare(choice, shapes, self._sample, self._run(shapes), positions)
            except ProgramMismatch as mismatch:
                assert positions is not None
                stays |= dict.fromkeys(positions.before(mismatch.node), mismatch.why)
            except Stays as more:
                stays |= dict.fromkeys(more.keys, more.why)
            else:
                return choice.cut
        raise AssertionError("the search for what is cut along the sequence did not end")

    def _split(self, choice: SplitChoice, fused: dict[str, list[int]]) -> SplitChoice:
        """Split layers, those of one name at a time; the program may want them as they are."""
        named: dict[str, dict[str, list[int]]] = {}
        for path, sizes in fused.items():
            named.setdefault(re.sub(r"\b\d+\b", "*", path), {})[path] = sizes
        self._tried |= set(fused)
        for group in named.values():
            before = self._fused
            self._fused = self._split_again(choice, group)
            try:
                choice = self._recorded()
            except CaptureError:
                self._fused = before
        return choice if self._fused == self._of else self._recorded()

    def _split_again(self, choice: SplitChoice, group: dict[str, list[int]]) -> dict[str, list[int]]:
        """What is split when `group` is, too. A part that is to be split becomes more parts of its layer, so
        no split layer is inside another one. The parts of attention stay as they are."""
        found = dict(self._fused)
        for above in {path.rpartition(".")[0] for path in group}:
            layer = choice.modules[above]
            if not isinstance(layer, Split):
                continue
            if found[above]:
                sizes = zip(layer.names, found[above], strict=True)
                found[above] = [more for name, size in sizes for more in group.get(f"{above}.{name}", [size])]
            group = {path: sizes for path, sizes in group.items() if path.rpartition(".")[0] != above}
        return found | group

    def _shapes(self) -> Shapes:
        shapes = Shapes(self._uncut)
        with shapes.mode:
            for path, sizes in self._fused.items():
                split_(shapes.model, path, sizes)
        return shapes

    def _run(self, shapes: Shapes) -> Callable[[Any], Any] | None:
        run = self._forward
        return None if run is None else lambda inputs: run(shapes.model, shapes.also, inputs)

    def _recorded(self) -> SplitChoice:
        shapes = self._shapes()
        before = ModuleSettings(shapes.model).now()
        graph = Recorder(shapes).run(shapes.model, self._sample, self._run(shapes))
        changed = before ^ (after := ModuleSettings(shapes.model).now())
        if changed:  # such as the note that hooks are installed
            again = Recorder(shapes).run(shapes.model, self._sample, self._run(shapes))
            moving = {item[0] for item in after ^ ModuleSettings(shapes.model).now()}
            if graph.operators == again.operators:
                self._uncut.set_once |= {item[0] for item in changed} - moving
        self._copy, self._of = shapes.model, dict(self._fused)
        return self._choose(graph)

    def _choose(self, graph: Any) -> SplitChoice:
        return SplitChoice(graph, self._copy, self._parts, self._hints(), self.banned, self._opened)

    def _hints(self) -> Hints:
        if self._given:
            kinds = of_parts(self._copy, self._given)
            rows, gathered = (
                frozenset(path for path in kinds if kinds[path] == kind)
                for kind in ("vocabulary", "column, gathered")
            )
            return Hints(rows, gathered, kinds)
        tables = self._large_of(nn.Embedding)
        weights = {id(module_at(self._copy, path).weight) for path in tables}
        tied = {
            path
            for path, module in self._copy.named_modules()
            if isinstance(module, nn.Linear) and layer_of(module) is not None and id(module.weight) in weights
        }
        return Hints(frozenset(tables), frozenset(tied | self._gathered))

    def _large(self, choice: SplitChoice) -> set[str]:
        """Whole layers with many of the parameters."""
        return {p for p in self._large_of(nn.Linear) if choice.runs(p) and p not in choice.cut.modules}

    def _large_of(self, kind: type[Any]) -> set[str]:
        """Layers of a kind with many of the parameters, whose rows can be cut."""
        total = sum(parameter.numel() for parameter in self._copy.parameters())
        return {
            path
            for path, module in self._copy.named_modules()
            if isinstance(module, kind)
            and layer_of(module) is not None
            and module.weight.numel() >= LARGE * total
            and module.weight.shape[0] % self._parts == 0
            and (f"{path}.weight", 0) not in self.banned
        }

    def _ban(self, choice: SplitChoice, mismatch: ProgramMismatch) -> None:
        """What is cut at this operator stays whole from now on."""
        nodes: list[Node] = [*choice.graph.nodes[mismatch.node.number :: -1], *choice.graph.nodes]
        for node in nodes:
            numbers = node.made
            here = {index for number in [*numbers, *node.taken] for index in choice.cuts(number)}
            if here:
                for key in choice.held(here):
                    self.banned[key] = mismatch.why
                return
        raise AssertionError(f"nothing is cut, and yet {mismatch.why}")


def _refusal(choice: SplitChoice, path: str, kind: str, why: str) -> str:
    """Why a layer cannot be cut as the caller says, and what to write."""
    what = f'"{path}" ({type(choice.modules[path]).__name__})'
    if not choice.runs(path):
        return f'the model does not call {what}, so it cannot be cut by {kind}: write "whole"'
    if not choice.named(path, kind):
        return f'{what} is no layer that can be cut by {kind}: write "whole"'
    todo = 'Write "whole" there and for the layers that share its features, or leave out cuts='
    if why == NO_SUM:
        todo = 'Write "row" for the layer that takes its features, or "column, gathered", or leave out cuts='
    return (
        f"tensor={choice.parts}: {what} cannot be cut by {kind}: {why or NO_SUM}. {todo}: then the cut "
        "follows from the program"
    )
