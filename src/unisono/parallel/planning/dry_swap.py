"""Swapping in a dry run: the code of a run, whose store keeps nothing, and which moves at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from unisono.parallel.replicated_parameters import GradientBucket
from unisono.parallel.spill import Host, Key, SpillStorage
from unisono.parallel.swap import ParameterSwap

from .storage_watch import StorageWatch

if TYPE_CHECKING:
    import torch

    from unisono.parallel.plan import Plan

__all__ = ["DrySwap"]


class DrySwap(ParameterSwap):
    """What `ParameterSwap` keeps in memory.

    A run writes in the background: two writes may be under way, so two gradients are counted as there.

    Args:
        units: what comes in one after the other.    device_type: of the model.
    """

    def __init__(
        self, root: nn.Module, units: Iterable[nn.Module], plan: Plan, watch: StorageWatch, device_type: str
    ) -> None:
        self._watch = watch
        kept = plan.swap == "memory" and device_type == "cpu"  # the store is in the same memory
        group: Any = object() if plan.data > 1 else None  # it gets no message
        super().__init__(root, units, Host() if kept else _Elsewhere(), group=group)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's state, as a first step does."""
        self._norms = {value: 1.0 for value in self._number if value.requires_grad}
        for value in self._norms:
            self._put((self._number[value], "grad"), value.data)
        self._written()
        self.update(optimizer, 1.0)

    def after_backward(self) -> None:
        """Nothing changes."""

    def _executor(self) -> Executor:
        return _AtOnce()

    def _norm(self, _grad: Tensor) -> float:
        return 1.0

    def _average(self, bucket: GradientBucket) -> None:
        for parameter in bucket.parameters:
            if parameter in self._norms:
                self._fetch_gradient(parameter)
        bucket.fill()
        for parameter, part in bucket.parts():
            if parameter in self._norms:
                self._keep_gradient(parameter, part)

    def _empty(self, tensor: Tensor) -> None:
        self._watch.leave(tensor)

    def _fill(self, tensor: Tensor) -> None:
        self._watch.come(tensor, "parameters" if isinstance(tensor, nn.Parameter) else "moments")


class _Elsewhere(SpillStorage):
    """A disk, or the memory of the host beside that of a GPU."""

    def write(self, key: Key, tensor: Tensor) -> None:
        """Keep nothing."""

    def read(self, key: Key, tensor: Tensor) -> None:
        """Leave the values."""

    def view(self, key: Key, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        del key
        return tensor

    def close(self) -> None:
        """Nothing is kept."""


class _AtOnce(Executor):
    """Runs a call at once. What it was given stays in memory until its result is asked for."""

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        """Run it."""
        found: Future[Any] = Future()
        call(*given, **named)
        found.set_result(given)
        return found
