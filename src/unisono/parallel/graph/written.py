"""Sizes that a program has written down, such as the number of heads in a view, changed while it runs.

The modules that have such calls run under a mode that counts them, as the recording did. A module within
them counts its own.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from unisono.torch_internals.training import module_at

from .capture import SIZED
from .containers import numbers_of
from .cut import Sizes
from .local_model import changed

TORCH = os.path.dirname(torch.__file__) + os.sep


class Forward:
    """Stands for the forward of one module. A copy of the module gets a copy of it."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._run: Callable[..., Any] = module.forward
        functools.update_wrapper(self, self._run, assigned=("__doc__",), updated=())
        module.forward = self  # type: ignore[method-assign, assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = copy.copy(self)
        made._module = copy.deepcopy(self._module, memo)
        made._run = copy.deepcopy(self._run, memo)
        made.__wrapped__ = made._run  # type: ignore[attr-defined]
        return made

    def __call__(self, *args: Any, **named: Any) -> Any:
        raise NotImplementedError


class _Counting(TorchFunctionMode):
    """Changes the sizes of the calls of one module. Within other modules it does nothing."""

    def __init__(self, path: str, sizes: dict[int, Sizes], code: Any) -> None:
        super().__init__()
        self._path, self._sizes, self._code = path, sizes, code
        self._next = 0
        self.inside = 0  # modules that run within this one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.inside or name not in SIZED or self._in_hook():
            return func(*args, **named)
        sizes = self._sizes.get(self._next)
        self._next += 1
        if sizes is not None:
            if sizes.function != name:
                raise RuntimeError(
                    f'"{self._path}" calls {name} where it called {sizes.function} when it was recorded: its '
                    f"program depends on more than the sample. {self._remedy()}"
                )
            args, named = changed(args, named, self._wanted(sizes, args, named))
        return func(*args, **named)

    def _wanted(self, sizes: Sizes, args: Any, named: Any) -> dict[int, int]:
        found = list(numbers_of((args, named)))
        wanted = {}
        for place, (written, local) in sizes.numbers.items():
            if place >= len(found) or found[place] not in (written, local):
                raise RuntimeError(
                    f'"{self._path}" calls {sizes.function} with {found}, and number {place} was {written} '
                    f"when it was recorded: its sizes depend on the batch. {self._remedy()}"
                )
            wanted[place] = local
        return wanted

    def _remedy(self) -> str:
        pattern = f"{self._path}.*".lstrip(".")
        return f'Write parallelize(..., cuts={{"{pattern}": "whole"}})'

    def _in_hook(self) -> bool:
        """Whether a hook of a module calls this, not the program."""
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code is not self._code:
            if not frame.f_code.co_filename.startswith(TORCH):
                return False
            if frame.f_code.co_name == "_call_impl":
                return True
            frame = frame.f_back
        return False


class _CountingForward(Forward):
    """A module with written sizes. `modes`: those that are active now, shared by all modules of the model."""

    def __init__(self, module: nn.Module, path: str, sizes: dict[int, Sizes], modes: list[_Counting]) -> None:
        super().__init__(module)
        self._path, self._sizes, self._modes = path, sizes, modes

    def __call__(self, *args: Any, **named: Any) -> Any:
        code = getattr(type(self._module).forward, "__code__", None)
        with _Counting(self._path, self._sizes, code) as mode:
            self._modes.append(mode)
            try:
                return self._run(*args, **named)
            finally:
                self._modes.pop()


class _Apart(Forward):
    """A module within one with written sizes: its calls are not that one's."""

    def __init__(self, module: nn.Module, modes: list[_Counting]) -> None:
        super().__init__(module)
        self._modes = modes

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not self._modes:
            return self._run(*args, **named)
        mode = self._modes[-1]
        mode.inside += 1
        try:
            return self._run(*args, **named)
        finally:
            mode.inside -= 1


class Written:
    """The modules of a model whose written sizes change."""

    def __init__(self, model: nn.Module, sizes: dict[str, dict[int, Sizes]]) -> None:
        self._model, self._sizes = model, {path: found for path, found in sizes.items() if found}
        self._modes: list[_Counting] = []

    def wrap(self) -> None:
        """Change the forward of these modules. Other changes of it come afterwards."""
        for path, sizes in self._sizes.items():
            _CountingForward(module_at(self._model, path), path, sizes, self._modes)

    def wrap_others(self) -> None:
        """Change the forward of the modules within them. Other changes of it come before."""
        for path, module in self._model.named_modules():
            if any(path != above and (not above or path.startswith(f"{above}.")) for above in self._sizes):
                _Apart(module, self._modes)
