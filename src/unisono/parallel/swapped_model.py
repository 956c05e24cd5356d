"""A model that trains with little memory in one process, by `ParameterSwap`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .batches import micro_batches as cut
from .batches import rows_of
from .spill import Disk, SpillStorage
from .structure import entries
from .swap import ParameterSwap
from .written_parameters import FORWARDS


class Swapped:
    """A model that trains with little memory, in one process. For several there is `Plan(swap=...)`.

    Args:
        model: an nn.Sequential, a model with containers of blocks, or one that a rule knows; other
            parameters stay in memory during a step.
        optimizer: makes the optimizer from all parameters. Each is stepped on its own, as torch.optim's
            optimizers but
            LBFGS allow.
        store: Disk(folder) or Host().
        clip: largest global norm of gradients.
        units: the modules to bring in one after the other; None: by the model's rule.
    Attributes:
        step_s: seconds of the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        loss: Callable[[Any, Any], Tensor],
        store: SpillStorage | None = None,
        clip: float | None = None,
        units: Sequence[nn.Module] | None = None,
    ) -> None:
        self.model, self._loss, self._clip = model, loss, clip
        self.optimizer = optimizer(list(model.parameters()))
        modules = entries(model) if units is None else units
        self._swap = ParameterSwap(model, modules, store or Disk())
        self._swap.watched = FORWARDS
        self.step_s = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds of the last step in which compute waited for the store."""
        return self._swap.waited_s

    def mapped(self) -> AbstractContextManager[object]:
        """Have the parameters and moments where the store has them, to be read or written there."""
        return self._swap.mapped(self.optimizer)

    def step(self, batch: tuple[Any, Any], *, micro_batches: int = 1) -> float:
        """Train on one batch of (inputs, targets); return its mean loss.

        The losses are bit for bit those of `optimizer.zero_grad(); loss.backward(); optimizer.step()` on the
        same parts.
        """
        self._swap.check()
        began, rows, mean = time.perf_counter(), rows_of(list(batch)), 0.0
        self._swap.waited_s = 0.0
        try:
            for inputs, targets in cut(batch, micro_batches):
                share = rows_of([inputs, targets]) / rows
                loss = self._loss(_call_model(self.model, inputs), targets)
                self._swap.before_backward(last=False)
                (loss * share).backward()
                mean += loss.item() * share
            self._swap.finish()
            self._swap.update(self.optimizer, self._factor())
        except BaseException:
            self._swap.reset()
            raise
        self.step_s = time.perf_counter() - began
        return mean

    def _factor(self) -> float:
        if self._clip is None:
            return 1.0
        return min(1.0, self._clip / (math.sqrt(self._swap.squared_norm()) + 1e-6))

    def close(self) -> None:
        """Bring the parameters back into memory for good, and give the store up. The optimizer's state is
        dropped.
        """
        self._swap.close()
        self.optimizer.state.clear()

    def __enter__(self) -> Swapped:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _call_model(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
