"""The programs of a model: recorded on inputs of a run, proved, kept by what decides which one it runs.

The cut of the tensor axis, the stages of a pipeline and the positions of a context axis are each proved from
a program. One cache has what was proved; its key is the kinds of inputs, the settings of modules, and the
loss with which a program ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from unisono.torch.control_data import on_every_rank, on_rank_0
from unisono.torch_internals.fake import memory_of

from .context.call import ContextError
from .context.cut_parts import CutParts
from .context.loss_numbers import LossNumbers
from .context.program import ContextAxis, ContextProgram
from .failures import recorded_remedy
from .graph.capture import CaptureError, Recorder, Shapes, call
from .graph.containers import cast, strange_in, tensors_in
from .graph.cut import Cut
from .graph.fused import is_hooked
from .graph.program import Graph, Ref
from .graph.shapes import may_be_packed, single_texts
from .graph.stage_program import Stage, StageError, StageProgram, StageStart, choose_starts
from .mesh import PlanMesh
from .program_state import FAR, ModuleSettings, ProgramCache, kinds_of, set_counter
from .sharded_parameters import TYPES
from .tensor_moves import TensorAxis
from .tensor_parallel import axis_of

Loss = Callable[[Any, Any], Any]
DIFFERENT = (
    "their inputs have different shapes, or the model is not the same on all of them. run.shard(loader) "
    "gives each the same rows"
)


class Prover:
    """What is proved of the programs of one model.

    Attributes:
        shapes: its copy of the model.
        of_sample: what is proved of the sample; None: nothing yet.
        left_out: attributes (path, name) that are no settings.
    """

    shapes: Shapes
    of_sample: Any = None
    left_out: Iterable[tuple[str, str]] = ()

    def key(self, inputs: Any, _targets: Any, _loss: Loss | None) -> Any:
        """What tells one program from another, beside settings."""
        return kinds_of(inputs)

    def prove(self, inputs: Any, targets: Any, loss: Loss | None) -> Any:
        """Prove it for these inputs. `loss`: with which the program ends; None: with the model's output."""
        raise NotImplementedError

    def watch(self, inputs: Any, targets: Any, loss: Loss | None) -> Callable[[], object]:
        """What tells, when `shapes` are changed afterwards, what is wrong then; nothing: it is as it was."""
        raise NotImplementedError


class ModelPrograms:
    """All that is proved of the programs of one model: in one bounded cache, confirmed once a step.

    Args:
        recorded: the programs that run in place of the model's forward; None: it runs itself.
        others: what else is proved.
    """

    def __init__(self, recorded: RecordedPrograms | None = None, *others: Prover | None) -> None:
        self.recorded = recorded
        self._provers = [one for one in (recorded, *others) if one is not None]
        self._known: ProgramCache[Any] = ProgramCache()
        self._settings: ModuleSettings | None = None
        self._current: Any = None

    @property
    def first(self) -> StageProgram | None:
        """The program of the sample, from which stages are cut; None: they are not."""
        return None if self.recorded is None else self.recorded.first

    def note(self, model: nn.Module, sample: Any) -> None:
        """Follow `model`, which is built now. What is not known of the sample yet is proved."""
        if not self._provers:
            return
        left_out = {at for prover in self._provers for at in prover.left_out}
        self._settings = ModuleSettings(model, left_out, counters=True)
        self._current = self._settings.now()
        with torch.enable_grad():
            for prover in self._provers:
                if prover.of_sample is not None:
                    self._known[self._key(prover, sample, (), None)] = prover.of_sample
            if sample is not None:
                self.confirm([(sample, ())], None)

    def follow_frozen(self, flags: Mapping[str, bool]) -> None:
        """Record with these flags (name -> whether it is trained) from now on."""
        if self.recorded is not None:
            self.recorded.train(flags)

    def confirm(self, micros: Iterable[tuple[Any, Any]], loss: Loss | None) -> None:
        """Prove the programs of these micro-batches, where they are new.

        All ranks that share a model or its sequences call this.

        Args:
            loss: of an output and targets; None: the programs end with the output.
        Raises:
            ValueError: they cannot be cut as the sample's, or not be recorded.
        """
        if (settings := self._settings) is None:
            return  # nothing depends on a program
        for given in ((*micro, loss) for micro in micros):
            self._current = settings.now()
            if settings.fresh:
                for prover in self._provers:
                    settings.check_counters(prover.shapes, prover.watch(*given))
                self._current = settings.now()
            for prover in self._provers:
                if not self._known.use(self._key(prover, *given)):
                    settings.give(prover.shapes)
                    proved = prover.prove(*given)
                    self._known[self._key(prover, *given)] = proved  # it tells what the loss reads, too

    def of(self, inputs: Any, targets: Any = (), loss: Loss | None = None) -> StageProgram:
        """The program of a micro-batch, which `confirm` has seen."""
        assert self.recorded is not None
        found: StageProgram = self._known[self._key(self.recorded, inputs, targets, loss)]
        return found

    def _key(self, prover: Prover, *given: Any) -> Any:
        return type(prover), prover.key(*given), self._current, torch.is_grad_enabled()

    @property
    def axis(self) -> ContextAxis | None:
        """The context axis, whose programs end with the loss; None: sequences are whole."""
        return None if self.recorded is None else self.recorded.axis

    def read(self, loss: Loss) -> int:
        """Follow the numbers that the loss reads now; return what must be equal on all ranks."""
        numbers = None if self.recorded is None else self.recorded.numbers
        return 0 if numbers is None else numbers.read(loss)

    @property
    def notes(self) -> list[str]:
        """What a context axis does not cut, though it has the sequence, and why."""
        programs = [one for one in self._known.values() if isinstance(one, ContextProgram)]
        found = {note: why for program in programs for note, why in program.notes.items()}
        return [f"{note}: {why or 'no rule follows it'}" for note, why in found.items()]


