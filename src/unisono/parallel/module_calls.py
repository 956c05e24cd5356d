"""Whether the modules of a cut model are called as in the proved program: see graph/call_structure.py.

Moves between ranks are at the slots of the recorded calls. Another structure, or another number of calls,
raises before the module moves anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from unisono.torch_internals.autograd import in_backward
from unisono.torch_internals.training import is_compiled, module_at

from .graph.call_structure import CallStructure, RecordedCalls, argument_names, given_by, returned_by
from .graph.containers import tensors_in
from .graph.cut import Cut
from .graph.written import Forward

__all__ = ["CallCheck", "ModelCalls"]

PLAIN = frozenset({Tensor, nn.Parameter, type(None), int, float})  # types that say all about an argument


class ModelCalls:
    """The calls of the modules of one cut model.

    Args:
        model: None: its stages or its recorded operators run, not its own forward. Then only the structure
            of each call is checked.
    """

    def __init__(self, model: nn.Module | None, cut: Cut) -> None:
        self._model, self._cut = model, cut
        self._checks: list[CallCheck] = []
        self._counts: Counter[str] = Counter()
        self._running = False

    def check(self, path: str, names: tuple[str, ...]) -> CallCheck:
        """What checks the calls of one module. names: of its arguments by place."""
        self._checks.append(
            CallCheck(path, self._cut.calls.setdefault(path, RecordedCalls()), names, self.count)
        )
        return self._checks[-1]

    def follow(self, model: nn.Module) -> None:
        """Check the other modules around those that are cut, too, and count calls in each forward."""
        known = {check.path for check in self._checks}
        for path in [path for path, found in self._cut.calls.items() if found.takes and path not in known]:
            _CheckedForward(module_at(model, path), path, self)
        if self._model is not None:
            _ModelForward(self._model, self)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """While the model runs."""
        if self._running:  # it calls itself
            yield
            return
        self._counts.clear()
        self._running = True
        try:
            yield
        finally:
            self._running = False
        for check in self._checks:
            check.ended(self._counts[check.path])

    def count(self, check: CallCheck) -> None:
        """Count a call.

        Raises:
            RuntimeError: it is one too many, or none of the model's.
        """
        if self._model is None:
            return
        many, most = self._counts[check.path] + 1, max(check.recorded.counts, default=0)
        if self._running and many <= most:
            self._counts[check.path] = many
            return
        if in_backward() or any(map(is_compiled, self._model.modules())):  # which may run a module again
            return
        if self._running:
            raise check.error(f"is called {many} times", f"{most} calls")
        raise RuntimeError(
            f'"{check.path}" was called by itself, outside the model. Its parameters are cut on the tensor '
            "axis, and what it takes and returns may be this rank's part. Call the model, as by run.predict, "
            f"and return what you need; or write {check.remedy}"
        )


class CallCheck:
    """The calls of one module.

    Args:
        recorded: those that were proved.
        count: told of each call.
    """

    def __init__(
        self, path: str, recorded: RecordedCalls, names: tuple[str, ...], count: Callable[[CallCheck], None]
    ) -> None:
        self.path, self.recorded = path, recorded
        self._names, self._count = names, count
        self._known: set[Any] = set()  # the types of the arguments of calls that fit

    def begin(self, args: Any, named: Any) -> None:
        """Before the module runs.

        Raises:
            RuntimeError: it was called otherwise when it was recorded.
        """
        self._count(self)
        kinds = (*map(type, args), *named, *map(type, named.values()))
        if kinds not in self._known:
            self._check("takes", given_by(args, named, self._names), self.recorded.takes)
            if PLAIN.issuperset(kind for kind in kinds if not isinstance(kind, str)):
                self._known.add(kinds)

    def end(self, output: Any) -> None:
        """After it, before what it returns is moved.

        Raises:
            RuntimeError: it returned other things when it was recorded.
        """
        if type(output) not in self._known:
            self._check("returns", returned_by(output), self.recorded.returns)
            if type(output) in PLAIN:
                self._known.add(type(output))

    def ended(self, count: int) -> None:
        """After the model. count: of calls.

        Raises:
            RuntimeError: it was called more often, or less, when it was recorded.
        """
        if count not in (self.recorded.counts or {0}):
            raise self.error(f"is called {count} times", f"{max(self.recorded.counts, default=0)} calls")

    def _check(self, verb: str, found: CallStructure, recorded: set[CallStructure]) -> None:
        if any(found.fits(each) for each in recorded):
            return
        if not recorded:
            raise self.error("is called", "no call of it")
        here, there = min((found.difference(each) for each in recorded), key=lambda pair: len(pair[0]))
        raise self.error(f"{verb} {here}", there)

    def error(self, found: str, recorded: str) -> RuntimeError:
        """Args: what is observed, and what the recorded program has."""
        return RuntimeError(
            f'"{self.path}" {found}; the program that was recorded on sample= has {recorded}. The tensor '
            "axis is proved for that program alone: something beside inputs, shapes and settings decides "
            f"what the model runs. Let it run alike in every step, or write {self.remedy}"
        )

    @property
    def remedy(self) -> str:
        """What leaves the module whole."""
        return f'parallelize(..., cuts={{"{self.path}*": "whole"}})'


class _ModelForward(Forward):
    """The forward of the model."""

    def __init__(self, model: nn.Module, calls: ModelCalls) -> None:
        super().__init__(model)
        self._calls = calls

    def __call__(self, *args: Any, **named: Any) -> Any:
        if is_compiling():
            return self._run(*args, **named)
        if torch.is_grad_enabled() and any(one.requires_grad for one in tensors_in((args, named))):
            raise RuntimeError(
                "an input of the model requires a gradient, of which each rank of tensor= would have a part. "
                "Give the model x.detach(), or take gradients by inputs under a plan without tensor="
            )
        with self._calls.forward():
            return self._run(*args, **named)


class _CheckedForward(Forward):
    """The forward of a module around those that are cut."""

    def __init__(self, module: nn.Module, path: str, calls: ModelCalls) -> None:
        super().__init__(module)
        self._check = calls.check(path, argument_names(self._run))

    def __call__(self, *args: Any, **named: Any) -> Any:
        if is_compiling():
            return self._run(*args, **named)
        self._check.begin(args, named)
        output = self._run(*args, **named)
        self._check.end(output)
        return output
