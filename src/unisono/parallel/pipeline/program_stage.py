"""Runs the stages of a recorded program: see graph/stage_program.py for what each has."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.parallel.graph.call_structure import CallStructure, Slot, shown, slots_in
from unisono.parallel.graph.containers import cast, tensors_in
from unisono.parallel.graph.program import Ref, replayed, template
from unisono.parallel.graph.shapes import may_be_packed, single_texts
from unisono.parallel.graph.stage_program import Item, StageError, StageProgram, StageStart, choose_starts
from unisono.parallel.program_state import ModuleSettings, ProgramCache, kinds_of
from unisono.parallel.recording import ModelRecorder
from unisono.torch.control_data import on_every_rank, on_rank_0
from unisono.torch_internals.fake import is_fake, memory_of

if TYPE_CHECKING:
    from unisono.parallel.graph.program import Frame, Graph, Node, Value

__all__ = ["ProgramStage", "StagePrograms"]


class StagePrograms:
    """The programs of one model, each for inputs of some shapes: recorded where they first come.

    Args:
        model: the user's, before it is cut.
        dtype: in which it computes; None: in that of its parameters.
        masks: those of packed texts are recorded, though inputs say of none: a context axis reads them.
    Attributes:
        starts: where the stages but the first begin.
        first: the program of the sample.
    Raises:
        CaptureError, StageError: the program cannot be recorded, or cut into so many stages.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        stages: int,
        dtype: torch.dtype | None = None,
        *,
        masks: bool = False,
    ) -> None:
        self._masks = masks
        self._recorder = ModelRecorder(
            model, dtype, StageError, where="a pipeline", remedy="Write pieces=[...]"
        )
        self._name, self._dtype = self._recorder.name, dtype
        self._settings: ModuleSettings | None = None
        self._known: ProgramCache[StageProgram] = ProgramCache()
        self._current: Any = None
        with torch.enable_grad():
            graph = self._recorded(sample)
            self.starts: list[StageStart] = on_rank_0(lambda: choose_starts(graph, stages))
            self.first = StageProgram(graph, self._recorder.shapes.model, self.starts)
        self._sample = sample

    def _recorded(self, inputs: Any) -> Graph:
        with single_texts(not self._masks and not may_be_packed(inputs)):
            return self._recorder.record(cast(inputs, self._dtype))

    def note(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        """Follow `model`, which is cut now. `group`: the ranks of this pipeline."""
        self._group, self._settings = group, ModuleSettings(model, leave_out=self._recorder.changing)
        self._current = self._settings.now()
        with torch.enable_grad():
            self._known[self._key(self._sample)] = self.first
        del self._sample

    def follow_frozen(self, flags: Mapping[str, bool]) -> None:
        """Record with these flags (name -> whether it is trained) from now on."""
        self._recorder.train(flags)

    def confirm(self, batches: Iterable[Any]) -> None:
        """Record the programs of these inputs, where they are new. All ranks of a pipeline call this.

        Raises:
            StageError: they run another program, which cannot be cut as the sample's.
        """
        assert self._settings is not None
        self._current = self._settings.now()
        for inputs in batches:
            key = self._key(inputs)
            if not self._known.use(key):
                self._settings.give(self._recorder.shapes)
                self._known[key] = self._agreed(inputs)

    def of(self, inputs: Any) -> StageProgram:
        """The program of these inputs, which `confirm` has seen."""
        return self._known[self._key(inputs)]

    def _key(self, inputs: Any) -> Any:
        kinds = kinds_of(inputs, self._dtype)
        return kinds, self._current, self._recorder.trained, torch.is_grad_enabled()

    def _agreed(self, inputs: Any) -> StageProgram:
        """The program of these inputs, where all ranks have the same."""
        programs: list[StageProgram] = []

        def digest() -> str:
            program = StageProgram(self._recorded(inputs), self._recorder.shapes.model, self.starts)
            for number, stage in enumerate(program.stages):
                self.check_parameters(number, stage.parameters, stage.calls)
            programs.append(program)
            return program.digest

        if len({*on_every_rank(digest, self._group)}) > 1:
            raise StageError(
                f"ranks of one pipeline run different programs of {self._name}: their inputs have different "
                "shapes, or the model is not the same on all of them. run.shard(loader) gives each the same "
                "rows"
            )
        return programs[0]

    def check_parameters(self, number: int, parameters: set[str], calls: Iterable[str] = ()) -> None:
        """Refuse a stage that needs more than the sample's stage of this number has.

        Raises:
            StageError: it does; the text names what it needs.
        """
        first = self.first.stages[number]
        inside = tuple(f"{path}." for path in first.calls)  # where others stand for a fused layer
        missing = {name for name in parameters - first.parameters if not name.startswith(inside)}
        more = set(calls) - set(first.calls) | missing
        if more:
            raise StageError(
                f'this batch runs another program of {self._name} than the sample: stage {number} needs "'
                f'{min(more)}", which it does not have. Write parallelize(..., sample=inputs of a batch)'
            )


class ProgramStage(nn.Module):
    """One stage. Called with the values that come, and with the inputs of the micro-batch.

    The first stage also keeps the parameters that no stage needs, for weights and checkpoints.

    Args:
        model: the user's, cut on the tensor axis if the plan has one.
    """

    def __init__(self, programs: StagePrograms, stage: int, model: nn.Module) -> None:
        super().__init__()
        self._programs, self._stage = programs, stage
        self._runs: weakref.WeakKeyDictionary[StageProgram, _StageRun] = weakref.WeakKeyDictionary()
        here = programs.first.stages[stage]
        self._where: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self.called = nn.ModuleList(dict.fromkeys(self._where[path] for path in here.calls))
        self.bare = nn.Module()  # has parameters that operators take, and no module that the stage calls
        inside = {
            id(parameter): (module, leaf)
            for module in self.called.modules()
            for leaf, parameter in module.named_parameters(recurse=False)
        }
        unused = programs.first.unused if stage == 0 else frozenset()
        named = {name: self._slot(name) for name in sorted(here.parameters | unused)}
        self._bare = {
            name: f"p{number}"
            for number, (name, (owner, leaf)) in enumerate(named.items())
            if owner is not None and id(owner._parameters[leaf]) not in inside
        }
        # where parameters are that a called module has; the one that names a tied one may be in another stage
        self._inside = {
            name: inside[id(owner._parameters[leaf])]
            for name, (owner, leaf) in named.items()
            if owner is not None and name not in self._bare
        }
        self.take_bare()

    def program_of(self, inputs: Any) -> str:
        """A text that is equal on all ranks, and differs for inputs that run other programs."""
        return self._programs.of(inputs).digest

    def sends_unused(self, stage: int, inputs: Any) -> bool:
        """Whether a stage sends what may have no gradient."""
        program = self._programs.of(inputs)
        values, sure = program.graph.values, program.surely_used
        return any(values[n].differentiable and n not in sure for n in program.stages[stage].goes)

    def _slot(self, name: str) -> tuple[nn.Module | None, str]:
        """The module that has a parameter; None: others stand for the one that had it."""
        path, _, leaf = name.rpartition(".")
        owner = self._where.get(path)
        return (owner if owner is not None and owner._parameters.get(leaf) is not None else None), leaf

    @property
    def owners(self) -> list[nn.Module]:
        """The modules that have the bare parameters."""
        return [owner for name in self._bare if (owner := self._slot(name)[0]) is not None]

    def take_bare(self) -> None:
        """Have the bare parameters as they are now in their modules."""
        for name, short in self._bare.items():
            owner, leaf = self._slot(name)
            assert owner is not None
            self.bare.register_parameter(short, owner._parameters[leaf])

    def return_bare(self) -> None:
        """Put what stands for bare parameters now into their modules."""
        for name, short in self._bare.items():
            owner, leaf = self._slot(name)
            assert owner is not None
            owner._parameters[leaf] = self.bare._parameters[short]

    def module(self, path: str) -> nn.Module:
        """The module of a path."""
        return self._where[path]

    def held(self, name: str) -> Any:
        """A parameter or buffer as it is now."""
        if name in self._bare:
            return getattr(self.bare, self._bare[name])
        path, _, leaf = name.rpartition(".")
        return getattr(*self._inside.get(name, (self._where.get(path), leaf)))

    def forward(self, came: Sequence[Tensor], inputs: Any) -> Any:
        program = self._programs.of(inputs)
        run = self._runs.get(program)
        if run is None:
            run = self._runs[program] = _StageRun(program, self._stage, self)
        return run(came, inputs)


class _StageRun:
    """What one stage of one program runs: its calls, prepared once."""

    def __init__(self, program: StageProgram, number: int, stage: ProgramStage) -> None:
        self._graph, self._written, self._stage = program.graph, program.written, stage
        self._here = program.stages[number]
        self._given = [value.number for value in program.graph.values if value.kind == "input"]
        self._steps = [*zip(map(self._step, self._here.items), self._last_uses(), strict=True)]
        self._result = template(program.graph.result) if number + 1 == len(program.stages) else None

    def __call__(self, came: Sequence[Tensor], inputs: Any) -> Any:
        here = self._here
        values: dict[int, Any] = dict(zip(self._given, tensors_in(inputs), strict=True))
        values.update(zip(here.comes, came, strict=True))
        values.update((number, values[number].clone()) for number in here.fresh)

        def resolve(ref: Ref) -> Any:
            found = values.get(ref.value)
            return self._elsewhere(ref.value) if found is None else found

        for step, done in self._steps:
            step(values, resolve)
            for number in done:
                values.pop(number, None)
        if self._result is not None:
            return self._result(resolve)
        return tuple(values[n].view_as(values[n]) if n in here.comes else values[n] for n in here.goes)

    def _elsewhere(self, number: int) -> Any:
        value = self._graph.values[number]
        if value.kind == "constant":
            found = self._graph.constants[number]
            return getattr(self._stage.module(found[0]), found[1]) if isinstance(found, tuple) else found
        if value.kind in ("parameter", "buffer"):
            return self._stage.held(value.name)
        raise AssertionError(f"value {number} is not on this stage")

    def _step(self, item: Item) -> Callable[[dict[int, Any], Callable[[Ref], Any]], None]:
        """What runs an item: it takes and adds values by their numbers."""
        what = item.frame or item.node
        assert what is not None
        run = self._operator(item.node) if item.node is not None else self._call(item)
        if what.grad:
            return run

        def without_gradients(values: dict[int, Any], resolve: Callable[[Ref], Any]) -> None:
            with torch.no_grad():
                run(values, resolve)

        return without_gradients

    def _operator(self, node: Node) -> Callable[[dict[int, Any], Callable[[Ref], Any]], None]:
        op, outputs = replayed(node, self._graph, self._written), node.outputs
        args, named = template(node.args), template(node.named)

        def run(values: dict[int, Any], resolve: Callable[[Ref], Any]) -> None:
            output = op(*args(resolve), **named(resolve))
            flat = output if isinstance(output, (tuple, list)) else (output,)
            values.update((n, t) for n, t in zip(outputs, flat, strict=True) if n is not None)

        return run

    def _call(self, item: Item) -> Callable[[dict[int, Any], Callable[[Ref], Any]], None]:
        frame = item.frame
        assert frame is not None
        arguments = template(frame.arguments)
        renames = [(after, Ref(before)) for before, after in item.renames]
        results = _ModuleResults(frame, self._graph, item.renames)

        def run(values: dict[int, Any], resolve: Callable[[Ref], Any]) -> None:
            args, named = arguments(resolve)
            output = self._stage.module(frame.path)(*args, **named)
            values.update(results.numbered(output, values))
            values.update((after, resolve(before)) for after, before in renames)

        return run

    def _last_uses(self) -> list[list[int]]:
        """For each item the values that nothing takes after it."""
        seen = set(self._here.goes) | self._here.result
        found: list[list[int]] = []
        for item in reversed(self._here.items):
            mine = {*item.reads, *item.makes} - seen
            seen |= mine
            found.append(sorted(mine))
        return found[::-1]


# ---- what a module returns ----


class _ModuleResults:
    """What one call of a module returns, as values of the recorded program: another result raises.

    The program knows a tensor by its number, and a module may return one that the program had before: what it
    takes, or one tensor at two places. Such a result has to be that tensor again, because operators of the
    stage take it by the same number.

    Args:
        frame: the call.
        renames: (value, value after a write in place) of what the module writes into.
    """

    def __init__(self, frame: Frame, graph: Graph, renames: Iterable[tuple[int, int]]) -> None:
        self._path = frame.path
        self._wanted = dict(zip(frame.slots[1], frame.outputs, strict=True))
        self._values = {number: graph.values[number] for number in frame.outputs}
        written = {after: before for before, after in renames}
        first: dict[int, Slot] = {}
        self._given: list[tuple[Slot, int]] = []  # with the value that this was before the call
        self._again: list[tuple[Slot, Slot]] = []  # with the place where it was before
        for slot, number in self._wanted.items():
            before = written.get(number, number)
            if not frame.first <= graph.values[before].node < frame.last:
                self._given.append((slot, before))
            elif number in first:
                self._again.append((slot, first[number]))
            first.setdefault(number, slot)

    def numbered(self, output: Any, before: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The tensors of `output` by their numbers.

        Args:
            before: the values before the call, by their numbers.
        Raises:
            RuntimeError: it returned other things when it was recorded.
        """
        found = dict(slots_in(output))
        if found.keys() != self._wanted.keys():
            sides = [
                CallStructure(frozenset(slots), frozenset(slots), frozenset())
                for slots in (found, self._wanted)
            ]
            raise self._error(*sides[0].difference(sides[1]))
        for slot, number in self._wanted.items():
            if not _fits(found[slot], self._values[number]):
                here, there = _kind(found[slot]), _kind(self._values[number])
                raise self._error(f"a tensor of {here} at {shown(slot)}", f"one of {there}")
        for slot, number in self._given:
            if number in before and not _is(found[slot], before[number]):
                raise self._error(
                    f"a tensor of its own at {shown(slot)}", "there one that was there before the call"
                )
        for slot, other in self._again:
            if not _is(found[slot], found[other]):
                raise self._error(f"two tensors at {shown(other)} and {shown(slot)}", "one at both")
        return {number: found[slot] for slot, number in self._wanted.items()}

    def _error(self, here: str, there: str) -> RuntimeError:
        return RuntimeError(
            f'"{self._path}" returns {here}; the program that was recorded has {there}. The stages of a '
            "pipeline follow that program: something beside inputs, shapes and settings decides what the "
            "module runs. Let it return the same in every step"
        )


def _is(tensor: Tensor, other: Tensor) -> bool:
    """Whether both are one tensor for the program. A wrapper may have made another object, or a copy."""
    if tensor is other:
        return True
    if tensor.requires_grad != other.requires_grad or tensor.shape != other.shape:
        return False
    alike = tensor.storage_offset() == other.storage_offset() and tensor.stride() == other.stride()
    if is_fake(tensor) or tensor.is_meta or (alike and memory_of(tensor)[1] == memory_of(other)[1]):
        return True
    return torch.equal(tensor.nan_to_num(), other.to(tensor.dtype).nan_to_num())


def _fits(tensor: Tensor, value: Value) -> bool:
    """Whether a tensor can be a recorded one, or a rank's part of it. A part has no size that is larger, so
    no tensors of several shapes have changed places if all fit."""
    sizes = [*zip(tensor.shape, value.shape, strict=False)]
    same = tensor.dim() == len(value.shape) and tensor.is_floating_point() == value.dtype.is_floating_point
    return same and all(here <= there for here, there in sizes)


def _kind(tensor: Tensor | Value) -> str:
    return f"shape {[*tensor.shape]} and type {str(tensor.dtype).removeprefix('torch.')}"
