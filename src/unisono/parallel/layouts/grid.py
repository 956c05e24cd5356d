"""The ranks as a mesh of prime sizes: 8 ranks are 2 x 2 x 2, 6 are 2 x 3. Every divisor is a product of
axes.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unisono.parallel.mesh import group_of, groups_along, unique_names
from unisono.parallel.tensor_moves import TensorAxis

if TYPE_CHECKING:
    from collections.abc import Sequence


def primes(number: int) -> tuple[int, ...]:
    """Prime factors, smallest first; (1,) for 1. Example: 12 -> (2, 2, 3)."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return tuple(found) or (1,)


class RankGrid:
    """All ranks of the default group, by their coordinates on the axes; the last axis is the fastest."""

    def __init__(self) -> None:
        self.sizes = primes(dist.get_world_size())
        names = unique_names(f"axis{index}" for index in range(len(self.sizes)))
        ranks = torch.arange(dist.get_world_size()).view(self.sizes)
        self.mesh = DeviceMesh.from_group(groups_along(ranks), "cpu", mesh=ranks, mesh_dim_names=names)
        self._here = tuple(self.mesh.get_coordinate() or ())
        self._groups: dict[tuple[int, ...], Any] = {
            (axis,): self.mesh.get_group(axis) for axis in range(ranks.dim())
        }

    def ranks(self, axes: Sequence[int]) -> int:
        """The ranks that differ from this one in `axes` only."""
        return math.prod(self.sizes[axis] for axis in axes)

    def axis(self, axes: tuple[int, ...], *, talks: bool = True) -> TensorAxis:
        """Those ranks, and this one's number among them, the last axis fastest.

        Args:
            talks: with their process group; all ranks of the job call this in the same order.
        """
        place = 0
        for axis in axes:
            place = place * self.sizes[axis] + self._here[axis]
        if talks and axes not in self._groups:
            others = [axis for axis in range(len(self.sizes)) if axis not in axes]
            self._groups[axes] = group_of(
                self.mesh.mesh.permute(*others, *axes).reshape(-1, self.ranks(axes))
            )
        return TensorAxis(self._groups[axes] if talks else None, place, self.ranks(axes))


@functools.lru_cache(maxsize=1)
def grid_of(world: Any) -> RankGrid:  # noqa: ARG001  (the key: another group, another grid)
    """Return the grid of the default group `world`; made once."""
    return RankGrid()
