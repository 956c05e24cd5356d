"""Random numbers of one cell of a pipeline whose stages run in threads of one process.

Threads share PyTorch's default generators: who draws first would depend on timing, and a cell that is
computed again would draw other numbers. Here each cell has generators of its own, seeded by its stage and
micro-batch.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from unisono.parallel.graph.containers import tensors_in
from unisono.torch_internals.fake import OperatorMode, arguments_of

# overload without a generator -> with one; the others take one themselves, or never
VARIANTS = {
    "": "generator",
    "low": "low_generator",
    "low_dtype": "low_generator_dtype",
    "Tensor": "Tensor_generator",
}

CELLS = "unisono.parallel.pipeline.cells"


class _CellDraws(OperatorMode):
    """Within `of` operators of this thread draw from generators of a seed, one for each device.

    PyTorch notes in variables of the process that some thread is within a mode, and each mode notes how to
    restore them. So all threads share one mode, and enter and leave it one at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._here = threading.local()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator imports the compiler

    def __enter__(self) -> _CellDraws:
        with self._lock:
            super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            super().__exit__(*error)

    @contextlib.contextmanager
    def of(self, seed: int) -> Iterator[None]:
        """The draws of one cell.

        Raises:
            RuntimeError: an operator takes no generator; or it runs within `torch.utils.checkpoint`, whose
                second run would draw from the default generator.
        """
        self._here.seed, self._here.generators = seed, {}
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        named = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _draws(func, args, named):
            return func(*args, **named)
        if any(True for _ in tensors_in((args, named), torch.Generator)):
            return func(*args, **named)  # the caller's own
        name = func.overloadpacket.__name__
        if _in_checkpoint():
            raise RuntimeError(
                f"{name} runs within torch.utils.checkpoint, in a stage of a Pipe that runs in a thread: its "
                "second run would draw other numbers. Leave that out, and write Pipe(..., checkpoint=...)"
            )
        if name == "native_dropout":
            return self._dropout(*args[:2])
        drawing = func if _takes_generator(func) else _variant(func)
        if drawing is None:
            with self:  # an operator of others, such as dropout in inference mode
                made = func.decompose(*args, **named)
            if made is not NotImplemented:
                return made
            raise RuntimeError(
                f"{name} draws random numbers and takes no generator, in a stage of a Pipe that runs in a "
                "thread: they would depend on timing. Draw outside, and give the numbers to the model"
            )
        return drawing(*args, **{**named, "generator": self._generator(args, named)})

    def _dropout(self, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        """A GPU's fused dropout, of which the CPU has no variant with a generator."""
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=self._generator((x,), {}))
        return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask

    def _generator(self, args: Any, named: Any) -> torch.Generator:
        first = next(tensors_in(args), None)
        device = torch.device(named.get("device") or "cpu") if first is None else first.device
        generators: dict[torch.device, torch.Generator] = self._here.generators
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(self._here.seed)
        return generators[device]


CELL_DRAWS = _CellDraws()


def _draws(func: Any, args: Any, named: Any) -> bool:
    """Whether a call of an operator that may draw does it."""
    names = (argument.name for argument in arguments_of(func))
    given = dict(zip(names, args, strict=False)) | named
    shares = [given[name] for name in ("dropout_p", "dropout") if name in given]
    return given.get("train") is not False and (not shares or any(shares))


def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def _variant(func: Any) -> Any:
    """The overload with a generator; None: there is none."""
    overload = func.name().partition(".")[2]
    return getattr(func.overloadpacket, VARIANTS.get(overload, ""), None)


def _in_checkpoint() -> bool:
    """Whether a checkpoint of the caller's is between an operator and its cell."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") != CELLS:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
