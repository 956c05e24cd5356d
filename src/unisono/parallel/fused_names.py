"""Fused layers in checkpoints: some plans have several layers in place of one, see graph/fused.py.

| the checkpoint has | the model has | what is read |
|---|---|---|
| attn.in_proj_weight | attn.q.weight, attn.k.weight, attn.v.weight | the one, and a part of it is taken |
| attn.q.weight, attn.k.weight, attn.v.weight | attn.in_proj_weight | all three, one after the other |

So does the optimizer's state. A layer is read whole by each rank that has a part of it, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.torch_internals.training import offsets

from .graph.fused import Split


class FusedLayer:
    """One layer that several stand for.

    Args:
        path: of it.
        names: of the several, in it.
        sizes: output features of each.
        leaves: parameter of the one -> of each of the several.
        turned: the one is [in, out].
    """

    def __init__(
        self, path: str, names: Iterable[str], sizes: Iterable[int], leaves: Mapping[str, str], turned: object
    ) -> None:
        self.path, self.names, self.sizes = path, tuple(names), tuple(sizes)
        self.leaves, self.turned = dict(leaves), bool(turned)

    def about(self) -> dict[str, Any]:
        """Itself as JSON."""
        return dict(vars(self))

    def parts(self, leaf: str) -> list[str]:
        """The names of what stands for a parameter of the one."""
        return [f"{self.path}.{name}.{self.leaves[leaf]}" for name in self.names]

    def cut(self, place: int, whole: Tensor) -> Tensor:
        """What the several have of a parameter of the one: that at `place`."""
        part: Tensor = whole.split(self.sizes, -1 if self.turned else 0)[place]
        return part.t() if self.turned and part.dim() == 2 else part

    def join(self, parts: list[Tensor]) -> Tensor:
        """The parameter of the one, from those of the several."""
        turned = [part.t() if self.turned and part.dim() == 2 else part for part in parts]
        return torch.cat(turned, -1 if self.turned else 0)


def fused_layers(model: nn.Module) -> list[FusedLayer]:
    """The layers of a model for which several stand."""
    return [
        FusedLayer(path, module.names, module._sizes, module.fused, module._turned)
        for path, module in model.named_modules()
        if isinstance(module, Split)
    ]


def parts_of(layers: Iterable[FusedLayer]) -> dict[str, tuple[FusedLayer, str, int]]:
    """Name of a parameter of one of the several -> (layer, parameter of the one, place in it)."""
    return {
        name: (layer, leaf, place)
        for layer in layers
        for leaf in layer.leaves
        for place, name in enumerate(layer.parts(leaf))
    }


class FusedNames:
    """Reads parameters by the names that this model has, whatever those of the checkpoint are.

    Args:
        here, there: fused layers of this model, and of the one that was saved.
        saved: whether the checkpoint has a parameter of this name.
    """

    def __init__(
        self, here: Iterable[FusedLayer], there: Iterable[FusedLayer], saved: Callable[[str], bool]
    ) -> None:
        self._parts = parts_of(here)
        self._there = {f"{layer.path}.{leaf}": (layer, leaf) for layer in there for leaf in layer.leaves}
        self._saved = saved

    def sources(self, name: str) -> list[str]:
        """The saved parameters of which this one is made; empty: there are none."""
        layer, leaf, _ = self._parts.get(name, (None, "", 0))
        if self._saved(name) and (layer is None or not self._other(layer, leaf)):
            return [name]
        whole = name if layer is None else f"{layer.path}.{leaf}"
        if self._saved(whole):
            return [whole]
        found = self._there.get(whole)
        return [] if found is None else found[0].parts(found[1])

    def _other(self, layer: FusedLayer, leaf: str) -> bool:
        """Whether the saved model has other layers in place of this one."""
        found = self._there.get(f"{layer.path}.{leaf}")
        return found is not None and found[0].about() != layer.about()

    def made(self, name: str, values: list[Tensor]) -> Tensor:
        """The whole parameter `name`, from those that `sources` names."""
        layer, leaf, place = self._parts.get(name, (None, "", 0))
        whole = name if layer is None else f"{layer.path}.{leaf}"
        value = self._there[whole][0].join(values) if len(values) > 1 else values[0]
        return value if layer is None else layer.cut(place, value)

    def moved(self, names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
        """Those of `names` that are not saved as they are, with what they are made of."""
        for name in names:
            sources = self.sources(name)
            if sources and sources != [name]:
                yield name, sources


def fill_part(value: Tensor, whole: Tensor) -> None:
    """Give a parameter, or this rank's part of one, its values from a whole one."""
    if isinstance(value, DTensor):
        begins, local = offsets(value), value.to_local()
        for dim, (begin, size) in enumerate(zip(begins, local.shape, strict=True)):
            whole = whole.narrow(dim, begin, size) if size else whole[:0]
        value = local
    if value.numel():
        value.copy_(whole)
