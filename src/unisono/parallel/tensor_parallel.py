"""The tensor axis at work: each rank runs the modules of the model on its part of the parameters.

A parameter that is cut is a DTensor of this axis. While its module runs, the module sees this rank's part, a
plain tensor; nothing else in the model changes. Where a cut begins, the gradient of the input is summed over
ranks; where it ends, the output is (Megatron-LM, arXiv:1909.08053). Under Plan(sequence=True) the values
between cuts are cut along the sequence: the moves of a module say what it gathers, and what it scatters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unisono.torch_internals.training import is_compiled, module_at, uncompile

from . import tensor_moves
from .generators import RngRegion
from .graph.call_structure import argument_names
from .graph.containers import tensors_in
from .graph.cut import Cut, ModuleMove
from .graph.fused import like, split_
from .graph.local_model import ModuleMoves
from .graph.written import Forward, Written
from .module_calls import ModelCalls
from .regathered import saved_as_slices
from .tensor_moves import TensorAxis

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def cut_model(
    model: nn.Module, cut: Cut, mesh: DeviceMesh, *, regathers: bool = False, alone: bool = False
) -> RngRegion:
    """Cut `model` in place; return its cut regions. Tied weights stay tied.

    Args:
        mesh: the tensor axis.
        alone: modules run in the forward of `model` only: neither stages nor recorded operators call them.
        regathers: what layers get from all ranks is gathered again in backward, and not kept.
    """
    region = RngRegion(mesh.get_local_rank(), mesh.device_type)
    axis = axis_of(mesh, regathers=regathers)

    def part(value: Tensor, dim: int) -> Tensor:
        return distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None)

    run_cut(model, cut, part, axis, region, alone=alone)
    return region


def run_cut(
    model: nn.Module,
    cut: Cut,
    part: Callable[[Tensor, int], Tensor],
    axis: TensorAxis,
    region: RngRegion,
    *,
    alone: bool = False,
) -> None:
    """Have each module run on this rank's parts.

    Args:
        part: of a parameter's values and a dim -> what is kept of it.
        alone: modules run in the forward of `model` only.
    """
    for path, sizes in cut.fused.items():
        split_(model, path, sizes)
    leaves, made = leaves_of(model, cut), dict[int, nn.Parameter]()
    kept: list[nn.Parameter] = []  # so that their ids stay their own
    for path, dims in leaves.items():
        module = module_at(model, path)
        for leaf, dim in dims.items():
            value = module._parameters.get(leaf)
            if value is not None and id(value) not in made:
                kept.append(value)
                made[id(value)] = like(value, part(value.data, dim))
            if value is not None:
                module.register_parameter(leaf, made[id(value)])

    calls = ModelCalls(model if alone else None, cut)

    def make(path: str, module: nn.Module, dims: dict[str, int]) -> None:
        LocalForward(path, module, dims, cut, axis, region, calls)

    run_locally(model, cut, leaves, make)
    calls.follow(model)


def axis_of(mesh: DeviceMesh, *, regathers: bool = False) -> TensorAxis:
    """The ranks of a tensor axis."""
    return TensorAxis(mesh.get_group(), mesh.get_local_rank(), mesh.size(), regathers)


def leaves_of(model: nn.Module, cut: Cut) -> dict[str, dict[str, int]]:
    """Path of a module -> its parameters and buffers that are cut, each with its dim."""
    values = dict([*model.named_parameters(), *model.named_buffers()])
    dims = {id(values[name]): dim for name, dim in cut.dims.items()}
    found: dict[str, dict[str, int]] = {}
    for path, module in model.named_modules():
        for leaf, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is not None and id(value) in dims:
                found.setdefault(path, {})[leaf] = dims[id(value)]
    return found


def run_locally(
    model: nn.Module,
    cut: Cut,
    leaves: dict[str, dict[str, int]],
    make: Callable[[str, nn.Module, dict[str, int]], None],
) -> None:
    """Have the modules of a model run as a cut says.

    Args:
        leaves: what they have that is cut.
        make: gives a module another forward.
    """
    written = Written(model, cut.sizes)
    written.wrap()
    for path in {**leaves, **dict.fromkeys([*cut.modules, *cut.moves, *cut.draws])}:
        make(path, module_at(model, path), leaves.get(path, {}))
    written.wrap_others()
    _run_uncompiled(model)
    for module in model.modules():  # their shortcuts in evaluation would take parameters as they are
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        if isinstance(module, nn.TransformerEncoderLayer):
            module.register_forward_pre_hook(_nothing)


def _run_uncompiled(model: nn.Module) -> None:
    """Run compiled modules with a cut one in them as they are: compiled code skips what checks its calls."""
    inside = {module for module in model.modules() if isinstance(vars(module).get("forward"), Forward)}
    for path, module in model.named_modules():
        if is_compiled(module) and not inside.isdisjoint(module.modules()):
            uncompile(module)
            warnings.warn(
                f'"{path or type(module).__name__}" is compiled, and has layers that the tensor axis cuts: '
                "it runs as without compile()",
                RuntimeWarning,
                stacklevel=2,
            )


def _nothing(_module: nn.Module, _args: Any) -> None:
    """Do nothing."""


class LocalForward(Forward):
    """The forward of one module on this rank.

    Args:
        dims: its parameters and buffers that are cut, and in which dim.
        calls: of the model, which are checked; None: they are recorded, and the record runs.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        dims: dict[str, int],
        cut: Cut,
        axis: TensorAxis,
        region: RngRegion,
        calls: ModelCalls | None = None,
    ) -> None:
        super().__init__(module)
        moves, names = cut.moves.get(path, {}), argument_names(self._run)
        self._label, self._dims = f"up::tensor|{path}", dims
        self._moves = ModuleMoves(moves, names, self._move)
        self._check = None if calls is None else calls.check(path, names)
        self._kind = kind = cut.modules.get(path, "")
        self._draws = path in cut.draws
        self._scatters = any(move.kind == "scatter" for move in moves.values())
        self._axis, self._region = axis, region
        self._padding: int | None = None
        if kind == "vocabulary" and self._module.padding_idx is not None:
            rows = self._module.weight.shape[0] // self._axis.parts
            here = self._module.padding_idx - self._axis.place * rows
            self._padding = here if 0 <= here < rows else None

    def __call__(self, *args: Any, **named: Any) -> Any:
        check = None if is_compiling() else self._check
        if check is not None:
            check.begin(args, named)
        if self._kind == "row":
            self._region.end()
        args, named = self._moves.taken(args, named)
        began = self._draws and self._region.begin()
        try:
            output = self._forward(args, named)
        finally:
            if began:
                self._region.end()
        if check is not None:
            check.end(output)
        if self._kind == "column":
            self._region.begin()
        elif self._kind == "column, gathered":
            output = self._move(output, ModuleMove("gather", -1))
        elif self._kind in ("row", "vocabulary") and not self._scatters:
            output = self._move(output, ModuleMove("sum", 0))
        return self._moves.returned(output)

    def _forward(self, args: Any, named: Any) -> Any:
        if self._kind == "vocabulary":
            return self._vocabulary(*args, **named)
        given = next(tensors_in((args, named)), None) if self._kind.startswith("column") else None
        with self._parts_of(), nullcontext() if given is None else saved_as_slices(given):
            return self._run(*args, **named)

    def _move(self, value: Tensor, move: ModuleMove) -> Tensor:
        return tensor_moves.move(value, move.kind, move.dim, self._axis, self._label)

    @contextmanager
    def _parts_of(self) -> Iterator[None]:
        """The module's attributes are this rank's parts."""
        seen = self._module.__dict__
        for leaf, dim in self._dims.items():
            seen[leaf] = self._part(leaf, dim)
        bias = self._module._parameters.get("bias") if self._kind == "row" else None
        if bias is not None:
            seen["bias"] = self._share(bias)
        try:
            yield
        finally:
            for leaf in [*self._dims, *(["bias"] if bias is not None else [])]:
                seen.pop(leaf, None)

    def _part(self, leaf: str, dim: int) -> Tensor:
        value: Any = self._module._parameters.get(leaf)
        if value is None:
            return part_of(self._module._buffers[leaf], dim, self._axis)
        return value.to_local() if isinstance(value, DTensor) else value  # type: ignore[no-any-return]

    def _share(self, bias: Tensor) -> Tensor:
        return share(bias, self._axis.parts)

    def _vocabulary(self, *args: Any, **named: Any) -> Tensor:
        """Rows of other ranks give zeros, and the ranks add up."""
        tokens = args[0] if args else next(iter(named.values()))
        with self._parts_of():
            seen: Any = self._module.__dict__
            rows = seen["weight"].shape[0]
            here = tokens - self._axis.place * rows
            mine = (here >= 0) & (here < rows)
            kept = seen.get("padding_idx")
            seen["padding_idx"] = self._padding
            try:
                output: Any = self._run(here * mine)
            finally:
                seen["padding_idx"] = kept
        masked: Tensor = output * mine.unsqueeze(-1)
        return masked


def part_of(value: Tensor, dim: int, axis: TensorAxis) -> Tensor:
    """This rank's part of a parameter, which is a DTensor, or of a buffer that each rank has whole."""
    if isinstance(value, DTensor):
        return value.to_local()
    size = value.shape[dim] // axis.parts
    return value.narrow(dim, axis.place * size, size)


def share(bias: Tensor, parts: int) -> Tensor:
    """A rank's share of a bias, which all of them add."""
    found: Tensor = _Share.apply(bias, parts)
    return found


class _Share(torch.autograd.Function):
    """A rank's share of a bias, which all of them add; each gets its whole gradient."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor, parts: int) -> Tensor:
        return value / parts

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None
