"""The tensor axis at work: each rank runs the modules of the model on its part of the parameters.

A parameter that is cut is a DTensor of this axis. While its module runs, the module sees this rank's part, a
plain tensor; nothing else in the model changes. Where a cut begins, the gradient of the input is summed over
ranks; where it ends, the output is (Megatron-LM, arXiv:1909.08053). Under Plan(sequence=True) the values
between cuts are cut along the sequence: the moves of a module say what it gathers, and what it scatters.

Moves between ranks are at the slots of the recorded calls (see graph/containers.py). Another structure of
a call, or another number of calls, raises before the module moves anything.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unisono.torch_internals.autograd import in_backward
from unisono.torch_internals.training import is_compiled, module_at, uncompile

from . import tensor_moves
from .generators import RngRegion
from .graph.containers import CallStructure, RecordedCalls, argument_names, given_by, returned_by, tensors_in
from .graph.cut import Cut, ModuleMove
from .graph.fused import split_
from .graph.local_model import ModuleMoves, keep_parts
from .graph.written import Forward, Written
from .tensor_moves import TensorAxis, saved_as_slices

PLAIN = frozenset({Tensor, nn.Parameter, type(None), int, float})  # types that say all about an argument


def cut_model(
    model: nn.Module,
    cut: Cut,
    mesh: DeviceMesh,
    *,
    regathers: bool = False,
    alone: bool = False,
    draws: bool = True,
) -> RngRegion:
    """Cut `model` in place; return its cut regions. Tied weights stay tied.

    Args:
        mesh: the tensor axis.
        alone: modules run in the forward of `model` only: neither stages nor recorded operators call them.
        regathers: what layers get from all ranks is gathered again in backward, and not kept.
        draws: each rank draws its own numbers in the regions; False: the model has no values.
    """
    region = RngRegion(mesh.get_local_rank() if draws else None, mesh.device_type)
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
    keep_parts(model, cut, part)
    calls = ModelCalls(model if alone else None, cut)

    def make(path: str, module: nn.Module, dims: dict[str, int]) -> None:
        LocalForward(path, module, dims, cut, axis, region, calls)

    run_locally(model, cut, make)
    for path in calls.others():
        make(path, module_at(model, path), {})
    if alone:
        _ModelForward(model, calls)


def axis_of(mesh: DeviceMesh, *, regathers: bool = False) -> TensorAxis:
    """The ranks of a tensor axis."""
    return TensorAxis(mesh.get_group(), mesh.get_local_rank(), mesh.size(), regathers)


def run_locally(
    model: nn.Module,
    cut: Cut,
    make: Callable[[str, nn.Module, dict[str, int]], None],
) -> None:
    """Have the modules of a model run as a cut says."""
    written, leaves = Written(model, cut.sizes), cut.leaves(model)
    written.wrap()
    for path in cut.special(model):
        make(path, module_at(model, path), leaves.get(path, {}))
    written.wrap_others()
    _run_uncompiled(model)
    for module in model.modules():  # their shortcuts in evaluation would take parameters as they are
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        if isinstance(module, nn.TransformerEncoderLayer):
            module.register_forward_pre_hook(lambda *_: None)


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


class LocalForward(Forward):
    """The forward of one module on this rank."""

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
        if not self._kind and not self._dims:
            return self._run(*args, **named)
        if self._kind == "vocabulary":
            return self._vocabulary(*args, **named)
        given = next(tensors_in((args, named)), None) if self._kind.startswith("column") else None
        with self._parts_of(), nullcontext() if given is None else saved_as_slices(given):
            return self._run(*args, **named)

    def _move(self, value: Tensor, move: ModuleMove) -> Tensor:
        return tensor_moves.move(value, move.kind, move.dim, self._axis, self._label)

    @contextmanager
    def _parts_of(self) -> Iterator[None]:
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
    """A rank's share of a bias, which all of them add; each gets its whole gradient."""
    return tensor_moves.exchanged(bias, lambda value: value / parts, lambda grad: grad)


# ---- the calls of modules, compared with those of the proved program ----


