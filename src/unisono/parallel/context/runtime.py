"""A model under a context axis: its programs by shape, proved where they first come, and their runs.

A recorded loss has read numbers: an annealed weight in a global name, an attribute, a schedule. The program
has them as constants, and tensors that the loss was not given as they were. Before each step the loss runs
again on shapes, and where it reads other numbers or tensors the program is recorded anew.
"""

from __future__ import annotations

import ctypes
import dis
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial, wraps
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from unisono.parallel.costs.collectives import Link
from unisono.parallel.generators import drawing, seed_of
from unisono.parallel.graph.capture import call
from unisono.parallel.graph.containers import cast, mapped, tensors_in
from unisono.parallel.graph.fused import is_hooked
from unisono.parallel.graph.program import Ref
from unisono.parallel.program_state import COUNTS, ModuleSettings, ProgramCache, kinds_of
from unisono.parallel.recording import ModelRecorder
from unisono.parallel.sharded_parameters import TYPES
from unisono.parallel.tensor_parallel import axis_of
from unisono.torch.control_data import on_every_rank
from unisono.torch_internals.fake import OperatorMode, fake_mode, is_fake, memory_of

from .call import ContextError
from .exchange import ContextGroup, whole
from .program import ContextProgram
from .replay import CutParts, ForwardCall, ReplayModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unisono.parallel.graph.cut import Cut
    from unisono.parallel.graph.program import Graph
    from unisono.parallel.mesh import PlanMesh
    from unisono.parallel.pipeline.program_stage import StagePrograms
    from unisono.parallel.shared import Decision

__all__ = ["ContextModel"]


