"""Gradients of parameters that a loss has of its own: a step without values must not change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from unisono.torch_internals.fake import is_fake

__all__ = ["UnchangedLoss"]


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
    seen, left = set[Any](), [value.grad_fn]
    while left:
        function = left.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        leaf = getattr(function, "variable", None)
        if leaf is None:
            left += [before for before, _ in function.next_functions]
        elif not is_fake(leaf) and not leaf.is_meta:
            yield leaf
