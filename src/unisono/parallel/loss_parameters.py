"""Refuses a loss that takes parameters beside the output of the model: its own, or those that the plan cuts.

Nothing trains parameters of the loss. On the tensor axis the gradients of parameters of the model that a
loss takes are whole on every rank, those through the model are parts: no sum is right. In a pipeline the
parameters of other stages are not there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.torch_internals.fake import is_fake
from unisono.torch_internals.fsdp import GatheredParameter
from unisono.torch_internals.training import functions_behind, hooks_of, sequence_of

__all__ = ["OF_RUNS", "LossParameters", "UnchangedLoss"]

# the WrittenParameters of all runs: a loss may call their models
OF_RUNS: weakref.WeakSet[Any] = weakref.WeakSet()


class LossParameters:
    """What a loss may not take.

    Args:
        sums: names of parameters whose gradients are summed over the tensor axis.
        whole: ranks have whole parameters of the model, which the loss may take.
    """

    def __init__(self, model: nn.Module, sums: Iterable[str], tensor: int, *, whole: bool) -> None:
        self._model, self._sums, self._tensor, self._whole = model, frozenset(sums), tensor, whole

    def may_end(self, loss: object) -> bool:
        """Whether one check is enough: a loss takes in later steps what it takes in the first one."""
        own = loss.parameters() if isinstance(loss, nn.Module) else ()
        return self._whole and not any(one.requires_grad and not _is_of_run(one) for one in own)

    def begin(self) -> int:
        """Note that the model has run, and the loss follows."""
        return sequence_of(torch.zeros((), requires_grad=True).clone().grad_fn)

    def check(self, loss: Tensor, begun: int, came: Sequence[Tensor] = ()) -> None:
        """Follow `loss` back to what the model has computed.

        Args:
            begun: what `begin` returned.
            came: from the stage before, which the model may return.
        Raises:
            ValueError: a parameter that is cut, or summed, or of the loss itself, is on the way.
        """
        for function in functions_behind(loss.grad_fn, begun):
            leaf = getattr(function, "variable", None)
            if isinstance(leaf, Tensor) and not any(leaf is one for one in came):
                self._refuse(leaf)

    def _refuse(self, leaf: Tensor) -> None:
        if leaf.is_meta:
            raise ValueError(
                "the loss takes a parameter of the model itself, which is on another stage of the pipeline. "
                "Compute it in the forward of the model, and return it"
            )
        if not _is_of_run(leaf):
            raise ValueError(
                f"the loss takes a tensor of its own that requires a gradient, {list(leaf.shape)}, and no "
                "rank would train it. Make it a parameter of the model, whose forward returns it or what "
                "needs it; or, if it does not train, call requires_grad_(False) of it, or of its module"
            )
        for name, parameter in self._model.named_parameters():
            if parameter is leaf and (name in self._sums or isinstance(leaf, DTensor)):
                raise ValueError(
                    f'the loss takes the parameter "{name}" itself, beside the output of the model, and '
                    "tensor="
                    f"{self._tensor} gives each rank a part of its gradient. Compute it in the forward of "
                    "the "
                    f'model, or write cuts={{"{name.rpartition(".")[0] or "*"}": "whole"}}'
                )


def _is_of_run(leaf: Tensor) -> bool:
    """Whether a run trains it, or a plan has put another one in its place: then its gradient says so."""
    hooks = hooks_of(leaf, "hooks of gradients") or {}
    old = any(getattr(hook, "func", None) is refuse_replaced for hook in hooks.values())
    return old or isinstance(leaf, GatheredParameter) or any(id(leaf) in run.numbers for run in OF_RUNS)


def refuse_replaced(name: str, _gradient: Tensor) -> None:
    """The hook of a parameter that the model had before a plan has put another one in its place."""
    raise RuntimeError(
        f'a gradient came to the parameter "{name}" that the model had before parallelize: the plan has put '
        "another one in its place, so this value is old, and nothing trains it. The loss, a hook or a "
        "closure holds it: compute what needs it in the forward of the model, from the module's attribute, "
        "and return it"
    )


# ---- the leaves of a loss ----


class UnchangedLoss:
    """A loss, called in steps without values; `restore` gives its own parameters the gradients that they had.

    Attributes:
        loss: the user's.
    """

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        self.loss = loss
        self._before: dict[Tensor, Tensor | None] = {}

    def __call__(self, output: Any, targets: Any) -> Any:
        value = self.loss(output, targets)
        total = value[0] if isinstance(value, tuple) else value
        if isinstance(total, Tensor):
            for leaf in _real_leaves(total):
                self._before.setdefault(leaf, leaf.grad)
        return value

    def restore(self) -> None:
        """Call it after the last step."""
        for leaf, grad in self._before.items():
            leaf.grad = grad
        self._before.clear()


def _real_leaves(value: Tensor) -> Iterator[Tensor]:
    """Leaves of autograd's graph that have values."""
    leaves = (getattr(function, "variable", None) for function in functions_behind(value.grad_fn))
    return (leaf for leaf in leaves if leaf is not None and not is_fake(leaf) and not leaf.is_meta)
