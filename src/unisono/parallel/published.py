"""A run as named pieces, by the names of the user's model: for `unisono.publish`, and `subscribe(into=)`.

Where several layers stand for a fused one, their parameters are pieces of its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from unisono.engine.publishing.pieces import Piece
from unisono.torch.control_data import on_every_rank
from unisono.torch_internals.training import offsets

from .sharded_parameters import reshard
from .weights import fused_layers, parts_of

if TYPE_CHECKING:
    from .graph.fused import FusedLayer
    from .model_setup import ModelSetup


class RunRanks:
    """The ranks of a run, as a publication uses a group."""

    def __init__(self, built: ModelSetup) -> None:
        self._world = built.mesh.world
        self.rank, self.size = dist.get_rank(self._world), dist.get_world_size(self._world)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """The objects of all ranks, which are plain data."""
        return on_every_rank(lambda: obj, self._world)


def pieces_of(built: ModelSetup, value_of: Callable[[Any], Tensor]) -> dict[str, list[Piece]]:
    """What this rank holds of each parameter and persistent buffer."""
    reshard(built.units.root)
    values = [(name, value_of(one)) for name, one in built.named.items()]
    return _pieces([*values, *built.buffers.items()], fused_layers(built.model))


def _pieces(values: Iterable[tuple[str, Tensor]], fused: list[FusedLayer]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    parts = parts_of(fused)
    for name, value in values:
        sharded = isinstance(value, DTensor)
        here = value.to_local() if isinstance(value, DTensor) else value
        offset, shape = list(offsets(value)) if sharded else [0] * value.dim(), list(value.shape)
        layer, leaf, place = parts.get(name, (None, "", 0))
        if layer is not None:
            if layer.turned and len(shape) == 2:
                here, offset, shape = here.t(), offset[::-1], shape[::-1]
            dim = len(shape) - 1 if layer.turned else 0
            offset[dim] += sum(layer.sizes[:place])
            shape[dim] = sum(layer.sizes)
            name = f"{layer.path}.{leaf}"
        if here.numel() or not value.numel():
            found.setdefault(name, []).append(Piece(here, tuple(offset), tuple(shape)))
    return found
