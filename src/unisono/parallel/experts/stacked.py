"""Experts whose parameters are stacked: each has the dimension of experts first, and the layer is called with
(rows, indices of experts, weights), as Hugging Face's are. A row's result is the sum over its experts:

    layer(x [rows, width], i [rows, k], w [rows, k])[r] = sum over j of w[r, j] * expert(i[r, j], x[r])

A rank holds the experts of its place: 8 experts on 4 ranks are 0 1 | 2 3 | 4 5 | 6 7. A row goes once to each
rank that has one of its experts, with all its indices. There the layer's own forward runs, once for each pair
of a row and an expert, on this rank's part of the parameters. The sum over a row's experts on a rank returns.

Ranks of one tensor group have the same rows, and each sends its share (exchange.py). A recorded program has
the call as one operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unisono.errors import UnfitError
from unisono.parallel.graph.fused import like
from unisono.parallel.graph.noted_call import EXPERTS
from unisono.parallel.graph.written import Forward
from unisono.parallel.tensor_moves import TensorAxis
from unisono.torch_internals.fake import is_fake

from .exchange import RowExchange, RowShares, recorded, told, used


def numbers_of_experts(module: nn.Module, experts: int) -> list[str]:
    """The attributes of a module in which it has written how many experts it has."""
    return [
        name
        for name, value in vars(module).items()
        if type(value) is int and value == experts and "expert" in name
    ]


def cut_stacked(
    path: str,
    module: nn.Module,
    mesh: DeviceMesh,
    tensor: TensorAxis,
    run_by: type[StackedExperts] | None = None,
) -> None:
    """Leave this rank its experts, in place. The parameters become DTensors, cut in dimension 0."""
    experts = next(module.parameters()).shape[0]
    for leaf, parameter in [*module.named_parameters(recurse=False)]:
        part = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(leaf, like(parameter, part))
    (run_by or StackedExperts)(path, module, experts, mesh, tensor)


class _Routing(NamedTuple):
    """The arguments of a layer of experts, and what they are called: a name, or a place."""

    rows: Tensor
    chosen: Tensor
    weight: Tensor
    names: tuple[str | int, ...]


def _split_names(given: dict[str | int, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Arguments by place and by name."""
    places = sorted(name for name in given if isinstance(name, int))
    named = {name: value for name, value in given.items() if isinstance(name, str)}
    return [given[place] for place in places], named


def _call(
    module: nn.Module,
    rows: Tensor,
    chosen: Tensor,
    weight: Tensor,
    names: Sequence[str | int],
    _parameters: Any,
) -> Any:
    """Call a layer as the model does. names: of its arguments, or their places."""
    args, named = _split_names(dict(zip(names, (rows, chosen, weight), strict=True)))
    return module(*args, **named)


