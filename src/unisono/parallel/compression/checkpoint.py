"""The buffers of compressed gradients in a checkpoint that any plan loads.

    errors.STAGE.ROW.TENSOR.NAME      each rank's own
    factors.STAGE.TENSOR.NAME         the same on all data ranks

The error of a result is the mean of the error buffers over the data ranks. So a plan with another number of
data ranks gives each of its ranks that mean: no error is lost, and none is counted twice. Matrices that the
tensor axis cuts differently start with empty buffers, and a warning reports it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono import codecs

if TYPE_CHECKING:
    from unisono.parallel.mesh import PlanMesh

    from .reducer import Compression

__all__ = ["CompressionCheckpoint"]


class CompressionCheckpoint:
    """The state of compression that a rank of a plan saves and loads."""

    def __init__(self, compression: Compression, mesh: PlanMesh) -> None:
        self._compression = compression
        self._stage, self._row = mesh.stage, mesh.row
        self._tensor, self._data = mesh.place("tensor"), mesh.plan.data
        self._cut = mesh.plan.tensor

    def tensors(self) -> dict[str, Tensor]:
        """This rank's buffers, by their names in a checkpoint."""
        found = {}
        for key, buffer in self._compression.buffers().items():
            name, _, kind = key.rpartition(".")
            if kind == "error":
                found[f"errors.{self._stage}.{self._row}.{self._tensor}.{name}"] = buffer
            else:
                found[f"factors.{self._stage}.{self._tensor}.{name}"] = buffer
        return found

    def wanted(self, described: Iterable[str]) -> list[str]:
        """The tensors of a checkpoint that this rank reads.

        Args:
            described: the names of all its tensors.
        """
        errors: dict[str, dict[int, dict[int, str]]] = {}  # name -> stage -> row -> key
        factors: dict[str, dict[int, str]] = {}
        cut = 0
        for key in described:
            kind, _, rest = key.partition(".")
            if kind == "errors":
                stage, row, tensor, name = rest.split(".", 3)
                cut = max(cut, int(tensor) + 1)
                if int(tensor) == self._tensor:
                    errors.setdefault(name, {}).setdefault(int(stage), {})[int(row)] = key
            elif kind == "factors":
                stage, tensor, name = rest.split(".", 2)
                if int(tensor) == self._tensor:
                    factors.setdefault(name, {})[int(stage)] = key
        if cut not in (0, self._cut):
            warnings.warn(
                f"the checkpoint's error buffers are of matrices in {cut} parts, this plan has {self._cut}: "
                "they begin empty, and what was still to be sent is lost",
                stacklevel=2,
            )
            return []
        found: list[str] = []
        for name, choice in self._compression.choices.items():
            if choice == "exact":
                continue
            rows = self._of_stage(errors.get(name, {}))
            same = set(rows) == set(range(self._data))
            found += [rows[self._row]] if same else rows.values()
            factor = self._of_stage(factors.get(name, {}))
            found += [factor] if factor else []
        return found

    def take(self, loaded: Mapping[str, Tensor]) -> None:
        """Store the loaded tensors. A factor of another rank (r) is not used; it starts again."""
        errors: dict[str, list[Tensor]] = {}
        buffers: dict[str, Tensor] = {}
        for key, value in loaded.items():
            kind, *_, name = key.split(".", 4 if key.startswith("errors.") else 3)
            if kind == "errors":
                errors.setdefault(name, []).append(value)
            elif self._compression.fits(f"{name}.factor", value):
                buffers[f"{name}.factor"] = value
        for name, those in errors.items():
            buffers[f"{name}.error"] = self._mean(those)
        self._compression.take(buffers, self._compression.steps)

    def _of_stage(self, found: dict[int, Any]) -> Any:
        """For a parameter of several stages, this stage's value; otherwise the first one's."""
        return found.get(self._stage, found[min(found)]) if found else {}

    def _mean(self, errors: list[Tensor]) -> Tensor:
        """One error buffer unchanged; the mean of several; in the format of this run."""
        dtype = torch.float32 if self._compression.settings.errors == "f32" else torch.int16
        if len(errors) == 1 and errors[0].dtype == dtype:
            return errors[0]
        values = [e if e.dtype == torch.float32 else codecs.decode(e, codecs.f169) for e in errors]
        mean = torch.stack(values).mean(0)
        return mean if dtype == torch.float32 else codecs.encode(mean, codecs.f169).view(torch.int16)
