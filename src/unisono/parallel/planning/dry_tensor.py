"""The tensor axis of a dry run: the modules run on the first rank's parts, and no message is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from unisono.parallel.generators import RngRegion
from unisono.parallel.graph.capture import CaptureError
from unisono.parallel.graph.cut import Cut
from unisono.parallel.graph.fused import split_
from unisono.parallel.graph.proof import prove
from unisono.parallel.graph.shapes import Shapes
from unisono.parallel.shared import chain
from unisono.parallel.tensor_moves import TensorAxis
from unisono.parallel.tensor_parallel import run_cut

__all__ = ["cut_of_program", "run_parts"]


class _TensorAlone(TensorAxis):
    """An axis whose other ranks are not there."""

    def sum_(self, value: Tensor) -> None:
        """Leave the values."""

    def gather_into(self, every: Tensor, mine: Tensor) -> None:
        """Leave the values."""

    def scatter_into(self, mine: Tensor, every: Tensor) -> None:
        """Leave the values."""


class _NoDraws(RngRegion):
    """Nothing is drawn."""

    def begin(self) -> bool:
        """Say that no region begins."""
        return False

    def end(self) -> None:
        """Nothing has begun."""


def cut_of_program(
    shapes: Shapes,
    inputs: Any,
    parts: int,
    *,
    sequence: bool,
    pieces: Sequence[nn.Module] | None,
    opened: frozenset[str],
) -> Cut:
    """The cut that `parallelize` would choose.

    Args:
        shapes: the model without values.    pieces: of it, in a pipeline of them.
        opened: modules that span stages.
    Raises:
        CaptureError: the program cannot be recorded, or nothing of it can be cut.
    """
    forward = None
    if pieces is not None:
        shapes, forward = Shapes(shapes.model, list(pieces)), chain
    cut = prove(shapes, inputs, parts, forward=forward, opened=opened, sequence=sequence)
    if not cut.dims:
        raise CaptureError(f"tensor={parts} cuts nothing of the model")
    return cut


def run_parts(model: nn.Module, cut: Cut, device_type: str, *, regathers: bool) -> set[nn.Parameter]:
    """Have each module of a model without values run on the first rank's parts; return the parameters that
    are parts.
    """
    for path, sizes in cut.fused.items():
        split_(model, path, sizes)
    whole = set(model.parameters())

    def part(value: Tensor, dim: int) -> Tensor:
        return value.new_empty([n // cut.parts if at == dim else n for at, n in enumerate(value.shape)])

    run_cut(model, cut, part, _TensorAlone(None, 0, cut.parts, regathers), _NoDraws(0, device_type))
    return set(model.parameters()) - whole
