"""The random numbers that a model draws in a step: PyTorch's default generators, seeded for each step.

| ranks | draws outside cut regions | draws in a cut region |
|---|---|---|
| of one tensor group | the same: they hold the same values | different: each has features of its own |
| of different data or pipeline places | different | different |

Optimizers draw the same on all ranks.

A cut region begins at the output of a layer that is cut by column and ends at the input of one cut by row.
A module that draws for this rank's positions of a sequence is one, too.
Its seed is drawn outside it, so a region that is recomputed in backward draws the same numbers again.
The caller's generators are as before after the step.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from unisono.torch_internals.fake import is_fake


def seed_of(*parts: int | str) -> int:
    """Mix numbers into a seed. Seeds of parts that differ in one bit are unrelated."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def drawn_seed() -> int | None:
    """A seed from the default generator; None: a model runs on shapes, and nothing has values."""
    drawn = torch.randint(2**62, (), device="cpu")
    return None if is_fake(drawn) else int(drawn)


def default_generators(device_type: str) -> list[torch.Generator]:
    """PyTorch's default generators that a model on this type of device draws from."""
    found: list[torch.Generator] = [torch.default_generator]
    if device_type == "cuda":
        torch.cuda.init()
        generators: Any = torch.cuda.default_generators
        found.append(generators[torch.cuda.current_device()])
    return found


def reseed(seed: int, device_type: str) -> None:
    """Seed the default generators."""
    for generator in default_generators(device_type):
        generator.manual_seed(seed)


@contextlib.contextmanager
def generators_kept(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """These generators are afterwards as they were before."""
    kept = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in kept:
            generator.set_state(state)


@contextlib.contextmanager
def pythons_generators_kept() -> Iterator[None]:
    """Those of `random` and of NumPy are afterwards as they were before."""
    kept = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])


@contextlib.contextmanager
def drawing(seed: int, device_type: str) -> Iterator[None]:
    """Seed the default generators; restore them afterwards."""
    with generators_kept(default_generators(device_type)):
        reseed(seed, device_type)
        yield


class RngRegion:
    """The cut regions of one model, one after the other, on one rank of the tensor axis.

    Args:
        place: of the rank; None: nothing is drawn.
    """

    def __init__(self, place: int | None, device_type: str) -> None:
        self._place, self._device_type = place, device_type
        self._kept: list[torch.Tensor] | None = None

    def begin(self) -> bool:
        """Draw this rank's own numbers from here on. Within a region nothing happens, and False returns."""
        if self._place is None or self._kept is not None:
            return False
        seed = seed_of(drawn_seed() or 0, self._place)
        self._kept = [generator.get_state() for generator in default_generators(self._device_type)]
        reseed(seed, self._device_type)
        return True

    def end(self) -> None:
        """Draw what all ranks of the tensor axis draw."""
        kept, self._kept = self._kept, None
        if kept is not None:
            for generator, state in zip(default_generators(self._device_type), kept, strict=True):
                generator.set_state(state)

    def forget(self) -> None:
        """Forget a region that an exception has ended, such as the one that ends a recomputation early."""
        self._kept = None