class ContextModel:
    """One model whose sequence is cut.

    Args:
        model: the user's, before it is wrapped.
        dtype: in which it computes; None: in that of its parameters.
        output: what the loss gets of what the model returns.
        cut: of the tensor axis; None: the plan has none.
        programs: that say where the stages of a pipeline begin; None: there is one stage.
    Raises:
        ValueError: the model has hooks, which a run of operators does not call.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None,
        output: Callable[[Any], Any],
        mesh: PlanMesh,
        cut: Cut | None,
        programs: StagePrograms | None,
    ) -> None:
        _check_hooks(model)
        self._programs = programs
        self._model, self._output, self._dtype = model, output, dtype
        self._parts = None if cut is None else CutParts(cut, axis_of(mesh.part("tensor")))
        self._recorder = ModelRecorder(
            model, dtype, ContextError, where="a context axis", remedy="Leave out context=", attention=True,
            prepare=None if self._parts is None else self._parts.prepare,
        )  # fmt: skip
        self._name = self._recorder.name
        self._device = mesh.axes.device_type
        self._ranks = self._group(mesh)
        self._settings: ModuleSettings | None = None
        self._known: ProgramCache[ContextProgram] = ProgramCache()
        self._numbers, self._read, self._warned = _LossNumbers(), 0, False
        self._units: frozenset[str] = frozenset()
        self._where: dict[str, nn.Module] = {}
        self._meet = [mesh.context] if programs is None else [mesh.context, mesh.group("pipeline")]

    def _group(self, mesh: PlanMesh) -> ContextGroup:
        """The ranks that share a sequence."""
        return ContextGroup(mesh.context, mesh.context_place, mesh.plan.context)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        output: Callable[[Any], Any],
        mesh: PlanMesh,
        decision: Decision | None,
        programs: StagePrograms | None,
    ) -> ContextModel | None:
        """The model under a plan, before it is cut; None: the plan has no context axis."""
        plan = mesh.plan
        if plan.context == 1:
            return None
        dtype = None if plan.precision == "f32" else TYPES[plan.precision]
        cut = None if decision is None else decision.cut
        return cls(model, dtype, output, mesh, cut, programs)

    def follow(self, units: Iterable[nn.Module], sample: Any) -> None:
        """Run by `units` from now on, which are wrapped. Prove the program of `sample`, if there is one.

        Args:
            units: that are in this rank's stages.
        """
        self._where = dict(self._model.named_modules())
        paths = {module: path for path, module in self._where.items()}
        called = {module for module in units if module in paths and module is not self._model}
        self._units = frozenset(paths[module] for module in called)
        for module in (*called, self._model):
            _run_calls(module)
        self._settings = ModuleSettings(self._model, counters=True)
        if sample is not None:
            self.confirm([(sample, ())], None)

    # ---- programs ----

    def follow_frozen(self, flags: Mapping[str, bool]) -> None:
        """Record with these flags (name -> whether it is trained) from now on."""
        self._recorder.train(flags)

    def read(self, loss: Callable[[Any, Any], Any]) -> int:
        """Follow the numbers that the loss reads now; return what must be equal on all ranks."""
        self._read = self._numbers.read(loss)
        return self._read

    def confirm(self, micros: Iterable[tuple[Any, Any]], loss: Callable[[Any, Any], Any] | None) -> None:
        """Prove the programs of these micro-batches, where they are new.

        All ranks that share their sequences, and the stages of a model, call this.

        Args:
            loss: of an output and targets; None: the program ends with the output.
        Raises:
            ContextError, CaptureError: a program cannot be cut, or recorded.
        """
        assert self._settings is not None
        for inputs, targets in micros:
            key = self._key(inputs, targets, loss)
            if self._settings.fresh:
                recorded = partial(self._recorded, inputs, targets, loss)
                self._settings.check_counters(self._recorder.shapes, partial(_changed, recorded, recorded()))
                key = self._key(inputs, targets, loss)
            if not self._known.use(key):
                self._settings.give(self._recorder.shapes)
                program = self._proved(inputs, targets, loss)
                if loss is not None and not self._read:
                    self._read = self._numbers.read(loss)
                    key = self._key(inputs, targets, loss)
                self._warn_of_numbers()
                self._known[key] = program

    def _warn_of_numbers(self) -> None:
        """Tell the user once that a loss which reads other numbers costs a recording."""
        seen = {asked[2] for _, asked, *_ in self._known if asked is not None}
        if len(seen) > COUNTS and not self._warned:
            self._warned = True
            warnings.warn(
                f"the loss of {self._name} reads a number that changes again and again: its program is "
                "recorded anew for each value, which takes seconds. Give the number in the targets, as a "
                "tensor with a row for each of theirs",
                stacklevel=2,
            )

    @property
    def notes(self) -> list[str]:
        """What is not cut, though it has the sequence, and why."""
        found = {note: why for program in self._known.values() for note, why in program.notes.items()}
        return [f"{note}: {why or 'no rule follows it'}" for note, why in found.items()]

    def _key(self, inputs: Any, targets: Any, loss: Any) -> Any:
        assert self._settings is not None
        asked = None if loss is None else (kinds_of(targets), loss, self._read)
        settings = self._settings.now(), self._recorder.trained
        return kinds_of(inputs), asked, settings, torch.is_grad_enabled()

    def _proved(self, inputs: Any, targets: Any, loss: Any) -> ContextProgram:
        """Record and prove; all ranks that share a sequence or the stages of a model end alike."""
        programs: list[ContextProgram] = []
        failed: Exception | None = None

        def digest() -> str:
            if failed is not None:
                raise failed  # also in the groups that follow
            programs[:] = programs or [self._program(inputs, targets, loss)]
            if loss is not None:
                self._numbers.check(loss)
            return programs[0].digest

        for group in self._meet:
            try:
                with record_function(f"up::programs|{self._name}"):
                    digests = {*on_every_rank(digest, group)}
                if len(digests) > 1:
                    raise ContextError(
                        "ranks of one context group or pipeline run different programs of "
                        f"{self._name}: their inputs have different shapes, or the model is not the same on "
                        "all of them. run.shard(loader) gives each the same rows"
                    )
            except Exception as error:  # noqa: BLE001  (raised below)
                failed = error
        if failed is not None:
            raise failed
        return programs[0]

    def _recorded(self, inputs: Any, targets: Any, loss: Any) -> Graph:
        def forward(model: nn.Module, given: Any) -> Any:
            came, wanted = given
            output = call(model, cast(came, self._dtype))
            if loss is None:
                return output
            output = self._output(output)
            output = output if self._dtype is None else cast(output, torch.float32)
            self._numbers.note(output, wanted)
            return loss(output, wanted)

        return self._recorder.record((inputs, () if loss is None else targets), forward)

    def _program(self, inputs: Any, targets: Any, loss: Any) -> ContextProgram:
        graph = self._recorded(inputs, targets, loss)
        sequences = len(list(tensors_in(inputs)))
        programs = self._programs
        pipeline = None if programs is None else (programs.starts, self._recorder.shapes.model)
        program = ContextProgram(graph, sequences, self._units, self._ranks, Link(), pipeline)
        for number, stage in enumerate(program.stages):
            if programs is not None and stage.stage is not None:
                programs.check_parameters(number, stage.stage.parameters)
        if loss is not None:
            for ref in tensors_in(graph.result, Ref):
                if ref.value in program.places:
                    raise ContextError(
                        "the loss returns a value for each position; it must return its mean over them, or "
                        "(sum, count)"
                    )
        return program

    # ---- runs ----

    def digest(self, inputs: Any, targets: Any, loss: Any) -> str:
        """A text that is equal on all ranks, and differs for micro-batches that run other programs."""
        return self._found(inputs, targets, loss).digest

    def forward(
        self, root: Any, stage: int, came: Sequence[Tensor], micro: tuple[Any, Any], loss: Any
    ) -> Any:
        """What a stage sends, or what `loss` returns for a micro-batch; None: what the model returns.

        A model's output is whole on every rank, or this rank's part where gradients are on.

        Args:
            came: from the stage before.
        """
        inputs, targets = micro
        program = self._found(inputs, targets, loss)
        given = (inputs,) if loss is None else (inputs, targets)
        found = self._run(root, program, stage, came, given)
        if loss is not None or stage + 1 < len(program.stages) or torch.is_grad_enabled():
            return found
        places = iter([program.places.get(ref.value) for ref in tensors_in(program.graph.result, Ref)])
        shapes = iter([program.graph.values[n].shape for n in program.graph.outputs])

        def joined(value: Tensor) -> Tensor:
            place, shape = next(places), next(shapes)
            if place is None:
                return value
            return whole(value, shape, place, self._ranks, "up::positions|output")

        return mapped(found, joined)

    def _found(self, inputs: Any, targets: Any, loss: Any) -> ContextProgram:
        if loss is None:
            targets = ()
            self.confirm([(inputs, ())], None)
        return self._known[self._key(inputs, targets, loss)]

    def _run(self, root: Any, program: ContextProgram, stage: int, came: Sequence[Tensor], given: Any) -> Any:
        shared = self._shared_seed()
        inputs = [*tensors_in(given)]

        def held(name: str) -> Any:
            path, _, leaf = name.rpartition(".")
            return getattr(self._where[path], leaf)

        def run(*inputs: Tensor) -> Any:
            model = ReplayModel(self._where, held, self._device, self._parts)
            return program.run(program.replay(model, shared), 0, (), inputs)

        def run_stage(here: Any, came: Sequence[Tensor]) -> Any:
            model = ReplayModel(self._where, here.held, self._device, self._parts)
            return program.run(program.replay(model, shared), stage, came, inputs)

        with self._drawing(shared):
            if self._programs is None:
                return root(ForwardCall(run), *inputs)
            return root(stage, tuple(came), ForwardCall(run_stage))

    def _shared_seed(self) -> int:
        """Draw a seed, the same on the ranks of the group."""
        return int(torch.randint(2**62, (), device="cpu"))

    def _drawing(self, shared: int) -> AbstractContextManager[None]:
        """Seed what this rank draws for its positions."""
        return drawing(seed_of(shared, self._ranks.rank), self._device)


def _changed(recorded: Callable[[], Graph], before: Graph) -> str:
    """What is wrong with a program that is another one now."""
    return "" if recorded().operators == before.operators else "Its operators are others."


def _run_calls(module: Any) -> None:
    """Let the forward of a module run what it is given by a program."""
    own = module.forward

    @wraps(own)
    def forward(*args: Any, **named: Any) -> Any:
        if args and isinstance(args[0], ForwardCall):
            return args[0].run(*args[1:])
        return own(*args, **named)

    module.forward = forward


def _check_hooks(model: nn.Module) -> None:
    """Refuse hooks of the user's."""
    for path, module in model.named_modules():
        if is_hooked(module):
            raise ContextError(
                f'"{path or type(model).__name__}" has a hook, which a context axis does not call: '
                "its program runs operator by operator. Remove the hook, or leave out context="
            )


