"""Compressed gradients of a unit of `fully_shard`: in the place of its reduce-scatter, or after it.

Where all data ranks share (ZeRO 1 to 3), each has whole gradients of a unit after its backward:

    input of the reduce-scatter, n ranks     [n, rows of each rank of one parameter after the other]
    low rank and codes                       average the whole gradient; each rank keeps its rows
    exact                                    reduce-scatter, of these parameters alone

So a rank's error buffer is that of the whole gradient, and the result that of ZeRO 0. Under `shard=` the
reduce-scatter within a group of shards stays, in f32, and what replicas exchange is compressed: the rows of
this rank. Replicas in low precision (ZeRO 0) are the same with one rank to a group.
Source of the second: Ramesh et al., Zero-Shot Text-to-Image Generation, 2021, appendix E.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from unisono.errors import UnfitError
from unisono.parallel.gradients import local, span
from unisono.torch_internals import autograd, fsdp, version_names

from .reducer import Compression
from .settings import CompressionSettings


def compress_units(root: nn.Module, compression: Compression, *, parts: bool, counts: bool = False) -> None:
    """Reduce the gradients of all units in `root` by `compression`.

    Args:
        parts: a rank's rows, after the reduce-scatter; False: whole gradients, in place of it.
        counts: each backward that reduces is a step; otherwise `compression.finish` ends it.
    """
    units: list[tuple[str, Any]] = [one for one in root.named_modules() if isinstance(one[1], FSDPModule)]
    seen: dict[str, int] = {}
    for path, unit in units:
        reduction = UnitReduction(compression, partial(fsdp.trained, unit), path or "the root")
        if counts:
            reduction.before = partial(_count, compression, seen, path)
        if parts:
            unit.set_all_reduce_hook(reduction.average_part)
        else:
            unit.set_custom_reduce_scatter(reduction)


def compress_module(root: Any, settings: CompressionSettings) -> Compression:
    """Compress the gradients of a caller's model of sharded units; see `PowerSGD.attach`."""
    named = dict(root.named_parameters())
    for name, value in named.items():
        if not isinstance(value, DTensor) or tuple(value.placements) != (Shard(0),):
            what = "whole" if not isinstance(value, DTensor) else f"cut as {list(value.placements)}"
            raise TypeError(
                f"attach: {name!r} is {what}; call fully_shard of the model, over a mesh of one axis, before"
            )
    mesh, *others = {value.device_mesh for value in named.values()}
    if others:
        raise TypeError(f"attach: units are cut over {len(others) + 1} meshes, expected one")
    group = mesh.get_group()
    compression = Compression(settings, named, group, whole=True)
    if group.size() > 1:
        compress_units(root, compression, parts=False, counts=True)
    return compression


def _count(compression: Compression, seen: dict[str, int], path: str) -> None:
    """A unit is about to be reduced; `seen` has when each was. A step is a backward, of whichever units."""
    step = compression.steps
    if step not in seen.values() or seen.get(path) == step:  # again: a backward ended with an error
        seen.clear()
        autograd.after_backward(compression.finish)
    seen[path] = step


class UnitReduction:
    """What `FSDPModule.set_custom_reduce_scatter` and `set_all_reduce_hook` take.

    Args:
        trained: gives the sharded parameters of the unit that have gradients, in the order of messages.
    """

    def __init__(
        self, compression: Compression, trained: Callable[[], Sequence[nn.Parameter]], label: str
    ) -> None:
        self._compression, self._trained, self._label = compression, trained, label
        self.before: Callable[[], None] = lambda: None  # each reduction

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        """Average over the ranks; `output_tensor` gets this rank's rows of each parameter."""
        del async_op
        self.before()
        if op != dist.ReduceOp.AVG:
            raise UnfitError(
                f"gradients of {self._label} are scaled or summed, and compression averages them: leave out "
                "set_gradient_divide_factor and set_force_sum_reduction_for_comms"
            )
        if input_tensor.dtype != torch.float32:
            raise TypeError(
                f"gradients of {self._label} are reduced in {input_tensor.dtype}, and compression takes f32: "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        places, size, rank = self._places(output_tensor.numel()), group.size(), group.rank()
        if not self._compression.active:
            version_names.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)
            return
        given = input_tensor.view(size, -1)
        if exact := [at for parameter, at in places if self._compression.is_exact(parameter)]:
            sent = torch.cat([given[:, at] for at in exact], 1)
            mine = sent.new_empty(sent.size(1))
            version_names.reduce_scatter_single(mine, sent.view(-1), op=op, group=group)
            for at, part in zip(exact, mine.split([at.stop - at.start for at in exact]), strict=True):
                output_tensor[at] = part
        whole = {
            parameter: given[:, at].reshape(-1)[: parameter.numel()].view(parameter.shape)
            for parameter, at in places
            if at not in exact
        }
        self._compression.begin([*whole.items()], given, label=self._label, kind="compressed units")
        self._compression.finish(step=False)
        for parameter, at in places:
            if parameter in whole:
                own = whole[parameter].view(-1)[rank * (at.stop - at.start) :][: at.stop - at.start]
                output_tensor[at].zero_()[: own.numel()] = own

    def average_part(self, part: Tensor) -> None:
        """Average this rank's rows over the replicas, in place: the hook after the reduce-scatter."""
        places = self._places(part.numel())
        rows = [(one, part[at][: local(one).numel()].view(local(one).shape)) for one, at in places]
        self._compression.begin(rows, part, label=self._label)
        self._compression.finish(step=False)

    def _places(self, numel: int) -> list[tuple[nn.Parameter, slice]]:
        """Where each parameter's rows are in a message of one rank."""
        found: list[tuple[nn.Parameter, slice]] = []
        end = 0
        for parameter in self._trained():
            sharing = parameter.device_mesh.size()  # type: ignore[attr-defined]
            start, end = end, end + span(len(parameter), [(sharing, 0)])[1] * parameter.shape[1:].numel()
            found.append((parameter, slice(start, end)))
        if end != numel:
            raise UnfitError(
                f"a parameter of {self._label} has no gradient on this rank, and compression= with zero= or "
                "low precision averages all of a unit. Freeze it (requires_grad_(False)), or write "
                "Plan(uneven_use=True)"
            )
        return found
