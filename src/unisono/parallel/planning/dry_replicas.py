"""The data axis of a dry run where each rank has whole parameters: what a run keeps in memory, no message.

Replicas under ZeRO 0, compression of what they exchange, their outer steps, and swapping. Buckets, outer
steps and swapping are the code of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unisono.codecs.codec import Codec
from unisono.parallel.compression.compression_state import CompressionState
from unisono.parallel.compression.exchange_queue import length
from unisono.parallel.gradients import local
from unisono.parallel.spill import Host, Key, SpillStorage
from unisono.parallel.swap import ParameterSwap

from .memory_account import StorageWatch

if TYPE_CHECKING:
    from unisono.parallel.compression.settings import CompressionSettings
    from unisono.parallel.mesh import PlanMesh

__all__ = ["DryCompression", "DrySwap"]

Pair = tuple[Tensor, Tensor]  # a parameter, and its gradient in a bucket


class DryCompression:
    """What `Compression` keeps in memory, when a step was made before.

    Args:
        named: parameters by their names in the user's model.    ranks: that exchange.
    """

    def __init__(
        self, settings: CompressionSettings, named: Mapping[str, Tensor], ranks: int, watch: StorageWatch
    ) -> None:
        self._ranks, self._watch = ranks, watch
        self._feedback, self._codec = settings.feedback, settings.low_rank.codec
        self._held: dict[Tensor, CompressionState] = {}
        self._live: list[list[Tensor]] = []
        with watch.labelled("buffers"):
            for name, value in named.items():
                part = local(value)
                choice = settings.choice(name, part.shape)
                options = {"feedback": settings.feedback, "errors": settings.errors}
                held = CompressionState(name, part.shape, choice, **options, seed=0)  # type: ignore[arg-type]
                if held.keeps:
                    held.error = torch.zeros(part.shape, dtype=held.dtype)
                if held.rank:
                    held.factor = torch.zeros(held.rank, part.shape[1:].numel())
                self._held[value] = held

    def begin(self, pairs: Sequence[Pair], flat: Tensor, *, label: str, exact: Sequence[Tensor] = ()) -> None:
        """Average a bucket. The messages of the one before are under way until this one's are."""
        del flat, label
        with self._watch.labelled("buffers"):
            self._live = [*self._live[-1:], self._sent(pairs, sum(each.numel() for each in exact))]

    def finish(self) -> None:
        """All messages have arrived."""
        self._live = []

    def reset(self) -> None:
        """None is under way."""

    def _sent(self, pairs: Sequence[Pair], used: int) -> list[Tensor]:
        exact, ranked, made = used, 0, []
        coded: dict[Codec, int] = {}
        for parameter, gradient in pairs:
            held, numel = self._held.get(parameter), gradient.numel()
            if held is None or held.choice == "exact":
                exact += numel
            elif isinstance(held.choice, Codec):
                coded[held.choice] = coded.get(held.choice, 0) + length(numel, held.choice, 1)
            else:
                ranked += held.rank * (held.shape[0] + held.shape[1:].numel())
                if held.keeps and held.dtype != torch.float32:
                    made.append(torch.empty_like(gradient))
        if exact:
            made.append(torch.empty(exact))
        for codec, numel in coded.items():
            whole = length(numel, codec, self._ranks)
            made += [torch.empty(whole) for _ in range(3 if self._feedback else 2)]  # and sum, and error
            made.append(torch.empty(codec.nbytes(whole), dtype=torch.uint8))
        if ranked:  # as they are and in one vector, with its codes, sum and error
            made += [torch.empty(ranked) for _ in range(2 if self._codec is None else 4)]
        return made


class DrySwap(ParameterSwap):
    """What `ParameterSwap` keeps in memory.

    A run writes in the background: two writes may be under way, so two gradients are counted as there.

    Args:
        units: what comes in one after the other.    device_type: of the model.
    """

    def __init__(self, root: nn.Module, units: Iterable[nn.Module], mesh: PlanMesh, device_type: str) -> None:
        plan = mesh.plan
        kept = plan.swap == "memory" and device_type == "cpu"  # the store is in the same memory
        group = mesh.group("replica") if plan.data > 1 else None
        super().__init__(root, units, Host() if kept else _Elsewhere(), group=group)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's state, as a first step does."""
        self._norms = {value: 1.0 for value in self._number if value.requires_grad}
        for value in self._norms:
            self._put((self._number[value], "grad"), torch.empty_like(value))
        self._written()
        self.update(optimizer, 1.0)

    def _executor(self) -> Executor:
        return _AtOnce()

    def _norm(self, _grad: Tensor) -> float:
        return 1.0


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
