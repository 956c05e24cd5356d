"""Records what a model does on inputs of a run, in the type in which it computes there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from unisono.torch_internals.fake import memory_of

from .explained_errors import recorded_remedy
from .graph.capture import CaptureError, Recorder, Shapes
from .graph.containers import strange_in, tensors_in
from .graph.program import Graph, Ref
from .program_state import FAR, ModuleSettings, set_counter

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
        prepare: changes each copy before it is recorded; returns what has to know the recorder, by `begin`.
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
        """Record the model on inputs, or `forward(model, inputs)`.

        Raises:
            CaptureError: the program cannot be recorded.
        """
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
        """Whether what the model changes while it runs, such as a counter, does not change its program.

        Args:
            settings: of the model after its first run.
        """
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
            prepared.begin(recorder)
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