class StackedExperts(Forward):
    """The forward of a layer on this rank's experts."""

    def __init__(
        self, path: str, module: nn.Module, experts: int, mesh: DeviceMesh, tensor: TensorAxis
    ) -> None:
        super().__init__(module)
        self._device = mesh.device_type
        self._path, self._experts, self._ranks = path, experts, mesh.size()
        self._per, self._place = experts // mesh.size(), mesh.get_local_rank()
        self._group, self._label = mesh.get_group(), f"up::experts|{path}"
        self._shares = RowShares(tensor, None, self._label)
        self._signature = inspect.signature(self._run)
        self._numbers = numbers_of_experts(module, experts)

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        given = self._bound(args, named)
        if is_fake(given.rows):
            return self._recorded(given)
        rows, index = given.rows.flatten(0, -2), given.chosen
        rows, weight = self._shares.entered(rows), self._shares.entered(given.weight)
        owner = index.div(self._per, rounding_mode="floor")
        owner = torch.where((index < 0) | (owner >= self._ranks), self._ranks, owner)  # no expert at all
        goes = torch.zeros(len(rows), self._ranks + 1, dtype=torch.bool, device=rows.device)
        goes = goes.scatter_(1, owner, value=True)[:, : self._ranks]
        first, last = self._shares.bounds(len(rows))
        goes[:first], goes[last:] = False, False  # what other ranks of the tensor group send
        rank, row = goes.t().nonzero(as_tuple=True)
        sends = goes.sum(0)
        receives = told(sends.unsqueeze(1), self._group, self._label)
        exchange = RowExchange(sends.tolist(), receives.flatten().tolist(), self._group, self._label)
        there = owner[row] == rank.unsqueeze(1)
        local = torch.where(there, index[row] - rank.unsqueeze(1) * self._per, -1)
        x, i, w = exchange.there(rows[row], local, weight[row])
        with self._shares.drawing(self._device):
            made = self._here(x, i, w, given.names)
        back = exchange.back(made)
        output = back.new_zeros(rows.shape).index_add(0, row, back)
        return self._shares.added(output).view(given.rows.shape)

    def _recorded(self, given: _Routing) -> Tensor:
        """What stands for the call in a recorded program."""
        parameters = [*self._module.parameters()]
        each = sum(parameter.numel() for parameter in parameters) // self._experts
        flops = 2 * each * given.chosen.numel()
        return recorded(EXPERTS, self._path, _call, (*given, parameters), given.weight, flops)

    def _here(self, rows: Tensor, index: Tensor, weight: Tensor, names: tuple[str | int, ...]) -> Tensor:
        """The sum over this rank's experts for each row that came. Shapes: as in `__call__`."""
        row, slot = (index >= 0).nonzero(as_tuple=True)
        with self._parts() as parts:
            if len(row) == 0:
                return used(rows, parts)
            pairs = rows[row], index[row, slot].unsqueeze(1), weight[row, slot].unsqueeze(1)
            made = self._called(dict(zip(names, pairs, strict=True)))
        if not isinstance(made, Tensor) or made.shape != pairs[0].shape:
            what = f"{list(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
            raise UnfitError(
                f'"{self._path}" returned {what} for rows of {list(pairs[0].shape)}: a layer of experts '
                f'returns rows of the same shape. Write experts={{"{self._path}": "whole"}}'
            )
        return made.new_zeros(rows.shape).index_add(0, row, made)

    def _called(self, given: dict[str | int, Tensor]) -> Any:
        """Call the layer as the model does: a decorator may pass places on, and not know the names."""
        args, named = _split_names(given)
        return self._run(*args, **named)

    @contextmanager
    def _parts(self) -> Iterator[list[Tensor]]:
        """The module's attributes are this rank's part; yields the parameters."""
        seen = self._module.__dict__
        written = {name: seen[name] for name in self._numbers}
        parts = {
            leaf: parameter.to_local() if isinstance(parameter, DTensor) else parameter
            for leaf, parameter in self._module._parameters.items()
            if parameter is not None
        }
        seen.update(parts)
        seen.update(dict.fromkeys(written, self._per))
        try:
            yield [*parts.values()]
        finally:
            seen.update(written)
            for leaf in parts:
                seen.pop(leaf, None)

    def _bound(self, args: Any, named: Any) -> _Routing:
        """The arguments by what they are: integers are indices, the first floating ones rows."""
        bound = self._signature.bind(*args, **named).arguments
        tensors = {name: value for name, value in bound.items() if isinstance(value, Tensor)}
        whole = [name for name, value in tensors.items() if not value.is_floating_point()]
        floating = [name for name in tensors if name not in whole]
        if len(bound) != 3 or len(whole) != 1 or len(floating) != 2:
            kinds = ", ".join(
                f"{name}: {list(value.shape)} {value.dtype}"
                if isinstance(value, Tensor)
                else f"{name}: {value!r:.40}"
                for name, value in bound.items()
            )
            raise UnfitError(
                f'"{self._path}" was called with ({kinds}); expected rows, the indices of their experts and '
                f'weights. Write experts={{"{self._path}": "whole"}}'
            )
        rows, index, weight = (tensors[name] for name in (floating[0], whole[0], floating[1]))
        count = rows.shape[:-1].numel()
        if (
            index.dim() != 2
            or index.shape != weight.shape
            or len(index) != count
            or index.dtype == torch.bool
        ):
            raise UnfitError(
                f'"{self._path}" was called with rows {list(rows.shape)}, indices {list(index.shape)} of '
                f"{index.dtype} and weights {list(weight.shape)}; expected indices and weights [{count}, "
                f'experts of a row]. Write experts={{"{self._path}": "whole"}}'
            )
        places = {name: place for place, name in enumerate(bound) if name not in named}
        names = tuple(places.get(name, name) for name in (floating[0], whole[0], floating[1]))
        return _Routing(rows, index.long(), weight, names)
