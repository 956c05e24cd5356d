"""What a caller does to a model after `parallelize`, and the proved program does not have.

| | tensor, expert | pipeline | context |
|---|---|---|---|
| another module, or another forward | refused | refused | refused |
| a hook that only looks | runs | runs, if its module is called | refused |
| a hook that returns something, or writes | refused | likewise | refused |

Hooks that were there before belong to the program: those that change values may not be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .graph.containers import tensors_in

if TYPE_CHECKING:
    from .pipeline.program_stage import StagePrograms
    from .plan import Plan

__all__ = ["ModelChanges"]

TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OURS = ("torch.", "unisono.", "transformers.utils.")  # whose hooks only look
REMEDY = "Do it before parallelize"


class ModelChanges:
    """The modules and hooks of a model as they were when its program was proved.

    Args:
        model: that runs now.
        uncalled: modules (paths) that operators stand for, so that nothing calls their hooks; None: no module
            is called.
    """

    def __init__(self, model: nn.Module, plan: Plan, uncalled: frozenset[str] | None) -> None:
        self._uncalled, self._fixed = uncalled, plan.tensor > 1 or plan.expert > 1
        self._modules = [
            (path, module, dict(module._modules), vars(module).get("forward"))
            for path, module in model.named_modules()
        ]
        self._name = type(model).__name__
        self._hooks: list[tuple[str, dict[int, Any], dict[int, _Hook | None]]] = []
        for path, module, _, _ in self._modules:
            for table in map(vars(module).__getitem__, TABLES):
                self._hooks.append((path, table, {number: self._noted(table, number) for number in table}))

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, programs: StagePrograms | None) -> ModelChanges | None:
        """None: a plan without a proved program, which follows each change."""
        if plan.tensor == plan.pipeline == plan.context == plan.expert == 1:
            return None
        pieces = frozenset({""} if plan.pipeline > 1 else ())
        opened = pieces if programs is None else programs.first.open
        return cls(model, plan, None if plan.context > 1 else opened)

    def check(self) -> None:
        """Refuse what a plan would not follow, before a step.

        Raises:
            ValueError: the text names the module.
        """
        for path, module, children, forward in self._modules:
            if module._modules != children:
                name = next(
                    key for key in {**children, **module._modules} if self._differs(module, children, key)
                )
                raise ValueError(
                    f'"{f"{path}.{name}".lstrip(".")}" is another module than parallelize got, and the plan '
                    f"does not share it. {REMEDY}"
                )
            if vars(module).get("forward") is not forward:
                raise ValueError(
                    f'"{path or self._name}" has another forward than parallelize got, which the plan does '
                    f"not follow. {REMEDY}"
                )
        for path, table, known in self._hooks:
            if table.keys() != known.keys():
                self._follow(path, table, known)

    @staticmethod
    def _differs(module: nn.Module, children: dict[str, Any], name: str) -> bool:
        return module._modules.get(name) is not children.get(name)

    def _follow(self, path: str, table: dict[int, Any], known: dict[int, _Hook | None]) -> None:
        for number in known.keys() - table.keys():
            gone = known.pop(number)
            if gone is not None and gone.changes:
                raise ValueError(
                    f'a hook of "{path or self._name}" was removed, which changes values in the program that '
                    "the plan has proved. Remove it before parallelize"
                )
        for number in table.keys() - known.keys():
            if not _is_ours(table[number]) and (self._uncalled is None or path in self._uncalled):
                raise ValueError(
                    f'"{path or self._name}" has a hook since parallelize, and this plan runs its operators '
                    "one by one, without its hooks. Register hooks on the modules in it, or leave out "
                    "context= and pipeline="
                )
            known[number] = self._noted(table, number)
            late = known[number]
            if late is not None:
                late.refused = path or self._name

    def _noted(self, table: dict[int, Any], number: int) -> _Hook | None:
        """Watch a hook; None: one that does not matter."""
        if not self._fixed or _is_ours(table[number]):
            return None
        table[number] = _Hook(table[number])
        return table[number]  # type: ignore[no-any-return]


class _Hook:
    """A hook of a module, and whether it changes values.

    Attributes:
        refused: the module, where it may not.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self.changes = False
        self.refused = ""

    def __call__(self, *given: Any) -> Any:
        before = [(tensor, tensor._version) for tensor in _tensors(given)]
        found = self._hook(*given)
        if found is not None or any(tensor._version != version for tensor, version in before):
            self.changes = True
            if self.refused:
                raise RuntimeError(
                    f'a hook of "{self.refused}", registered since parallelize, changes values: the plan is '
                    "proved for a program without it, and the module may have a part of them. Register it "
                    "before parallelize"
                )
        return found


def _tensors(given: tuple[Any, ...]) -> Iterator[Tensor]:
    for thing in given[1:]:  # after the module
        yield from (tensor for tensor in tensors_in(thing) if not tensor.is_inference())


def _is_ours(hook: Any) -> bool:
    """Whether a library has registered it, not the user."""
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return f"{module}.".startswith(OURS)
