"""The caller's hooks on parameters: they get the gradient of the whole batch, as in one process.

Autograd would call them with the gradient of one rank's rows, of one micro-batch, or never, where a plan
puts other parameters in the place of the model's. So `parallelize` takes them from the parameters, and a step
calls them when the gradients are complete on all ranks, before it clips them. A handle's `remove()` works.

| hook | where it is called |
|---|---|
| `parameter.register_hook` | everywhere; the ranks gather the gradient of what is sharded or cut |
| `parameter.register_post_accumulate_grad_hook` | where the ranks have whole parameters in f32 |
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.torch_internals.training import hooks_of, set_hooks

from .gradients import cut_like
from .plan import Plan

OF_GRADIENTS, AFTER = "hooks of gradients", "hooks after gradients"
OURS = __name__.partition(".")[0] + "."


class ParameterHooks:
    """The hooks of a model's parameters. Args: hooks: name -> kind -> number -> function."""

    def __init__(self, hooks: dict[str, dict[str, Any]] | None = None) -> None:
        self._hooks = hooks or {}

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, weigh: object = None) -> ParameterHooks:
        """Take the hooks from the parameters of `model`."""
        found = [
            (name, parameter, kind, _hooks(parameter, kind))
            for name, parameter in model.named_parameters()
            for kind in (OF_GRADIENTS, AFTER)
        ]
        taken = [one for one in found if one[3]]
        for name, _, kind, _ in taken:
            _check(name, kind, plan, weigh)
        made: dict[str, dict[str, Any]] = {}
        for name, parameter, kind, hooks in taken:
            set_hooks(parameter, kind, OrderedDict({0: _TakenHooks(hooks)}))
            made.setdefault(name, {})[kind] = hooks
        return cls(made)

    def check_names(self, names: Mapping[str, str]) -> None:
        """Raise ValueError if a parameter with hooks is no more. `names`: path -> name of those that are."""
        for name in set(self._hooks) - set(names.values()):
            raise ValueError(
                f'"{name}" has a hook, and the tensor axis makes several parameters of it. Write cuts='
                f'{{"{name.rpartition(".")[0]}": "whole"}}'
            )

    def check_step(self, *, update: bool) -> None:
        """Raise ValueError for a step that only adds to the gradients: hooks would see several batches."""
        if self._hooks and not update:
            raise ValueError(
                f"update=False adds up gradients of several batches, as backward does, and "
                f'"{next(iter(self._hooks))}" '
                "has a hook, which one process calls for each of them. Remove it, or use one batch for each "
                "update"
            )

    @torch.no_grad()
    def call(self, named: Mapping[str, nn.Parameter], scale: float) -> None:
        """Call the hooks with the gradients of all ranks. All ranks call this."""
        for name, kinds in self._hooks.items():
            parameter = named.get(name)
            if parameter is None or parameter.grad is None:
                continue
            hooks = [*kinds.get(OF_GRADIENTS, {}).values()]
            if hooks:
                grad = parameter.grad
                whole = (grad.full_tensor() if isinstance(grad, DTensor) else grad) / scale
                for hook in hooks:
                    made = hook(whole)
                    whole = whole if made is None else made
                parameter.grad = cut_like(whole * scale, parameter)
            for hook in [*kinds.get(AFTER, {}).values()]:
                with torch.enable_grad():
                    hook(parameter)


class _TakenHooks:
    """Stands on a parameter in place of its hooks, so that the next `parallelize` of its model finds them."""

    def __init__(self, hooks: Any) -> None:
        self.hooks = hooks

    def __call__(self, _: Tensor) -> None:
        """Do nothing: the step calls the hooks."""


def _hooks(parameter: nn.Parameter, kind: str) -> Any:
    """The caller's hooks, without those of a run that is no more."""
    there = hooks_of(parameter, kind) or {}
    for hook in there.values():
        if isinstance(hook, _TakenHooks):
            return hook.hooks
    ours = [number for number, hook in there.items() if _module(hook).startswith(OURS)]
    return there if len(ours) < len(there) else None


def _module(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))


def _check(name: str, kind: str, plan: Plan, weigh: object) -> None:
    why = ""
    if plan.swap is not None:
        why = f"swap={plan.swap!r} moves its gradient out of memory during backward"
    elif plan.expert > 1:
        why = f"expert={plan.expert} gives ranks parameters of their own"
    elif weigh == "counted":
        why = 'weigh="counted" divides the gradient only after all ranks have told their counts'
    elif plan.precision == "fp16" and kind == AFTER:
        why = 'precision="fp16" multiplies its gradient by a scale'
    elif kind == AFTER and (plan.zero or plan.tensor > 1 or plan.low):
        why = "the plan leaves this rank a part of it, which such a hook would take for the whole"
    if why:
        function = "register_hook" if kind == OF_GRADIENTS else "register_post_accumulate_grad_hook"
        raise ValueError(
            f'"{name}" has a hook of {function}, and {why}. Remove it: clip by Plan(clip=...), and multiply '
            "by a mask in the forward. Or use data= with zero=0"
        )
