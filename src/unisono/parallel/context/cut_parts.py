"""The tensor axis within a program on positions: it is the program of one of the tensor axis' ranks.

Parameters are this rank's parts, and sizes that the program has written down are changed. What is moved
between ranks of the tensor axis is noted as one operator, on this rank's positions:

    column:   enter -> addmm of a part of the features -> ... attention of some heads ... -> row: addmm -> sum
"""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from unisono.parallel import tensor_moves
from unisono.parallel.graph.capture import Recorder, Shapes
from unisono.parallel.graph.cut import Cut, ModuleMove
from unisono.parallel.graph.executor import RunningModel
from unisono.parallel.graph.local_model import narrow_
from unisono.parallel.graph.noted_call import NotedOp, noted_call
from unisono.parallel.tensor_moves import TensorAxis
from unisono.parallel.tensor_parallel import LocalForward, part_of, run_locally, share


class CutParts:
    """This rank's parts of what a cut shares."""

    def __init__(self, cut: Cut, axis: TensorAxis) -> None:
        self.cut, self.axis = cut, axis

    def prepare(self, shapes: Shapes) -> NotedRegion:
        """Cut a copy without values; return what has to know the recorder of a run."""
        region: Any = NotedRegion()
        narrow_(shapes, self.cut)

        def make(path: str, module: nn.Module, dims: dict[str, int]) -> None:
            _RecordedForward(path, module, dims, self.cut, self.axis, region)

        run_locally(shapes.model, self.cut, make)
        return region  # type: ignore[no-any-return]

    def of(self, model: RunningModel) -> RunningModel:
        """The model with this rank's parts of its parameters and buffers."""

        def held(name: str) -> Any:
            value, dim = model.held(name), self.cut.dims.get(name)
            return value if dim is None else part_of(value, dim, self.axis)

        return SimpleNamespace(module=model.module, held=held)


class NotedRegion:
    """Stands for the RngRegion of a model: the program says where ranks draw other numbers."""

    def follow(self, recorder: Recorder) -> None:
        """Note the next run in `recorder`."""
        self._graph, self._open = recorder.graph, False

    def begin(self) -> bool:
        """A region begins; within one nothing happens, and False returns."""
        if self._open:
            return False
        self._open = True
        self._graph.apart.append((len(self._graph.nodes), sys.maxsize))
        return True

    def end(self) -> None:
        """The region ends, if there is one."""
        if self._open:
            self._graph.apart[-1] = self._graph.apart[-1][0], len(self._graph.nodes)
        self._open = False


class _RecordedForward(LocalForward):
    def _part(self, leaf: str, _dim: int) -> Tensor:
        value: Any = self._module._parameters.get(leaf)
        found: Tensor = self._module._buffers[leaf] if value is None else value
        return found

    def _share(self, bias: Tensor) -> Tensor:
        parts = self._axis.parts
        op = NotedOp("unisono.share", functools.partial(share, parts=parts))
        return noted_call(op, (bias,), lambda: bias / parts)  # type: ignore[no-any-return]

    def _move(self, value: Tensor, move: ModuleMove) -> Tensor:
        kind, dim = move.kind, move.dim % max(value.dim(), 1)
        if kind == "enter" and not value.requires_grad:
            return value

        def run(tensor: Tensor, kind: str, dim: int) -> Tensor:
            return tensor_moves.move(tensor, kind, dim, self._axis, self._label)

        def made() -> Tensor:
            if kind == "enter":
                return value.view_as(value)
            sizes = list(value.shape)
            sizes[dim] *= self._axis.parts if kind.startswith("gather") else 1
            return value.new_zeros(sizes) + value.sum()  # with its gradient

        return noted_call(NotedOp("unisono.tensor_move", run), (value, kind, dim), made)  # type: ignore[no-any-return]
