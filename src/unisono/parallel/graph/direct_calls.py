"""Calls of `module.forward` that a program makes itself: a recording takes them for calls of the module.

No hook of PyTorch is told of them, but what a run puts in the place of a forward is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["DirectCalls"]

Around = tuple[Callable[[nn.Module, Any, Any], None], Callable[[nn.Module, Any, Any], None]]


class DirectCalls:
    """Every forward of a model, watched.

    Args:
        around: of the path of a module -> what is called before and after a direct call, as its hooks are.
    """

    def __init__(self, model: nn.Module, around: Callable[[str], Around]) -> None:
        self._hooked: nn.Module | None = None
        self._own = list[tuple[nn.Module, Any]]()
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._own.append((module, vars(module).get("forward")))
                module.forward = self._watched(module, *around(path))  # type: ignore[method-assign]

    def hooked(self, module: nn.Module) -> None:
        """The hooks of a module have run; its forward is called next."""
        self._hooked = module

    def end(self) -> None:
        """Give the modules their own forward back."""
        for module, own in self._own:
            del module.forward
            if own is not None:
                module.forward = own

    def _watched(self, module: nn.Module, before: Any, after: Any) -> Callable[..., Any]:
        run = module.forward

        @functools.wraps(run)
        def forward(*args: Any, **named: Any) -> Any:
            hooked, self._hooked = self._hooked, None
            if hooked is module:
                return run(*args, **named)
            before(module, args, named)
            output = run(*args, **named)
            after(module, args, output)
            return output

        return forward