class ModelCalls:
    """The calls of the modules of one cut model.

    Args:
        model: None: its stages or its recorded operators run, not its own forward. Then only the structure
            of each call is checked.
    """

    def __init__(self, model: nn.Module | None, cut: Cut) -> None:
        self._model, self._cut = model, cut
        self._checks: list[CallCheck] = []
        self._counts: Counter[str] = Counter()
        self._running = False

    def check(self, path: str, names: tuple[str, ...]) -> CallCheck:
        """What checks the calls of one module. names: of its arguments by place."""
        self._checks.append(
            CallCheck(path, self._cut.calls.setdefault(path, RecordedCalls()), names, self.count)
        )
        return self._checks[-1]

    def others(self) -> list[str]:
        """The modules around those that are cut, whose calls are to be checked, too."""
        known = {check.path for check in self._checks}
        return [path for path, found in self._cut.calls.items() if found.takes and path not in known]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """While the model runs."""
        if self._running:  # it calls itself
            yield
            return
        self._counts.clear()
        self._running = True
        try:
            yield
        finally:
            self._running = False
        for check in self._checks:
            check.ended(self._counts[check.path])

    def count(self, check: CallCheck) -> None:
        """Count a call."""
        if self._model is None:
            return
        many, most = self._counts[check.path] + 1, max(check.recorded.counts, default=0)
        if self._running and many <= most:
            self._counts[check.path] = many
            return
        if in_backward() or any(map(is_compiled, self._model.modules())):  # which may run a module again
            return
        if self._running:
            raise check.error(f"is called {many} times", f"{most} calls")
        raise RuntimeError(
            f'"{check.path}" was called by itself, outside the model. Its parameters are cut on the tensor '
            "axis, and what it takes and returns may be this rank's part. Call the model, as by run.predict, "
            f"and return what you need; or write {check.remedy}"
        )


class CallCheck:
    """The calls of one module."""

    def __init__(
        self, path: str, recorded: RecordedCalls, names: tuple[str, ...], count: Callable[[CallCheck], None]
    ) -> None:
        self.path, self.recorded = path, recorded
        self._names, self._count = names, count
        self._known: set[Any] = set()  # the types of the arguments of calls that fit

    def begin(self, args: Any, named: Any) -> None:
        """Before the module runs."""
        self._count(self)
        kinds = (*map(type, args), *named, *map(type, named.values()))
        if kinds not in self._known:
            self._check("takes", given_by(args, named, self._names), self.recorded.takes)
            if PLAIN.issuperset(kind for kind in kinds if not isinstance(kind, str)):
                self._known.add(kinds)

    def end(self, output: Any) -> None:
        """After it, before what it returns is moved."""
        if type(output) not in self._known:
            self._check("returns", returned_by(output), self.recorded.returns)
            if type(output) in PLAIN:
                self._known.add(type(output))

    def ended(self, count: int) -> None:
        """After the model. count: of calls."""
        if count not in (self.recorded.counts or {0}):
            raise self.error(f"is called {count} times", f"{max(self.recorded.counts, default=0)} calls")

    def _check(self, verb: str, found: CallStructure, recorded: set[CallStructure]) -> None:
        if any(found.fits(each) for each in recorded):
            return
        if not recorded:
            raise self.error("is called", "no call of it")
        here, there = min((found.difference(each) for each in recorded), key=lambda pair: len(pair[0]))
        raise self.error(f"{verb} {here}", there)

    def error(self, found: str, recorded: str) -> RuntimeError:
        """Args: what is observed, and what the recorded program has."""
        return RuntimeError(
            f'"{self.path}" {found}; the program that was recorded on sample= has {recorded}. The tensor '
            "axis is proved for that program alone: something beside inputs, shapes and settings decides "
            f"what the model runs. Let it run alike in every step, or write {self.remedy}"
        )

    @property
    def remedy(self) -> str:
        """What leaves the module whole."""
        return f'parallelize(..., cuts={{"{self.path}*": "whole"}})'


class _ModelForward(Forward):
    def __init__(self, model: nn.Module, calls: ModelCalls) -> None:
        super().__init__(model)
        self._calls = calls

    def __call__(self, *args: Any, **named: Any) -> Any:
        if is_compiling():
            return self._run(*args, **named)
        if torch.is_grad_enabled() and any(one.requires_grad for one in tensors_in((args, named))):
            raise RuntimeError(
                "an input of the model requires a gradient, of which each rank of tensor= would have a part. "
                "Give the model x.detach(), or take gradients by inputs under a plan without tensor="
            )
        with self._calls.forward():
            return self._run(*args, **named)
