"""Hooks into the import of PyTorch: loads the library before it, and adds C functions to `torch._C`.

`torch.cuda` then finds the same functions as in PyTorch's CUDA build, and runs unchanged.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class ImportHook:
    """Calls a function before or after certain modules are executed.

    Args:
        before, after: by the module's name. `after` gets the module.
    """

    def __init__(
        self, before: Mapping[str, Callable[[], None]], after: Mapping[str, Callable[[ModuleType], None]]
    ) -> None:
        self._before = before
        self._after = after
        self._finding = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Find it by the other finders, and wrap its loader."""
        if self._finding or (fullname not in self._before and fullname not in self._after):
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            _surround(spec.loader, self._before.get(fullname), self._after.get(fullname))
        return spec


def _surround(loader: Any, before: Callable[..., Any] | None, after: Callable[..., Any] | None) -> None:
    """Let a loader call a function before it makes its module, and one after it has executed it."""
    create, execute = loader.create_module, loader.exec_module

    def create_module(spec: ModuleSpec) -> Any:
        if before:
            before()
        return create(spec)

    def exec_module(module: ModuleType) -> None:
        execute(module)
        if after:
            after(module)

    loader.create_module, loader.exec_module = create_module, exec_module
