"""Experts that are modules in an `nn.ModuleList` or `nn.ModuleDict`: the program says who gets which rows.

A rank holds the experts of its place; the others are modules without parameters. The program around the list
runs twice. In the first pass the experts note their rows and return zeros. Then all rows go to their experts
and back in one exchange. In the second pass each expert returns what came back:

    first pass: expert e notes x_e     y = experts(x), wherever they are     second pass: expert e returns y_e

This is right where the rows of an expert do not depend on the result of another one. The second pass
compares: it must call the same experts with the same values. What else the program computes, it computes
twice in forward and once in backward. It draws the same random numbers twice, and may write neither into its
inputs nor into buffers.

Ranks of one tensor or context group run the program on the same values, and each sends its share of the rows
(exchange.py). A recorded program has the call of the module around the list as one operator, which takes and
returns whole values: nothing shows what it does with each row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from unisono.errors import UnfitError
from unisono.parallel.generators import default_generators, set_states, states_of
from unisono.parallel.gradients import equal
from unisono.parallel.graph.containers import mapped, tensors_in
from unisono.parallel.graph.noted_call import EXPERT_LIST
from unisono.parallel.graph.written import Forward
from unisono.parallel.tensor_moves import TensorAxis
from unisono.torch_internals.fake import is_fake
from unisono.torch_internals.training import module_at

from .exchange import RowExchange, RowShares, reached, recorded, told


class RemoteExpert(nn.Module):
    """Stands for an expert that another rank holds."""

    def forward(self, *_args: Any, **_named: Any) -> Tensor:
        raise RuntimeError("this expert is on another rank; only the layer around it calls it")


def cut_listed(
    model: nn.Module,
    path: str,
    caller: str,
    mesh: DeviceMesh,
    tensor: TensorAxis,
    context: TensorAxis | None,
    *,
    recorded: bool,
) -> None:
    """Leave this rank its experts, in place."""
    experts = module_at(model, path)
    names = list(experts._modules)
    per, place = len(names) // mesh.size(), mesh.get_local_rank()
    for number, name in enumerate(names):
        if number // per != place:
            experts._modules[name] = RemoteExpert()
    shares = RowShares(tensor, context, f"up::experts|{path}")
    ListedExperts(path, caller, module_at(model, caller), mesh, shares, recorded=recorded)


class _ExpertCall(NamedTuple):
    """The program has called an expert with these rows, [..., width]."""

    expert: int
    rows: Tensor


class _NotingExpert(nn.Module):
    """Stands for an expert while the program runs."""

    def __init__(self, expert: int, layer: ListedExperts) -> None:
        super().__init__()
        self._expert = expert
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            layer: ListedExperts = self.__dict__["_layer"]
            raise AttributeError(layer.text(f"the program takes {name!r} of expert {self._expert}")) from None

    def forward(self, *args: Any, **named: Any) -> Tensor:
        return self._layer.called(self._expert, args, named)


class ListedExperts(Forward):
    """The forward of the module around the experts. `caller`: its path."""

    def __init__(
        self,
        path: str,
        caller: str,
        around: nn.Module,
        mesh: DeviceMesh,
        shares: RowShares,
        *,
        recorded: bool,
    ) -> None:
        super().__init__(around)
        self._path, self._caller, self._ranks, self._shares = path, caller, mesh.size(), shares
        self._per = len(self._list._modules) // mesh.size()
        self._first = self._per * mesh.get_local_rank()
        self._group, self._label, self._device = mesh.get_group(), f"up::experts|{path}", mesh.device_type
        self._calls: list[_ExpertCall] = []
        self._results: list[Tensor] | None = None  # of the calls, in the second pass
        self._is_recorded = recorded
        self._next = 0

    @property
    def _list(self) -> nn.Module:
        inside = self._path[len(self._caller) :].lstrip(".")
        found: nn.Module = module_at(self._module, inside)
        return found

    def __call__(self, *args: Any, **named: Any) -> Any:
        first = next((x for x in tensors_in((args, named)) if x.is_floating_point() and x.dim()), None)
        if first is not None and is_fake(first):
            return self._recorded(first, args, named)
        generators = default_generators(self._device)
        before = states_of(generators)
        self._calls, self._results, self._next = [], None, 0
        try:
            with self._recording(), self._unchanged(args, named):
                self._run(*args, **named)
            self._results, back = self._exchanged(torch.zeros(0, 1) if first is None else first)
            after = states_of(generators)
            set_states(generators, before)
            with self._recording():
                output = self._run(*args, **named)
            set_states(generators, after)
            if self._next != len(self._calls):
                self._refuse("the second run calls fewer experts than the first")
        finally:
            self._calls, self._results = [], None
        self._check_alike(first, output)
        return mapped(output, lambda value: reached(value, back) if value.is_floating_point() else value)

    def _recorded(self, first: Tensor, args: Any, named: Any) -> Tensor:
        """What stands for the call in a recorded program."""
        parameters = [*self._module.parameters()]
        each = sum(parameter.numel() for parameter in parameters) // max(self._per, 1)
        flops = 2 * each * first.shape[:-1].numel()
        return recorded(EXPERT_LIST, self._caller, _call, (first, args, named, parameters), first, flops)

    def _check_alike(self, first: Tensor | None, output: Any) -> None:
        """A recorded program has one value in place of the call."""
        if not self._is_recorded or (
            isinstance(output, Tensor) and first is not None and output.shape == first.shape
        ):
            return
        what = f"{list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        self._refuse(
            f'"{self._caller}" returns {what}; where tensor, context or pipeline record the program it must '
            "return one tensor of the shape of its first one"
        )

    def called(self, expert: int, args: Any, named: Any) -> Tensor:
        """The program calls an expert."""
        given = [*args, *named.values()]
        if len(given) != 1 or not isinstance(given[0], Tensor) or not given[0].dim():
            kinds = ", ".join(type(value).__name__ for value in given)
            self._refuse(f"expert {expert} is called with ({kinds}), expected one tensor of rows")
        rows: Tensor = given[0]
        if self._results is None:
            self._calls.append(_ExpertCall(expert, rows))
            return torch.zeros_like(rows)
        number = self._next
        self._next += 1
        if number >= len(self._calls) or self._calls[number].expert != expert:
            self._refuse("the second run calls other experts than the first")
        noted = self._calls[number].rows
        if noted.shape != rows.shape or not equal(noted, rows):
            self._refuse(f"what expert {expert} gets depends on the results of other experts, or on chance")
        return self._results[number].view(rows.shape)

    def _exchanged(self, like: Tensor) -> tuple[list[Tensor], Tensor]:
        """The result of each call, and all of them as they came back. like: rows, where there are none."""
        order = sorted(range(len(self._calls)), key=lambda number: self._calls[number].expert)
        flat = [self._calls[number].rows.flatten(0, -2) for number in order]
        number_of_rows = sum(map(len, flat))
        first, last = self._shares.bounds(number_of_rows)
        counts, begin = torch.zeros(self._ranks, self._per + 1, dtype=torch.long), 0
        for number, rows in zip(order, flat, strict=True):
            expert, end = self._calls[number].expert, begin + len(rows)
            counts[expert // self._per, expert % self._per] += max(0, min(end, last) - max(begin, first))
            begin = end
        counts[:, -1] = flat[0].shape[1] if flat else 0
        came = told(counts.to(self._device), self._group, self._label).cpu()
        width = int(came[:, -1].max()) or like.shape[-1]  # this rank has told itself, too
        rows = self._shares.entered(torch.cat(flat) if flat else like.new_zeros(0, width))
        sends, receives = (table[:, : self._per].sum(1).tolist() for table in (counts, came))
        exchange = RowExchange(sends, receives, self._group, self._label)
        (here,) = exchange.there(rows[first:last])
        with self._shares.drawing(self._device):
            made = self._here(here, came[:, : self._per].flatten().tolist())
        back = self._shares.joined(exchange.back(made), number_of_rows)
        found, begin = [back] * len(order), 0
        for number, one in zip(order, flat, strict=True):
            found[number] = back[begin : begin + len(one)]  # the program may write into it
            begin += len(one)
        return found, back

    def _here(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The results of this rank's experts. counts: of rows, by rank and then by expert."""
        parts = rows.split(counts)
        made: list[Tensor] = [*parts]
        names = list(self._list._modules)
        for number in range(self._per):
            name = names[self._first + number]
            mine = range(number, len(parts), self._per)
            given = torch.cat([parts[at] for at in mine])
            result = self._list._modules[name](given)  # type: ignore[misc]
            if not isinstance(result, Tensor) or result.shape != given.shape or result.dtype != given.dtype:
                kind = (
                    f"{list(result.shape)} {result.dtype}"
                    if isinstance(result, Tensor)
                    else type(result).__name__
                )
                rows_kind = f"{list(given.shape)} {given.dtype}"
                self._refuse(f"expert {name} returns {kind} for rows {rows_kind}, expected the same")
            for at, part in zip(mine, result.split([counts[at] for at in mine]), strict=True):
                made[at] = part
        return torch.cat(made)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """The list has recorders in place of the experts."""
        real = self._list._modules
        stand: dict[str, Any] = {name: _NotingExpert(number, self) for number, name in enumerate(real)}
        for recorder in stand.values():
            recorder.training = self._module.training
        self._list.__dict__["_modules"] = stand
        try:
            yield
        finally:
            self._list.__dict__["_modules"] = real

    @contextmanager
    def _unchanged(self, args: Any, named: Any) -> Iterator[None]:
        """Refuse what writes into its inputs or its buffers: it would do so twice."""
        buffers = dict(self._module.named_buffers())
        tensors = itertools.chain(tensors_in((args, named)), buffers.values())
        versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        yield
        if (
            any(tensor._version != version for tensor, version in versions)
            or dict(self._module.named_buffers()).keys() != buffers.keys()
        ):
            self._refuse("the module around the experts writes into its inputs or its buffers")

    def text(self, what: str) -> str:
        """The error of a program that cannot run on this rank's experts."""
        return (
            f'"{self._path}": {what}, so its experts cannot be spread over ranks. Write '
            f'experts={{"{self._path}": "whole"}}'
        )

    def _refuse(self, what: str) -> None:
        raise UnfitError(self.text(what))


def _call(module: nn.Module, _first: Tensor, args: Any, named: Any, _parameters: Any) -> Any:
    """Call the module around the experts. Its own forward: a unit that it may be is running."""
    return module.forward(*args, **named)
