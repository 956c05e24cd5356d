"""The weights of a run, whole, one after the other on rank 0: by the names of the user's model.

No rank holds more than one of them whole, but for what the caller keeps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .fused_names import FusedLayer, fused_layers

if TYPE_CHECKING:
    from .model_setup import ModelSetup

__all__ = ["export", "weights_of"]

INDEX = "model.safetensors.index.json"  # Hugging Face's name


def weights_of(
    built: ModelSetup, value_of: Callable[[nn.Parameter], Tensor]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the name and the value of each parameter and persistent buffer. All ranks iterate to the end.

    A value is whole and on the CPU on rank 0, and None on the others. Fused layers are as the user made them.

    Args:
        value_of: the value of a parameter, wherever it is.
    """
    named, buffers = built.named, built.buffers
    told: list[Any] = [None] * built.mesh.plan.ranks
    dist.all_gather_object(told, (dist.get_rank(), [*named], [*buffers]), group=built.mesh.world)
    owner: dict[str, int] = {}  # the first rank that has it
    order: dict[str, None] = dict.fromkeys(built.names.values())
    for rank, parameters, others in told:
        order |= dict.fromkeys(others)
        for name in (*parameters, *others):
            owner.setdefault(name, rank)
    joiner = _Joiner(fused_layers(built.model))
    for name in order:
        if name in owner:
            mine = named.get(name)
            local = buffers.get(name) if mine is None else value_of(mine)
            whole = _at_rank_0(built, local, owner[name])
            yield from joiner.take(name, whole)


def _at_rank_0(built: ModelSetup, value: Tensor | None, source: int) -> Tensor | None:
    """Bring a value to rank 0, whole. source: the first rank that has it; the others may have it, too."""
    mesh = built.mesh
    whole: Tensor | None = None
    if mesh.outer is not None and mesh.outer.place("replica"):
        return None  # the first replica has the same values
    if value is not None:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        whole = whole.detach().contiguous()
    rank = dist.get_rank()
    if source == 0:
        return whole.to("cpu", copy=True) if rank == 0 and whole is not None else None  # the next step writes
    told: list[Any] = [None if whole is None else (tuple(whole.shape), whole.dtype)]
    if rank == source:
        assert whole is not None
        dist.send_object_list(told, 0, group=mesh.world)
        dist.send(whole, 0, group=mesh.world)
    elif rank == 0:
        dist.recv_object_list(told, source, group=mesh.world)
        made = torch.empty(told[0][0], dtype=told[0][1], device=mesh.axes.device_type)
        dist.recv(made, source, group=mesh.world)
        return made.cpu()
    return None


class _Joiner:
    """Puts the one in place of the several that stand for a fused layer."""

    def __init__(self, layers: list[FusedLayer]) -> None:
        self._of = {
            name: (layer, leaf) for layer in layers for leaf in layer.leaves for name in layer.parts(leaf)
        }
        self._parts: dict[str, dict[str, Tensor | None]] = {}

    def take(self, name: str, value: Tensor | None) -> Iterator[tuple[str, Tensor | None]]:
        """Take one; yield what is complete."""
        layer, leaf = self._of.get(name, (None, ""))
        if layer is None:
            yield name, value
            return
        whole = f"{layer.path}.{leaf}"
        parts = self._parts.setdefault(whole, {})
        parts[name] = value
        if len(parts) == len(layer.names):
            values = [parts[part] for part in layer.parts(leaf)]
            del self._parts[whole]
            there = [part for part in values if part is not None]
            yield whole, layer.join(there).contiguous() if there else None


def export(weights: Iterator[tuple[str, Tensor | None]], model: Any, folder: Path, shard_bytes: int) -> None:
    """Write weights as safetensors, in Hugging Face's layout, and the model's configuration if it has one.

    Rank 0 writes; all ranks call this.
    """
    first = dist.get_rank() == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Tensor] = {}
    names: list[tuple[Path, list[str]]] = []
    total = 0

    def write() -> None:
        path = folder / f"model-{len(names) + 1:05}.partial"
        _safetensors()(kept, path, metadata={"format": "pt"})
        names.append((path, [*kept]))
        kept.clear()

    for name, value in weights:
        if value is not None:
            if kept and sum(one.nbytes for one in kept.values()) + value.nbytes > shard_bytes:
                write()
            kept[name] = value
            total += value.nbytes
    if first:
        write()
        _publish(folder, names, total)
        for part in ("config", "generation_config"):
            save = getattr(getattr(model, part, None), "save_pretrained", None)
            if save is not None:
                save(folder)
    dist.barrier()


def _publish(folder: Path, names: list[tuple[Path, list[str]]], total: int) -> None:
    """Give the files their names once all of them are there."""
    if len(names) == 1:
        names[0][0].rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, (path, inside) in enumerate(names, 1):
        final = folder / f"model-{number:05}-of-{len(names):05}.safetensors"
        path.rename(final)
        where |= dict.fromkeys(inside, final.name)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
    (folder / INDEX).write_text(text)


def _safetensors() -> Any:
    from safetensors.torch import save_file

    return save_file
