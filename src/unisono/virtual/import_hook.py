"""Hooks into the import of PyTorch: loads the library before it, and adds C functions to `torch._C`.

`torch.cuda` then finds the same functions as in PyTorch's CUDA build, and runs unchanged.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

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
            spec.loader = _HookLoader(spec.loader, self._before.get(fullname), self._after.get(fullname))  # type: ignore[assignment]
        return spec


class _HookLoader(NamedTuple):
    """A module's loader, with a call before it and one after it."""

    loader: Any
    before: Callable[[], None] | None
    after: Callable[[ModuleType], None] | None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if self.before:
            self.before()
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader  # readers of it find PyTorch's own loader
        module.__loader__ = self.loader
        if self.after:
            self.after(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
