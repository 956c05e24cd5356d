"""Refuses a loss that takes parameters of the model beside its output, where the plan cuts them.

On the tensor axis the gradients of such a use are whole on every rank, those through the model are parts: no
sum is right. In a pipeline the parameters of other stages are not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.torch_internals.training import sequence_of

__all__ = ["LossParameters"]


class LossParameters:
    """What a loss may not take.

    Args:
        sums: names of parameters whose gradients are summed over the tensor axis.
    """

    def __init__(self, model: nn.Module, sums: Iterable[str], tensor: int) -> None:
        self._model, self._sums, self._tensor = model, frozenset(sums), tensor

    def begin(self) -> int:
        """Note that the model has run, and the loss follows."""
        return sequence_of(torch.zeros((), requires_grad=True).clone().grad_fn)

    def check(self, loss: Tensor, begun: int) -> None:
        """Follow `loss` back to what the model has computed.

        Args:
            begun: what `begin` returned.
        Raises:
            ValueError: a parameter that is cut, or summed, is on the way.
        """
        seen: set[Any] = {None}
        left: list[Any] = [loss.grad_fn]
        while left:
            function = left.pop()
            if function in seen:
                continue
            seen.add(function)
            leaf = getattr(function, "variable", None)
            if isinstance(leaf, nn.Parameter):
                self._refuse(leaf)
            elif sequence_of(function) > begun:
                left += [before for before, _ in function.next_functions]

    def _refuse(self, leaf: nn.Parameter) -> None:
        if leaf.is_meta:
            raise ValueError(
                "the loss takes a parameter of the model itself, which is on another stage of the pipeline. "
                "Compute it in the forward of the model, and return it"
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
