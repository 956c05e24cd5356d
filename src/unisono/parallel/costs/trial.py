"""A few steps of the user's model: what its own Python takes beside its operators.

Prices of operators do not see what a forward does between them, such as the wrappers that a library puts
around its modules. In a small model that is a third of a step. Few rows show it: it does not grow with them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from unisono.parallel.batches import cut_rows
from unisono.parallel.graph.capture import call
from unisono.parallel.graph.containers import mapped, tensors_in
from unisono.parallel.graph.shapes import model_copy
from unisono.parallel.optimizers import Parameters

if TYPE_CHECKING:
    from .operator_prices import OperatorPrices
    from .traced_step import TracedOperator

__all__ = ["ModelTrial", "should_try"]

LIMIT_BYTES = 100 << 20
"""Of parameters: a larger model has steps whose operators take most."""

MOST_SECONDS = 0.005
"""Of a forward: fewer rows are tried where it would take more."""

WARM, ROUNDS = 2, 5
PHASES = ("forward", "backward", "update")


class ModelTrial:
    """What can be tried of a model.

    Args:
        model, batch: with values, on the CPU.
        rows: the most that are tried.
        output: of the model -> what the loss takes.  loss: (output, targets) -> a number, or (sum, count).
        optimizer: of parameters; None: no update is tried.
    Attributes:
        problem: why the model did not run; "": it did.
    """

    def __init__(
        self, model: nn.Module, batch: tuple[Any, Any], rows: int, output: Callable[[Any], Any],
        loss: Callable[[Any, Any], Any], optimizer: Callable[[Any], Any] | None,
    ) -> None:  # fmt: skip
        self._model, self._batch, self._rows = model, batch, rows
        self._output, self._loss, self._optimizer = output, loss, optimizer
        self.problem = ""

    def overhead(
        self, trace: Callable[[int], Sequence[TracedOperator]], prices: OperatorPrices, threads: int
    ) -> dict[str, float]:
        """Seconds of an operator beside its price, by phase, also less; {}: the model does not run so.

        Args:
            trace: the operators of a step of so many rows.  threads: with which these prices were measured.
        """
        rows = self._rows
        while (said := _priced(trace(rows), prices))["forward"][0] > MOST_SECONDS and rows > 1:
            rows //= 2
        took = self._passes(rows, threads)
        if took is None:
            return {}
        return {
            phase: (measured - said[phase][0]) / max(1, said[phase][1])
            for phase, measured in zip(PHASES, took, strict=True)
        }

    def _passes(self, rows: int, threads: int) -> tuple[float, ...] | None:
        """The least seconds of each phase of a copy's steps; None: it does not run.

        Generators of random numbers have their state again after it.
        """
        before = torch.get_num_threads(), torch.get_rng_state(), random.getstate(), np.random.get_state()
        torch.set_num_threads(min(threads, before[0]))
        alone = torch.get_num_threads() == 1  # then other ranks may wait on this core
        clock = time.thread_time if alone else time.perf_counter
        try:
            model, loss = model_copy((self._model, self._loss))
            trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
            made = [] if self._optimizer is None else self._optimizer(Parameters(trained))
            optimizers = made if isinstance(made, (list, tuple)) else [made]
            parameters = [*trained.values()]
            enough = mapped(self._batch, lambda tensor: torch.cat([tensor] * -(-rows // len(tensor))))
            inputs, targets = cut_rows(enough, 0, rows)
            found = []
            with torch.enable_grad():
                for _ in range(WARM + ROUNDS):
                    began = clock()
                    value = loss(self._output(call(model, inputs)), targets)
                    value = value[0] if isinstance(value, tuple) else value
                    ran = clock()
                    value.backward(inputs=parameters)  # not those that the loss may have
                    back = clock()
                    for each in optimizers:
                        each.step()
                    found.append((ran - began, back - ran, clock() - back))
                    model.zero_grad()
        except Exception as error:  # noqa: BLE001  no plan depends on it; where it trains, it comes again
            self.problem = f"{type(error).__name__}: {error}"
            return None
        finally:
            torch.set_num_threads(before[0])
            torch.set_rng_state(before[1])
            random.setstate(before[2])
            np.random.set_state(before[3])
        return tuple(min(column) for column in zip(*found[WARM:], strict=True))


def should_try(model: nn.Module, batch: Any) -> bool:
    """Whether the model is small, and it and the batch have values on the CPU."""
    held = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    plain = all(type(v) in (torch.Tensor, nn.Parameter) and v.device.type == "cpu" for v in held)
    return plain and sum(v.nbytes for v in held) < LIMIT_BYTES


def _priced(operators: Sequence[TracedOperator], prices: OperatorPrices) -> dict[str, tuple[float, int]]:
    """Of each phase: the seconds of its operators, and how many they are."""
    every = {phase: [each for each in operators if each.phase == phase] for phase in PHASES}
    return {phase: (sum(map(prices.seconds, each)), len(each)) for phase, each in every.items()}
