"""Stages: the pieces of a model in each one, and the part of the model that this rank keeps."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.parallel.context.replay import ForwardCall
from unisono.parallel.graph.capture import call
from unisono.parallel.graph.containers import mapped
from unisono.parallel.plan import Plan, UnfitError
from unisono.torch.control_data import on_rank_0


class PipelineStages(nn.Module):
    """The stages of one rank. Called with the number of the stage, what comes, and the model's inputs.

    A ForwardCall in place of the inputs runs the stage itself.

    Args:
        exact: the stage whose floating outputs are cast to f32, because the loss takes them; None: none is.
    """

    def __init__(self, stages: dict[int, nn.Module], exact: int | None = None) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(stage): module for stage, module in stages.items()})
        self._exact = exact

    def forward(self, stage: int, came: Sequence[Tensor], inputs: Any) -> Any:
        module = self.stages[str(stage)]
        output = inputs.run(module, came) if isinstance(inputs, ForwardCall) else module(came, inputs)
        return mapped(output, _in_f32) if stage == self._exact else output


def _in_f32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor


class PieceStage(nn.ModuleList):
    """Pieces, one after the other. The first stage takes the model's inputs, the others what comes."""

    def program_of(self, _inputs: Any) -> str:
        """Pieces run one program."""
        return ""

    def sends_unused(self, _stage: int, _inputs: Any) -> bool:
        """Pieces take what comes."""
        return False

    def __init__(self, pieces: Sequence[nn.Module], *, first: bool) -> None:
        super().__init__(pieces)
        self._first = first

    def forward(self, came: Sequence[Tensor], inputs: Any) -> Any:
        first, *rest = self
        value = call(first, inputs if self._first else tuple(came))
        for piece in rest:
            value = piece(*value) if isinstance(value, tuple) else piece(value)
        return value


def first_pieces(pieces: Sequence[nn.Module], plan: Plan, sample: Any, *, on_meta: bool) -> Sequence[int]:
    """The first piece of each stage but the first. Pieces are measured while no rank needs another one."""
    if on_meta and sample is not None and plan.cuts is None:
        raise ValueError(
            "sample= runs the pieces to measure them, and a model on the meta device has nothing to run. "
            "Leave it out, and parameters are counted; or say where stages begin: Plan(cuts=...)"
        )
    starts = plan.cuts or _balanced(pieces, plan.stages, sample)
    check_starts(starts, len(pieces))
    return starts


def check_starts(starts: Sequence[int], pieces: int) -> None:
    """Raise ValueError where stages begin at pieces that a model does not have."""
    if starts and not 0 < starts[0] <= starts[-1] < pieces:
        raise UnfitError(f"cuts={tuple(starts)} do not fit a model of {pieces} pieces")


def check_no_cuts(plan: Plan, model: nn.Module) -> None:
    """Raise ValueError for `cuts` of a model whose stages are cut from its program."""
    if plan.cuts is not None:
        raise UnfitError(
            f"cuts={plan.cuts} counts pieces, and {type(model).__name__} has none: its stages are cut from "
            "its program. Leave cuts out, or write parallelize(..., pieces=[first, second, ...])"
        )


def _balanced(pieces: Sequence[nn.Module], stages: int, sample: Any) -> tuple[int, ...]:
    """The first piece of each stage: rank 0 measures for all, or counts parameters."""

    def costs() -> list[float]:
        counted = [1.0 + sum(parameter.numel() for parameter in piece.parameters()) for piece in pieces]
        return counted if sample is None else measure_costs(pieces, sample)

    return balance(on_rank_0(costs), stages)


def balance(costs: Sequence[float], stages: int, slow: Sequence[float] = ()) -> tuple[int, ...]:
    """Cut pieces into `stages` runs whose largest cost is smallest; return the first piece of each but the
    first.

    Args:
        slow: of each stage, by what its costs are multiplied; (): by 1.
    Example: costs 1 1 1 3, 2 stages -> (3,); costs 1 1 1 1 with slow 1 3 -> (3,).
    """
    slow = slow or (1.0,) * stages
    if len(costs) < stages:
        raise UnfitError(f"the model has {len(costs)} pieces, too few for {stages} stages")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @functools.cache
    def best(first: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        """(largest cost, sum of squares, cuts) of pieces from `first` in `left` stages."""
        if left == 1:
            cost = (sums[-1] - sums[first]) * slow[-1]
            return cost, cost * cost, ()
        found = []
        for cut in range(first + 1, len(costs) - left + 2):
            cost = (sums[cut] - sums[first]) * slow[stages - left]
            largest, squares, cuts = best(cut, left - 1)
            found.append((max(cost, largest), squares + cost * cost, (cut, *cuts)))
        return min(found)

    return best(0, stages)[2]


def measure_costs(pieces: Sequence[nn.Module], inputs: Any, rounds: int = 3) -> list[float]:
    """Run forward and backward of each piece on `inputs` of the first; return seconds for each, the least of
    `rounds`. Buffers keep their values.
    """
    costs = [float("inf")] * len(pieces)
    with torch.random.fork_rng(), _buffers_kept(pieces):
        for _ in range(rounds):
            value: Any = inputs if isinstance(inputs, tuple) else (inputs,)
            for index, piece in enumerate(pieces):
                start = time.perf_counter()
                wanted = [*_leaves(piece), *(t for t in value if isinstance(t, Tensor) and t.requires_grad)]
                value = piece(*value)
                value = value if isinstance(value, tuple) else (value,)
                outputs = [t for t in value if t.requires_grad]
                if outputs and wanted:
                    given = [torch.ones_like(t) for t in outputs]
                    torch.autograd.grad(outputs, wanted, given, allow_unused=True)
                costs[index] = min(costs[index], time.perf_counter() - start)
                value = tuple(t.detach().requires_grad_(t.requires_grad) for t in value)
    return costs


@contextlib.contextmanager
def _buffers_kept(pieces: Sequence[nn.Module]) -> Iterator[None]:
    places = [
        (module._buffers, leaf) for piece in pieces for module in piece.modules() for leaf in module._buffers
    ]
    kept = [(held, leaf, value, value.clone()) for held, leaf in places if (value := held[leaf]) is not None]
    yield
    with torch.no_grad():
        for held, leaf, value, was in kept:
            held[leaf] = value.copy_(was)


def _leaves(piece: nn.Module) -> list[Tensor]:
    return [parameter for parameter in piece.parameters() if parameter.requires_grad]


def forget(model: nn.Module, kept: Iterable[nn.Module]) -> None:
    """Free the parameters of modules of `model` that are in none of `kept`: these move to the meta device."""
    inside = {module for top in kept for module in top.modules()}
    for module in model.modules():
        if module in inside:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            gone = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
            module.register_parameter(name, gone)
