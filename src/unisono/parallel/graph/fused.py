"""A layer whose output features are several things, such as query, key and value, as several layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["SplitColumns", "like", "split_"]


def like(old: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Make the parameter that stands for `old`: frozen where it is, with what the user noted on it."""
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    new.__dict__.update(vars(old))
    return new


class SplitColumns(nn.Module):
    """A fused Linear [out, in] or Conv1D [in, out] as several linear layers, each of which can be cut by column.

    Three of one size are called q, k and v; others 0, 1 and so on.
    """

    def __init__(self, fused: Any, sizes: Sequence[int]) -> None:
        super().__init__()
        self._sizes = tuple(sizes)
        self._turned = not isinstance(fused, nn.Linear)  # Conv1D
        self.in_features = fused.weight.shape[0 if self._turned else 1]
        self.out_features = sum(sizes)
        alike = len(sizes) == 3 and len(set(sizes)) == 1
        self._names = tuple("qkv") if alike else tuple(map(str, range(len(sizes))))
        bias = getattr(fused, "bias", None)
        for name, size in zip(self._names, sizes, strict=True):
            layer = nn.Linear(self.in_features, size, bias=bias is not None, device="meta")
            self.add_module(name, layer)
        given = {"weight": fused.weight.data} | ({} if bias is None else {"bias": bias.data})
        for path, value in self.parts("", given).items():
            at, _, name = path.lstrip(".").partition(".")
            setattr(self.get_submodule(at), name, like(getattr(fused, name), value))

    def parts(self, path: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Cut the parameters of the fused layer; return them by their paths, this module being at `path`."""
        found = {}
        for leaf, value in given.items():
            for name, part in zip(self._names, value.split(self._sizes, -1 if self._turned else 0), strict=True):
                part = part.t().contiguous() if self._turned and part.dim() == 2 else part.clone()
                found[f"{path}.{name}.{leaf}"] = part
        return found

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.get_submodule(name)(x) for name in self._names], dim=-1)


def split_(model: nn.Module, path: str, sizes: Sequence[int]) -> None:
    """Put several layers in place of the one at `path`."""
    above, _, name = path.rpartition(".")
    model.get_submodule(above).register_module(name, SplitColumns(model.get_submodule(path), sizes))