# ---- the numbers that a loss reads ----


NUMBERS: Any = (bool, int, float, complex, str)


class _NumbersRead(OperatorMode):
    """Notes the operators that run, with their numbers, and the memory of tensors that the loss has itself.

    Args:
        known: such memory by its address, and a number for each, which is equal on all ranks.
        fresh: further numbers.
    """

    def __init__(self, known: dict[int, tuple[Any, int]], fresh: Iterator[int]) -> None:
        super().__init__()
        self.noted: list[Any] = []
        self.read: dict[int, tuple[Any, int]] = {}
        self._known, self._fresh = known, fresh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        own = [self._own(func, each) for each in tensors_in((args, named)) if not is_fake(each)]
        self.noted.append((str(func), *map(repr, tensors_in((args, named), NUMBERS)), *own))
        return func(*args, **named)

    def _own(self, func: Any, tensor: Tensor) -> Any:
        storage, _ = memory_of(tensor)
        at = storage.data_ptr()
        if func is torch.ops.aten.lift_fresh.default and tensor.device.type == "cpu":  # torch.tensor(number)
            # an operator would give no values here
            return zlib.crc32((ctypes.c_char * storage.nbytes()).from_address(at))
        if at not in self.read:
            self.read[at] = self._known.get(at) or (storage, next(self._fresh))
        return self.read[at][1], tensor.shape, tensor.stride(), tensor.storage_offset()


