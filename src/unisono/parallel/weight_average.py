"""`EMA`: an exponential moving average of a run's weights, each rank's part on that rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .gradients import local, wide_copy
from .replicated_parameters import like
from .run import Run


class EMA:
    """An exponential moving average of the weights: average = decay * average + (1 - decay) * weight.

    It begins with the weights as they are now. Each rank averages what it holds: its shards, its stages, its
    parts of matrices. Frozen parameters are left out, and buffers are always the model's own. Source: Polyak,
    Juditsky, Acceleration of Stochastic Approximation by Averaging, SIAM J. Control Optim. 30, 1992.

    Memory: as much as this rank's part of the parameters, in f32 at least.

    Args:
        decay: 0 to 1, without 1; or a function of the number of updates before this one.
    Attributes:
        updates: how often the average has moved.
    Raises:
        TypeError: `run` is no run, or `decay` is neither a number nor a function.
        ValueError: `decay` is out of range; or the plan is one of swap, elastic or local_steps.
    Example: weight 1.0, then 3.0 after a step, decay 0.5: the average is 2.0.
    """

    def __init__(self, run: Run, decay: float | Callable[[int], float] = 0.999) -> None:
        _check(run, decay)
        self._run, self._decay = run, decay
        self.updates = 0
        self._at = run.steps  # the step after which the average moved last
        self._averages: dict[str, Tensor] = {}
        self.begin(run.trained)
        run.averages.add(self)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights. Call it after each step.

        Without a new step, such as after `step(batch, update=False)`, nothing happens.

        Raises:
            ValueError: the function `decay` returned a number that is out of range.
        """
        if self._run.steps == self._at:
            return
        decay = self._decay(self.updates) if callable(self._decay) else self._decay
        _check_decay(decay)
        for name, average in self._averages.items():
            value = local(self._run.trained[name].detach())
            average.lerp_(value.to(average.dtype), 1.0 - decay)
        self.updates += 1
        self._at = self._run.steps

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Have the averages in place of the weights, for `evaluate`, `predict`, `state_dict` and `export`.

        Meanwhile `step`, `save` and `load` raise. All ranks call this. A rank needs memory for its part of
        the weights once more.

        Raises:
            ValueError: gradients wait for an update; or averages are in place already.
        """
        with self._run.replaced(self._averages):
            yield

    def tensors(self) -> dict[str, Tensor]:
        """The average of each parameter, cut as the parameter is, for a checkpoint."""
        return {name: like(self._averages[name], self._run.trained[name]) for name in self._averages}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the averages: `run.save(folder, also={"ema": ema})`."""
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after so many updates. `run.load(folder, also={"ema": ema})` calls it."""
        self.updates, self._at = int(state["updates"]), self._run.steps

    def begin(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Average these parameters, too, from their present values on: the run calls it."""
        for name, parameter in trained.items():
            self._averages[name] = wide_copy(parameter)


def _check(run: object, decay: object) -> None:
    if not isinstance(run, Run):
        raise TypeError(f"EMA: run is a {type(run).__name__}, expected what parallelize returned")
    if not callable(decay):
        _check_decay(decay)
    for name, why in (
        ("swap", "parameters are in a file between steps"),
        ("elastic", "its shards change with the ranks"),
        ("local_steps", "each replica has weights of its own between meetings"),
    ):
        if getattr(run.plan, name):
            raise ValueError(f"EMA is not for Plan({name}={getattr(run.plan, name)!r}): {why}")


def _check_decay(decay: object) -> None:
    if isinstance(decay, bool) or not isinstance(decay, (int, float)):
        raise TypeError(f"EMA: decay is {decay!r}, expected a number or a function of the updates")
    if not 0 <= decay < 1:
        raise ValueError(f"EMA: decay is {decay}; it must be at least 0 and below 1")