# ---- programs that run ----


class RecordedPrograms(Prover):
    """The programs that a model runs in place of its forward: stages of a pipeline, positions of a sequence.

    Args:
        model: the user's, before it is cut or wrapped.
        output: what the loss gets of what the model returns.
        sample: from whose program stages are cut.
    Attributes:
        starts: where the stages but the first begin.
        first: the program of the sample, whose modules are called; None: there is one stage.
        axis: that shares sequences; None: they are whole.
        numbers: what the loss reads, with which the programs of a context axis end.
    Raises:
        CaptureError, StageError: the program cannot be recorded, or cut into so many stages.
        ContextError: the model has hooks, which a run of operators does not call.
    """

    def __init__(self, model: nn.Module, mesh: PlanMesh, output: Callable[[Any], Any], sample: Any) -> None:
        plan = mesh.plan
        self._mesh, self._output, self._dtype = mesh, output, TYPES[plan.precision] if plan.low else None
        self.axis, self.numbers = None, None
        if plan.context > 1:
            _check_hooks(model)
            ranks = TensorAxis(mesh.context, mesh.index("context"), plan.context)
            self.axis, self.numbers = ContextAxis(ranks, mesh.axes.device_type), LossNumbers()
        self._recorder = self._recorder_of(model)
        self.starts: list[StageStart] = []
        self.first: StageProgram | None = None
        if plan.pipeline > 1:
            with torch.enable_grad():
                graph = self._recorded(sample, (), None)
                self.starts = on_rank_0(lambda: choose_starts(graph, plan.stages))
                self.first = StageProgram(graph, self.shapes.model, self.starts)
        self.left_out = self._recorder.changing
        self.of_sample = self.first if self.axis is None else None

    def _recorder_of(self, model: nn.Module, parts: CutParts | None = None) -> ModelRecorder:
        if self.axis is None:
            return ModelRecorder(
                model, self._dtype, StageError, where="a pipeline", remedy="Write pieces=[...]"
            )
        return ModelRecorder(
            model, self._dtype, ContextError, where="a context axis", remedy="Leave out context=",
            attention=True, prepare=None if parts is None else parts.prepare,
        )  # fmt: skip

    @property
    def shapes(self) -> Shapes:  # type: ignore[override]
        """The model's copy."""
        return self._recorder.shapes

    def cut(self, model: nn.Module, cut: Cut) -> None:
        """Record `model` as the tensor axis cuts it, where programs have this rank's parts."""
        if self.axis is not None:
            self.axis.parts = CutParts(cut, axis_of(self._mesh.part("tensor")))
            self._recorder = self._recorder_of(model, self.axis.parts)

    def train(self, flags: Mapping[str, bool]) -> None:
        """Record with these flags (name -> whether it is trained) from now on."""
        self._recorder.train(flags)

    def key(self, inputs: Any, targets: Any, loss: Loss | None) -> Any:
        """Stages get inputs in the type in which they compute."""
        trained = self._recorder.trained
        if self.numbers is None:
            return kinds_of(inputs, self._dtype), trained
        asked = None if loss is None else (kinds_of(targets), loss, self.numbers.last)
        return kinds_of(inputs), trained, asked

    def watch(self, inputs: Any, targets: Any, loss: Loss | None) -> Callable[[], object]:
        """Whether the operators are the same."""
        record = partial(self._recorded, inputs, targets, loss)
        before = record().operators
        return lambda: "" if record().operators == before else "Its operators are others."

    def prove(self, inputs: Any, targets: Any, loss: Loss | None) -> StageProgram:
        """Record and prove; all ranks that share the stages of a model, or a sequence, end alike."""
        programs: list[StageProgram] = []
        failed: Exception | None = None

        def digest() -> str:
            if failed is not None:
                raise failed  # also in the groups that follow
            programs[:] = programs or [self._program(inputs, targets, loss)]
            if self.numbers is not None and loss is not None:
                self.numbers.check(loss)
            return programs[0].digest

        for kind, group in self._groups():
            try:
                with record_function(f"up::{kind}|{self._recorder.name}"):
                    digests = {*on_every_rank(digest, group)}
                if len(digests) > 1:
                    name, remedy = self._recorder.name, DIFFERENT
                    if self.axis is None:
                        raise StageError(f"ranks of one pipeline run different programs of {name}: {remedy}")
                    raise ContextError(
                        f"ranks of one context group or pipeline run different programs of {name}: {remedy}"
                    )
            except Exception as error:  # noqa: BLE001  (raised below)
                failed = error
        if failed is not None:
            raise failed
        if self.numbers is not None and loss is not None:
            self.numbers.proved(loss, self._recorder.name)
        return programs[0]

    def _groups(self) -> Iterator[tuple[str, Any]]:
        if self.axis is not None:
            yield "programs", self._mesh.context
        if self.first is not None:
            yield "stages", self._mesh.group("pipeline")

    def _recorded(self, inputs: Any, targets: Any, loss: Loss | None) -> Graph:
        if self.numbers is None:
            with single_texts(not may_be_packed(inputs)):
                return self._recorder.record(cast(inputs, self._dtype))
        numbers = self.numbers

        def forward(model: nn.Module, given: Any) -> Any:
            came, wanted = given
            output = call(model, cast(came, self._dtype))
            if loss is None:
                return output
            output = self._output(output)
            output = output if self._dtype is None else cast(output, torch.float32)
            numbers.note(output, wanted)
            return loss(output, wanted)

        return self._recorder.record((inputs, () if loss is None else targets), forward)

    def _program(self, inputs: Any, targets: Any, loss: Loss | None) -> StageProgram:
        graph, model = self._recorded(inputs, targets, loss), self.shapes.model
        if self.axis is None:
            program = StageProgram(graph, model, self.starts)
        else:
            sequences = len(list(tensors_in(inputs)))
            program = ContextProgram(graph, model, self.starts, sequences, self.axis, loss=loss is not None)
        if self.first is not None:
            for number, both in enumerate(zip(program.stages, self.first.stages, strict=True)):
                self._check_parameters(number, *both)
        return program

    def _check_parameters(self, number: int, stage: Stage, first: Stage) -> None:
        """Refuse a stage that needs more than the sample's stage of this number has."""
        inside = tuple(f"{path}." for path in first.calls)  # where others stand for a fused layer
        missing = {name for name in stage.parameters - first.parameters if not name.startswith(inside)}
        more = set(stage.calls) - set(first.calls) | missing
        if more:
            raise StageError(
                f"this batch runs another program of {self._recorder.name} than the sample: stage {number} "
                f'needs "{min(more)}", which it does not have. Write parallelize(..., sample=inputs of a '
                "batch)"
            )


