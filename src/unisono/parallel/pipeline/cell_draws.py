"""Random numbers of one cell of a pipeline whose stages run in threads of one process.

Threads share PyTorch's default generators: who draws first would depend on timing, and a cell that is computed
again would draw other numbers. Here each cell has generators of its own, seeded by its stage and micro-batch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from unisono.parallel.graph.containers import tensors_in
from unisono.torch_internals.fake import OperatorMode, arguments_of

# overload without a generator -> with one; the others take one themselves, or never
VARIANTS = {
    "default": "generator",
    "low": "low_generator",
    "low_dtype": "low_generator_dtype",
    "Tensor": "Tensor_generator",
}


class CellDraws(OperatorMode):
    """Within it operators draw from generators of this seed, one for each device.

    Raises:
        RuntimeError: an operator takes no generator; or it runs within `torch.utils.checkpoint`, whose second
            run would draw from the default generator.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

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
            return self._dropout(*args, **named)
        drawing = func if _takes_generator(func) else _variant(func)
        if drawing is None:
            with self:  # an operator of others, such as dropout in inference mode
                made = func.decompose(*args, **named)
            if made is not NotImplemented:
                return made
            raise RuntimeError(
                f"{name} draws random numbers and takes no generator, in a stage of a Pipe that runs in a thread: "
                "they would depend on timing. Draw outside, and give the numbers to the model"
            )
        return drawing(*args, **{**named, "generator": self._generator(args, named)})

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:  # noqa: FBT001
        """A GPU's fused dropout, of which the CPU has no variant with a generator."""
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=self._generator((x,), {}))
        return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask

    def _generator(self, args: Any, named: Any) -> torch.Generator:
        first = next(tensors_in(args), None)
        device = torch.device(named.get("device") or "cpu") if first is None else first.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


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
    return getattr(func.overloadpacket, VARIANTS.get(func._overloadname, ""), None)


def _in_checkpoint() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
