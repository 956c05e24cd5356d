"""Gives a plain model the weights of a run: one tensor after the other, from rank 0 to all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.torch.control_data import on_every_rank

if TYPE_CHECKING:
    from .mesh import PlanMesh

__all__ = ["copy_weights", "places_in"]

Places = dict[str, list[Tensor]]


def places_in(
    model: nn.Module | None, blanks: Mapping[str, Tensor], names: Mapping[str, str], mesh: PlanMesh
) -> Places:
    """Where each weight goes in a plain model. All ranks call this.

    Args:
        model: None: this rank wants none.
        blanks: each weight on the meta device, by its name.
        names: every path of a parameter -> its name, where it is tied.
    Raises:
        ValueError: the model of some rank is another one; on all ranks.
    """
    found: Places = {}

    def find() -> None:
        try:
            found.update({} if model is None else _places(model, blanks, names))
        except ValueError as error:
            raise ValueError(f"copy_to: the model of rank {dist.get_rank()} {error}") from error

    on_every_rank(find, mesh.everyone.world)
    return found


def _places(model: nn.Module, blanks: Mapping[str, Tensor], names: Mapping[str, str]) -> Places:
    if any(isinstance(value, DTensor) for value in model.parameters()):
        raise ValueError("belongs to a run. Make another one as the first was made")
    found: Places = {}
    for path, value in model.state_dict(keep_vars=True).items():
        name = path if path in blanks else names.get(path, path)
        if name not in blanks:
            raise ValueError(f"has {path!r}, which the model of the run has not")
        if value.shape != blanks[name].shape:
            raise ValueError(f"has {path!r} of shape {[*value.shape]}, and the run {[*blanks[name].shape]}")
        if value.is_meta:
            raise ValueError(
                f"has {path!r} on the meta device, where it has no memory. Make the model without "
                'torch.device("meta")'
            )
        found.setdefault(name, []).append(value)
    missing = [name for name in blanks if name not in found]
    if missing:
        raise ValueError(f"has no {missing[0]!r}, which the model of the run has ({len(missing)} missing)")
    return found


@torch.no_grad()
def copy_weights(
    weights: Iterator[tuple[str, Tensor | None]],
    blanks: Mapping[str, Tensor],
    places: Places,
    mesh: PlanMesh,
) -> None:
    """Fill `places` of every rank. All ranks call this.

    Args:
        weights: whole on rank 0, None on other ranks.
    """
    for name, value in weights:
        blank = blanks[name]
        sent = torch.empty(blank.shape, dtype=blank.dtype, device=mesh.axes.device_type)
        if value is not None:
            sent.copy_(value)
        dist.broadcast(sent, src=0, group=mesh.everyone.world)
        for place in places.get(name, ()):
            place.copy_(sent)
