"""Runs the stages of a recorded program: see graph/stage_program.py for what each has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.parallel.graph.call_structure import Side
from unisono.parallel.graph.containers import mapped, tensors_in
from unisono.parallel.graph.program import Ref, replayed
from unisono.parallel.graph.slots import slots_in
from unisono.parallel.graph.stage_choice import StageError, StageStart, choose_starts
from unisono.parallel.graph.stage_program import Item, StageProgram
from unisono.parallel.program_state import ModuleSettings, kinds_of
from unisono.parallel.recording import ModelRecorder

if TYPE_CHECKING:
    from unisono.parallel.graph.program import Frame, Graph
    from unisono.parallel.graph.stage_program import Stage

__all__ = ["ProgramStage", "StagePrograms"]

PROGRAMS = 256  # that are kept; each belongs to inputs of other shapes, or other settings of modules


class StagePrograms:
    """The programs of one model, each for inputs of some shapes: recorded where they first come.

    Args:
        model: the user's, before it is cut.
        dtype: in which it computes; None: in that of its parameters.
    Attributes:
        starts: where the stages but the first begin.
        first: the program of the sample.
    Raises:
        CaptureError, StageError: the program cannot be recorded, or cut into so many stages.
    """

    def __init__(self, model: nn.Module, sample: Any, stages: int, dtype: torch.dtype | None = None) -> None:
        self._recorder = ModelRecorder(
            model, dtype, StageError, where="a pipeline", remedy="Write pieces=[...]"
        )
        self._name, self._dtype = self._recorder.name, dtype
        self._settings: ModuleSettings | None = None
        self._known: dict[Any, StageProgram] = {}
        self._current: Any = None
        told: list[Any] = [None]
        with torch.enable_grad():
            graph = self._recorded(sample)
            if dist.get_rank() == 0:
                try:
                    told = [choose_starts(graph, stages)]
                except StageError as error:
                    told = [str(error)]
            dist.broadcast_object_list(told, src=0)
            if isinstance(told[0], str):
                raise StageError(told[0])
            self.starts: list[StageStart] = told[0]
            self.first = StageProgram(graph, self._recorder.shapes.model, self.starts)
        self._sample = sample

    def _recorded(self, inputs: Any) -> Graph:
        if self._dtype is not None:
            inputs = mapped(inputs, lambda t: t.to(self._dtype) if t.is_floating_point() else t)
        return self._recorder.record(inputs)

    def note(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        """Follow `model`, which is cut now. `group`: the ranks of this pipeline."""
        self._group, self._settings = group, ModuleSettings(model, leave_out=self._recorder.changing)
        self._known[kinds_of(self._sample, self._dtype), self._settings.now(), True] = self.first
        del self._sample

    def confirm(self, batches: Iterable[Any]) -> None:
        """Record the programs of these inputs, where they are new. All ranks of a pipeline call this.

        Raises:
            StageError: they run another program, which cannot be cut as the sample's.
        """
        assert self._settings is not None
        self._current = self._settings.now()
        for inputs in batches:
            key = kinds_of(inputs, self._dtype), self._current, torch.is_grad_enabled()
            if key in self._known:
                continue
            self._settings.give(self._recorder.shapes)
            program = StageProgram(self._recorded(inputs), self._recorder.shapes.model, self.starts)
            self._check(program)
            while len(self._known) >= PROGRAMS:
                self._known.pop(next(iter(self._known)))
            self._known[key] = program

    def of(self, inputs: Any) -> StageProgram:
        """The program of these inputs, which `confirm` has seen."""
        return self._known[kinds_of(inputs, self._dtype), self._current, torch.is_grad_enabled()]

    def _check(self, program: StageProgram) -> None:
        for number, stage in enumerate(program.stages):
            self.check_parameters(number, stage.parameters, stage.calls)
        digests: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(digests, program.digest, group=self._group)
        if any(digest != digests[0] for digest in digests):
            raise StageError(
                f"ranks of one pipeline run different programs of {self._name}: their inputs have different "
                "shapes, or the model is not the same on all of them. run.shard(loader) gives each the same "
                "rows"
            )

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

    def held(self, name: str) -> Any:
        """A parameter or buffer as it is now."""
        if name in self._bare:
            return getattr(self.bare, self._bare[name])
        path, _, leaf = name.rpartition(".")
        return getattr(*self._inside.get(name, (self._where.get(path), leaf)))

    def forward(self, came: Sequence[Tensor], inputs: Any) -> Any:
        program = self._programs.of(inputs)
        stage = program.stages[self._stage]
        values: dict[int, Any] = {}
        given = (value.number for value in program.graph.values if value.kind == "input")
        values.update(zip(given, tensors_in(inputs), strict=True))
        values.update(zip(stage.comes, came, strict=True))
        values.update((number, values[number].clone()) for number in stage.fresh)
        resolve = _Values(values, program, self)
        for item, done in zip(stage.items, self._last_uses(stage), strict=True):
            resolve.run(item)
            for number in done:
                values.pop(number, None)
        if self._stage + 1 == len(program.stages):
            return mapped(program.graph.result, resolve, Ref)
        return tuple(values[n].view_as(values[n]) if n in stage.comes else values[n] for n in stage.goes)

    @staticmethod
    def _last_uses(stage: Stage) -> list[list[int]]:
        """For each item the values that nothing takes after it."""
        if stage.drops is None:
            seen = set(stage.goes) | stage.result
            stage.drops = []
            for item in reversed(stage.items):
                mine = {*item.reads, *item.makes} - seen
                seen |= mine
                stage.drops.insert(0, sorted(mine))
        return stage.drops


class _Values:
    """The tensors of one run of a stage, by their numbers in the graph."""

    def __init__(self, values: dict[int, Any], program: StageProgram, stage: ProgramStage) -> None:
        self._values, self._graph, self._stage = values, program.graph, stage
        self._written = program.written

    def __call__(self, ref: Ref) -> Any:
        found = self._values.get(ref.value)
        return self._elsewhere(ref.value) if found is None else found

    def _elsewhere(self, number: int) -> Any:
        value = self._graph.values[number]
        if value.kind == "constant":
            found = self._graph.constants[number]
            return getattr(self._stage._where[found[0]], found[1]) if isinstance(found, tuple) else found
        if value.kind in ("parameter", "buffer"):
            return self._stage.held(value.name)
        raise AssertionError(f"value {number} is not on this stage")

    def run(self, item: Item) -> None:
        what = item.frame or item.node
        assert what is not None
        context = contextlib.nullcontext() if what.grad else torch.no_grad()
        with context:
            if item.node is not None:
                args, named = mapped((item.node.args, item.node.named), self, Ref)
                output = replayed(item.node, self._graph, self._written)(*args, **named)
                flat = output if isinstance(output, (tuple, list)) else (output,)
                self._values.update(
                    (n, t) for n, t in zip(item.node.outputs, flat, strict=True) if n is not None
                )
                return
            assert item.frame is not None
            args, named = mapped(item.frame.arguments, self, Ref)
            output = self._stage._where[item.frame.path](*args, **named)
            self._values.update(_returned(item.frame, output))
            self._values.update((after, self(Ref(before))) for before, after in item.renames)


def _returned(frame: Frame, output: Any) -> dict[int, Tensor]:
    """What a module has returned, by the numbers in the graph.

    Raises:
        RuntimeError: it returned other things when it was recorded.
    """
    found, wanted = dict(slots_in(output)), frame.slots[1]
    if found.keys() == set(wanted):
        return {number: found[slot] for slot, number in zip(wanted, frame.outputs, strict=True)}
    sides = [Side(frozenset(slots), frozenset(slots), frozenset()) for slots in (found, wanted)]
    here, there = sides[0].difference(sides[1])
    raise RuntimeError(
        f'"{frame.path}" returns {here}; the program that was recorded has {there}. The stages of a pipeline '
        "follow that program: something beside inputs, shapes and settings decides what the module runs. Let "
        "it return the same in every step"
    )