@cache
def _imports(code: CodeType) -> bool:
    return any(one.opname == "IMPORT_NAME" for one in dis.get_instructions(code))


def _reads_nothing(loss: Any) -> bool:
    """Whether a loss is a plain function that names nothing but PyTorch's modules and functions."""
    if getattr(loss, "__module__", "") == "torch.nn.functional":
        return True
    if not isinstance(loss, FunctionType) or loss.__closure__ or loss.__defaults__ or loss.__kwdefaults__:
        return False
    code, known = loss.__code__, (FunctionType, BuiltinFunctionType, ModuleType)
    if any(isinstance(one, CodeType) for one in code.co_consts) or _imports(code):
        return False
    named = [loss.__globals__[name] for name in code.co_names if name in loss.__globals__]
    homes = [
        one.__name__ if isinstance(one, ModuleType) else one.__module__
        for one in named
        if isinstance(one, known)
    ]
    return len(homes) == len(named) and all(str(home).split(".")[0] == "torch" for home in homes)


class _LossNumbers:
    """What one loss reads, on the shapes with which it was recorded first."""

    def __init__(self) -> None:
        self._mode = fake_mode()
        self._given: Any = None
        self._fresh = itertools.count()
        self._tensors: dict[int, tuple[Any, int]] = {}  # they live, so that their addresses are theirs

    def note(self, output: Any, targets: Any) -> None:
        """Keep the shapes that the loss gets."""
        if self._given is None:  # made later: a recording would have the operators
            self._given = mapped(
                (output, targets),
                lambda t: partial(torch.empty_strided, t.shape, t.stride(), dtype=t.dtype, device=t.device),
            )

    def read(self, loss: Callable[[Any, Any], Any]) -> int:
        """Run the loss; return a number that differs where it reads other ones, 0 before the first recording.

        Raises:
            ContextError: it does not run again.
        """
        if self._given is None or _reads_nothing(loss):
            return 0
        try:
            with torch.no_grad(), self._mode:
                given = mapped(self._given, lambda make: make(), partial)
                with _NumbersRead(self._tensors, self._fresh) as found:
                    loss(*given)
        except Exception as error:
            raise ContextError(
                f"the loss, which was recorded, does not run a second time: {type(error).__name__}: {error}"
            ) from error
        self._tensors = found.read
        return zlib.crc32(repr(found.noted).encode())

    def check(self, loss: Callable[[Any, Any], Any]) -> None:
        """Raise ContextError for a loss that reads other numbers each time, such as a count of its calls."""
        if self.read(loss) != self.read(loss):
            raise ContextError(
                "the loss reads another number each time that it is called, such as a count of its calls, a "
                "clock or a random number, and context= records it. Have the loop change that number between "
                "steps, or give it in the targets"
            )
