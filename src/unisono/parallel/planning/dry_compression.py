"""Compression in a dry run: its buffers, and what an exchange takes for a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unisono.codecs.codec import Codec
from unisono.parallel.compression.compression_state import CompressionState
from unisono.parallel.compression.exchange_queue import length
from unisono.parallel.gradients import local

if TYPE_CHECKING:
    from unisono.parallel.compression.settings import CompressionSettings

    from .storage_watch import StorageWatch

__all__ = ["DryCompression"]


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

    def exchange(self, pairs: Sequence[tuple[Tensor, Tensor]], used: int = 0) -> None:
        """Average a bucket. The messages of the one before are under way until this one's are.

        Args:
            pairs: parameters, and their gradients.    used: further values, which are sent exactly.
        """
        with self._watch.labelled("buffers"):
            self._live = [*self._live[-1:], self._sent(pairs, used)]

    def finish(self) -> None:
        """All messages have arrived."""
        self._live = []

    def _sent(self, pairs: Sequence[tuple[Tensor, Tensor]], used: int) -> list[Tensor]:
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
