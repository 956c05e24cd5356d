"""What a caller does to a model after `parallelize`: what the proved program does not have is refused.

| | tensor, expert | pipeline | context |
|---|---|---|---|
| another module, or another forward | refused | refused | refused |
| a hook that only looks | runs | runs, if its module is called | refused |
| a hook that returns something, or writes | refused | likewise | refused |

Hooks that were there before belong to the program: those that change values may not be removed.

Parameters may be frozen and unfrozen between calls, on all ranks alike. A rank that trains what another one
has frozen would wait for it in another collective. So each call tells all ranks, in the message with the rows
of its batch, whether something has changed. Only then the ranks compare names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from unisono.torch.control_data import on_every_rank
from unisono.torch_internals import fsdp

from .graph.containers import tensors_in
from .graph.stage_program import StageProgram
from .mesh import PlanMesh
from .model_setup import ModelSetup
from .plan import Plan
from .sharded_parameters import ShardedParameters
from .swap import ParameterSwap
from .weights import fused_layers

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
    def of(cls, model: nn.Module, plan: Plan, first: StageProgram | None) -> ModelChanges | None:
        """None: a plan without a proved program, which follows each change."""
        if plan.tensor == plan.pipeline == plan.context == plan.expert == 1:
            return None
        pieces = frozenset({""} if plan.pipeline > 1 else ())
        opened = pieces if first is None else first.open
        return cls(model, plan, None if plan.context > 1 else opened)

    def check(self) -> None:
        """Refuse what a plan would not follow, before a step."""
        for path, module, children, forward in self._modules:
            if module._modules != children:
                names = {**children, **module._modules}
                name = next(key for key in names if module._modules.get(key) is not children.get(key))
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
    """A hook of a module, and whether it changes values."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self.changes = False
        self.refused = ""

    def __call__(self, *given: Any) -> Any:
        taken = tensors_in(given[1:])  # after the module
        before = [(tensor, tensor._version) for tensor in taken if not tensor.is_inference()]
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


def _is_ours(hook: Any) -> bool:
    """Whether a library has registered it, not the user."""
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return f"{module}.".startswith(OURS)


# ---- which parameters are trained ----


def why_fixed(built: ModelSetup) -> str:
    """Why a run does not follow what is frozen and unfrozen; empty: it does."""
    plan, cut = built.mesh.everyone.plan, built.decision
    for name in ("swap", "elastic", "local_steps", "compression"):
        if getattr(plan, name):
            return f"Plan({name}={getattr(plan, name)!r}) does not follow"
    if isinstance(built.units, ShardedParameters) and not fsdp.can_follow_frozen():
        return "Units of this PyTorch do not follow"
    if built.experts is not None:
        return f"Plan(expert={plan.expert}) with layers of experts does not follow"
    if cut is not None and not cut.of_all:
        return (
            f"tensor={plan.tensor} is cut for what was trained then. With parallelize(..., sample=inputs "
            "of a batch), most models are cut for all parameters"
        )
    return ""


def check_trained(
    named: Mapping[str, nn.Parameter], trained: Mapping[str, nn.Parameter], why: str, *, follows: bool
) -> None:
    """Raise RuntimeError if parameters were frozen or unfrozen after the run was made."""
    for name, parameter in named.items():
        was = name in trained
        if parameter.requires_grad == was or (was and follows):
            continue
        before, now = ("trained", "frozen") if was else ("frozen", "trained")
        raise RuntimeError(
            f"{name!r} was {before} when this run was made, and is {now} now. {why}. Or save a checkpoint, "
            f"make a new model where it is {now}, a new run by up.parallelize, and load"
        )


class TrainedFlags:
    """Which parameters of this rank are trained.

    Attributes:
        everywhere: name -> whether it is trained, of the parameters of all ranks, as `agreed` has found it.
            A layer for which others stand is trained if one of them is.
    """

    def __init__(self, built: ModelSetup) -> None:
        self._named, self._units = built.named, built.units
        self._flags = {name: value.requires_grad for name, value in self._named.items()}
        self._fused = {
            f"{layer.path}.{leaf}": layer.parts(leaf)
            for layer in fused_layers(built.model)
            for leaf in layer.leaves
        }
        self.everywhere: dict[str, bool] = {}
        everywhere = built.model.named_parameters(remove_duplicate=False)
        self._stand_ins = [  # at the path of a tied parameter in another stage
            (self._named[built.names[path]], other)
            for path, other in everywhere
            if other.is_meta and built.names[path] in self._named
        ]

    def _shown(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield (parameter, another tensor by which the model shows it)."""
        assert not isinstance(self._units, ParameterSwap)
        yield from self._units.shown()
        yield from self._stand_ins

    def changed(self) -> dict[str, bool]:
        """Name -> whether it is trained now, of each parameter that the caller has frozen or unfrozen."""
        others = {value for value, other in self._shown() if other.requires_grad != value.requires_grad}
        return {
            name: not was
            for name, was in self._flags.items()
            if self._named[name].requires_grad != was or self._named[name] in others
        }

    def agreed(self, mesh: PlanMesh, problem: str = "") -> bool:
        """Compare the changes of all ranks; return whether there are any. All ranks call this.

        Args:
            problem: why this rank cannot follow.
        Raises:
            ValueError: a rank cannot follow, or ranks differ about a parameter that both have.
        """
        mine = self.changed()
        told = on_every_rank(lambda: (self._flags | mine, bool(mine), problem), mesh.world)
        first: dict[str, tuple[int, bool]] = {}
        for rank, (flags, _, other_problem) in enumerate(told):
            if other_problem:
                raise ValueError(f"rank {rank}: {other_problem}")
            for name, flag in flags.items():
                other, before = first.setdefault(name, (rank, flag))
                if flag != before:
                    words = {True: "trained", False: "frozen"}
                    raise ValueError(
                        f"{name!r} is {words[before]} on rank {other} and {words[flag]} on rank {rank}: "
                        "freeze and unfreeze on all ranks before the same step"
                    )
        found = {name: flag for name, (_, flag) in first.items()}
        fused = {whole: any(found.get(part, False) for part in parts) for whole, parts in self._fused.items()}
        self.everywhere = found | fused
        return any(changed for _, changed, _ in told)

    def take(self, changed: Mapping[str, bool]) -> None:
        """Have these flags from now on, also for what the model shows in place of a parameter."""
        flags = {self._named[name]: flag for name, flag in changed.items()}
        shown = [(other, flags[value]) for value, other in self._shown() if value in flags]
        for one, flag in [*flags.items(), *shown]:
            one.requires_grad_(flag)
            one.grad = None
        self._flags |= changed
