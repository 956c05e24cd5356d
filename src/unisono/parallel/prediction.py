"""Runs the model forward only, without gradients, and joins the results of micro-batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.torch.control_data import broadcast_data

from .batches import rows_of
from .graph.containers import join_rows, mapped, tensors_in
from .loss_weights import cut_batch
from .model_setup import ModelSetup
from .pipeline.runtime import StepInput
from .pipeline.schedule import Schedule, prove, schedule
from .plan import Plan


@contextlib.contextmanager
def evaluating() -> Iterator[None]:
    """No gradients, and none of the inference tensors that the caller's `torch.inference_mode()` makes: on
    gathered parameters that are such, no later step could train. Also a decorator.
    """
    with torch.inference_mode(False), torch.no_grad():  # the first one alone would switch gradients on
        yield


def proved_schedule(plan: Plan, parts: int) -> Schedule:
    """The schedule of a plan for as many micro-batches; it is proved once."""
    return _proved(plan.schedule, plan.pipeline, parts, plan.chunks)


@functools.lru_cache(maxsize=8)
def _proved(name: str, ranks: int, parts: int, chunks: int) -> Schedule:
    made = schedule(name, ranks, parts, chunks)
    prove(made)
    return made


def prediction(
    inputs: Any, built: ModelSetup, *, changed: bool = False
) -> tuple[Schedule, StepInput, list[Any], bool]:
    """What runs the model forward; the last stage appends its outputs to the list. Also whether some rank
    has `changed` what is trained.
    """
    cut = cut_batch((inputs, ()), "rows", 0, built.mesh, changed=changed, forward=True)
    micros = cut.micros
    outputs: list[Any] = []

    def keep(output: Any, _targets: Any) -> Tensor:
        outputs.append((rows_of(micros[len(outputs)][0]), output))
        return torch.zeros((), device=built.mesh.axes.device_type)

    return (
        proved_schedule(built.mesh.plan, len(micros)),
        StepInput(micros, [1.0] * len(micros), keep, train=False, recorded=False),
        outputs,
        cut.changed,
    )


def joined(outputs: list[Any], built: ModelSetup, rows: int) -> Any:
    """The outputs of all micro-batches as those of one, on every rank of the pipeline.

    Args:
        rows: of this rank; 0: what the outputs are of does not count.
    """
    mesh = built.mesh
    result: Any = None
    error = ""
    if outputs:
        try:
            result = join_rows([output for _, output in outputs], [count for count, _ in outputs])
            result = result if rows else mapped(result, lambda tensor: tensor[:0] if tensor.dim() else tensor)
        except ValueError as wrong:
            error = f"predict: {wrong}"
    if mesh.plan.pipeline > 1:
        last = schedule(mesh.plan.schedule, mesh.plan.pipeline, 1, mesh.plan.chunks).rank_of[-1]
        source = mesh.peer(last)
        template = mapped(result, lambda value: _Room(tuple(value.shape), value.dtype))
        error, template = broadcast_data((error, template), mesh.group("pipeline"), last)
        given = tensors_in(result)
        result = mapped(template, lambda room: _sent(room, next(given, None), source, mesh), _Room)
    if error:
        raise ValueError(error)
    return result


@dataclass(frozen=True)
class _Room:
    """A tensor that is to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _sent(room: Any, value: Tensor | None, source: int, mesh: Any) -> Tensor:
    made = torch.empty(room.shape, dtype=room.dtype, device=mesh.axes.device_type)
    if value is not None:
        made.copy_(value)
    dist.broadcast(made, src=source, group=mesh.group("pipeline"))
    return made
