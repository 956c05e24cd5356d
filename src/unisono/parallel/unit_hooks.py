"""The hooks around a unit's forward: activation checkpointing, and what other axes need of what it returns.

`recompute=True` keeps a unit's inputs. `recompute="selective"` also keeps the results of matrix products,
convolutions and attention: they take most of the time and a part of the memory. Source: Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, MLSys 2023.

A BatchNorm moves its statistics in the first forward only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from unisono.errors import UnfitError
from unisono.torch_internals import training
from unisono.torch_internals.fake import OperatorMode

from .costs.operators import does_matrices
from .graph.containers import mapped, strange_in, tensors_in
from .graph.program import drops
from .model_buffers import buffers_kept, statistics_stand_apart
from .precision import BATCH_NORM
from .structure import plain_class

TAKEN = "_unisono_taken"  # the attribute of a unit while it runs


def recompute(unit: nn.Module, *, selective: bool) -> None:
    """Compute the activations of `unit` again in backward; `selective`: but for what is dear."""
    unit.register_forward_pre_hook(_note_versions, with_kwargs=True)
    unit.register_forward_hook(_check_versions, always_call=True)  # backward stops a forward midway
    norms = [module for module in unit.modules() if isinstance(module, BATCH_NORM)]
    options = {"context_fn": partial(_contexts, norms, selective)} if norms or selective else {}
    training.recompute(unit, preserve_rng_state=True, **options)


def _note_versions(unit: nn.Module, args: Any, named: Any) -> None:
    """Note what the unit takes: what is computed again must find the same."""
    taken = tensors_in((args, named))
    vars(unit)[TAKEN] = [(tensor, tensor._version) for tensor in taken if not tensor.is_inference()]


def _check_versions(unit: nn.Module, _args: Any, _output: Any) -> None:
    taken = vars(unit).pop(TAKEN, [])
    if any(tensor._version != version for tensor, version in taken):
        raise UnfitError(
            f"recompute: a {plain_class(unit).__name__} writes into the tensor that its unit takes, which "
            "cannot be computed again. Write inplace=False first, or x = x + y in place of x += y"
        )


def _contexts(norms: list[nn.Module], selective: bool) -> tuple[Any, Any]:
    """Of the forward, and of what backward computes again."""
    if not selective:
        return contextlib.nullcontext(), _statistics_stay(norms)
    forward, again = create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    return _Dear(forward), _statistics_stay(norms, _Dear(again)) if norms else _Dear(again)


@contextlib.contextmanager
def _statistics_stay(norms: list[nn.Module], inner: Any = None) -> Iterator[None]:
    """The statistics of a BatchNorm are afterwards as they were before."""
    with buffers_kept(filter(statistics_stand_apart, norms)), inner or contextlib.nullcontext():
        yield


class _Dear(OperatorMode):
    """Shows dear operators only to PyTorch's mode of selective checkpointing.

    That one counts all operators, and fails where `fully_shard` gathers and casts in one of both passes only.
    """

    def __init__(self, selecting: Any) -> None:
        super().__init__()
        self._selecting = selecting

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        named = named or {}
        space, _, name = operator.name().partition("::")
        dear = space == "aten" and does_matrices(name.partition(".")[0])
        if dear and not _draws(operator, args, named):
            return self._selecting.__torch_dispatch__(operator, types, args, named)
        return operator(*args, **named)


def _draws(operator: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether it draws a dropout mask: left out in backward, all that draws after it would draw others."""
    return torch.Tag.nondeterministic_seeded in operator.tags and drops(operator, args, named)


# ---- what a unit returns ----


def own_memory(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Return no views: fully_shard loses its hook on one that is written into, as nn.ReLU(True) does, and
    the tensor axis forbids it.
    """
    if any(map(training.is_view, tensors_in(output))):
        return mapped(output, lambda tensor: tensor.clone() if training.is_view(tensor) else tensor)
    return output


def shows_tensors(module: nn.Module, _args: Any, output: Any) -> None:
    """Refuse an output that hides its tensors, as a distribution: fully_shard would begin no backward."""
    if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors_in(output)):
        for hiding in strange_in(output):
            raise UnfitError(
                f"{plain_class(module).__name__} returns a {type(hiding).__name__}, which hides its tensors, "
                "so gradients would not be reduced. Return tensors in a tuple, dict or dataclass, and make "
                'the object in the loss; or use zero=0 with precision="f32"'
            )
