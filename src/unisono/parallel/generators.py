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
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from unisono.torch_internals.fake import OperatorMode, arguments_of, is_fake


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


def states_of(generators: Iterable[torch.Generator]) -> list[torch.Tensor]:
    """Where these generators are."""
    return [generator.get_state() for generator in generators]


def set_states(generators: Iterable[torch.Generator], states: Iterable[torch.Tensor]) -> None:
    """Have them there again."""
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


@contextlib.contextmanager
def generators_kept(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """These generators are afterwards as they were before."""
    generators = [*generators]
    states = states_of(generators)
    try:
        yield
    finally:
        set_states(generators, states)


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


# ---- threads that draw at the same time ----


class _ThreadDraws(OperatorMode):
    """While it is active, an operator that draws finds the default generators as the last one of its thread
    has left them. Threads share the generators: who draws first depends on timing.

    PyTorch notes in variables of the process that some thread is within a mode, and each mode notes how to
    restore them. So all threads share one mode, and enter and leave it one at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock, self.here = threading.Lock(), threading.local()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator imports the compiler

    def __enter__(self) -> _ThreadDraws:
        with self._lock:
            super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        named = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _draws(func, args, named):
            return func(*args, **named)
        if _in_checkpoint():
            raise RuntimeError(
                f"{func.overloadpacket.__name__} runs within torch.utils.checkpoint, in a stage of a Pipe "
                "that runs in a thread: its second run would draw other numbers. Leave that out, and write "
                "Pipe(..., checkpoint=...)"
            )
        here = self.here
        with self._lock, generators_kept(here.generators):
            set_states(here.generators, here.states)
            made = func(*args, **named)
            here.states = states_of(here.generators)
        return made


_THREAD_DRAWS = _ThreadDraws()
CELLS = "unisono.parallel.pipeline.cells"


@contextlib.contextmanager
def drawing_in_thread(seed: int, device_type: str) -> Iterator[None]:
    """Like `drawing`, in threads at the same time. Operators of one thread draw the same as with `drawing`.

    Raises:
        RuntimeError: an operator draws within `torch.utils.checkpoint`, whose second run would find the
            default generators in another state.
    """
    here = _THREAD_DRAWS.here
    here.generators = default_generators(device_type)
    here.states = [torch.Generator(one.device).manual_seed(seed).get_state() for one in here.generators]
    with _THREAD_DRAWS:
        yield


def _draws(func: Any, args: Any, named: Any) -> bool:
    """Whether a call of an operator that may draw from a default generator does it."""
    given = dict(zip((argument.name for argument in arguments_of(func)), args, strict=False)) | named
    shares = [given[name] for name in ("dropout_p", "dropout") if name in given]
    own = given.get("generator") is not None
    return given.get("train") is not False and not own and (not shares or any(shares))


def _in_checkpoint() -> bool:
    """Whether a checkpoint of the caller's is between an operator and its cell of a Pipe."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") != CELLS:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


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
        self._kept = states_of(default_generators(self._device_type))
        reseed(seed, self._device_type)
        return True

    def end(self) -> None:
        """Draw what all ranks of the tensor axis draw."""
        kept, self._kept = self._kept, None
        if kept is not None:
            set_states(default_generators(self._device_type), kept)

    def forget(self) -> None:
        """Forget a region that an exception has ended, such as the one that ends a recomputation early."""
        self._kept = None