def _check_hooks(model: nn.Module) -> None:
    """Refuse hooks of the user's."""
    for path, module in model.named_modules():
        if is_hooked(module):
            raise ContextError(
                f'"{path or type(model).__name__}" has a hook, which a context axis does not call: '
                "its program runs operator by operator. Remove the hook, or leave out context="
            )


# ---- one recording ----

TURNS = 3  # more runs of a model that changes itself: turns of up to four are seen


class ModelRecorder:
    """Records the programs of one model.

    Args:
        model: the user's, before it is cut or wrapped.
        dtype: in which it computes; None: in that of its parameters.
        refuses: the error of what cannot be recorded here.
        where: what needs the program, such as "a pipeline".
        remedy: what to write in place of it.
        attention: each call of scaled_dot_product_attention is one operator.
        prepare: changes each copy before it is recorded; returns what has to know the recorder, by `follow`.
    Attributes:
        shapes: the model's copy, whose settings may be changed.
        changing: attributes (path, name) that the model changes while it runs.
        trained: names of the parameters that are trained. See `train`.
    Raises:
        CaptureError: the model cannot be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        refuses: Callable[[str], Exception],
        *,
        where: str,
        remedy: str,
        attention: bool = False,
        prepare: Callable[[Shapes], Any] | None = None,
    ) -> None:
        self.shapes, self.name, self._dtype = Shapes(model), type(model).__name__, dtype
        self._refuses, self._where, self._remedy, self._attention = refuses, where, remedy, attention
        self.changing: set[Any] = set()
        self.train({})
        self._prepare = prepare

    def train(self, flags: Mapping[str, bool]) -> None:
        """Record as if these parameters were trained or frozen. PyTorch chooses some operators by that: a
        frozen mask takes an attention without its gradient.

        Args:
            flags: name -> whether it is trained. Others stay as they are.
        """
        named = dict(self.shapes.model.named_parameters())
        for name in flags.keys() & named.keys():
            named[name].requires_grad_(flags[name])
        self.trained = frozenset(name for name, value in named.items() if value.requires_grad)

    def record(self, inputs: Any, forward: Callable[[nn.Module, Any], Any] | None = None) -> Graph:
        """Record the model on inputs, or `forward(model, inputs)`."""
        strange = next(strange_in(inputs), None)
        if strange is not None:
            raise self._refuses(
                f"a {type(strange).__name__} among the inputs of {self.name}: {self._where} takes tensors, "
                "numbers and strings, in tuples, lists and dicts"
            )
        shapes = Shapes(self.shapes)
        if self._dtype is not None:
            with shapes.mode:
                for parameter in shapes.model.parameters():
                    if parameter.is_floating_point():
                        parameter.data = parameter.data.to(self._dtype)
        prepared = None if self._prepare is None else self._prepare(shapes)
        before = ModuleSettings(shapes.model).now()
        was = _parameters(shapes.model)
        graph = self._run(shapes, inputs, forward, prepared)
        self._check_parameters(was, _parameters(shapes.model))
        if not list(tensors_in(graph.result, Ref)) or list(strange_in(graph.result, Ref)):
            raise CaptureError(
                f"{self.name} returns no tensors, or objects that hide them: return a tuple or dict"
            )
        settings = ModuleSettings(shapes.model)
        self.changing = {item[0] for item in before ^ settings.now()}
        suspects = sorted(self.changing or settings.advancing())
        if suspects and not self._runs_alike(graph, settings, shapes, inputs, forward, prepared):
            names = ", ".join(f'"{f"{path}.{leaf}".lstrip(".")}"' for path, leaf in suspects[:3])
            names = f"one of {names}" if len(suspects) > 1 else names
            raise self._refuses(
                f"{self.name} changes {names} while it runs, and runs another program "
                f"then, which {self._where} does not follow. {self._remedy}"
            )
        return graph

    def _runs_alike(self, graph: Graph, settings: ModuleSettings, shapes: Shapes, *more: Any) -> bool:
        """Whether what the model changes while it runs, such as a counter, does not change its program."""
        now = settings.now()
        for _ in range(TURNS):
            if graph.operators != self._run(shapes, *more).operators:
                return False
            before, now = now, ModuleSettings(shapes.model).now()
            if before == now and not settings.advancing():  # such as a cache, which the first run has filled
                break
        for value in FAR:
            counts = [set_counter(shapes.model, at, value) for at in self.changing]
            if any(counts) and graph.operators != self._run(shapes, *more).operators:
                return False
        return True

    def _check_parameters(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        """Refuse a model that freezes parameters while it runs, or puts others in their place."""
        for name, (_, memory, trained) in now.items():
            _, old, flag = before.get(name, (None, memory, trained))
            if flag != trained or old != memory:
                does = f"{'un' * trained}freezes" if flag != trained else "puts other values in place of"
                raise self._refuses(
                    f'{self.name} {does} "{name}" while it runs, which {self._where} does not follow. Do it '
                    "before parallelize, or between steps"
                )

    def _run(
        self, shapes: Shapes, inputs: Any, forward: Callable[[nn.Module, Any], Any] | None, prepared: Any
    ) -> Graph:
        run = None if forward is None else lambda given: forward(shapes.model, given)
        recorder = Recorder(shapes, attention=self._attention)
        if prepared is not None:
            prepared.follow(recorder)
        try:
            return recorder.run(shapes.model, inputs, run)
        except CaptureError as error:
            remedy = self._dtype and recorded_remedy(error.__cause__, shapes.model, self._dtype)
            if not remedy:
                raise
            raise CaptureError(f"{error}. {remedy}", final=error.final) from error


def _parameters(model: nn.Module) -> dict[str, Any]:
    """By name: each parameter's memory, kept so that its key stays its own, and whether it is trained."""
    return {
        name: (*memory_of(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()
    }
