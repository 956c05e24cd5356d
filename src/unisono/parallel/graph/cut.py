"""A cut of a model on the tensor axis, as data: what is cut, where ranks sum, what stays whole and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from .containers import RecordedCalls, Slot
from .shapes import CaptureError


class Sizes(NamedTuple):
    """A call with sizes that the program has written down, such as `view(b, t, 12, -1)`.

    Args:
        function: its name.
        numbers: place among the integers of its arguments -> (as written, on each rank).
    """

    function: str
    numbers: dict[int, tuple[int, int]]


class ModuleMove(NamedTuple):
    """What happens to a value that goes into a module or comes out of it: a kind of tensor_moves.py.

    Args:
        dim: of the positions.
    """

    kind: str
    dim: int


Moves = dict[tuple[bool, Slot], ModuleMove]  # (it comes out, its slot) -> what happens there
TOLD = {
    "slice": "positions are cut",
    "gather": "positions are gathered",
    "scatter": "its output is cut along the sequence",
}


@dataclass
class Cut:
    """How the ranks of a tensor axis share a model.

    Args:
        parts: the number of ranks.
        dims: name of a parameter or buffer -> the dim that is cut.
        modules: path -> how the module runs: column, "column, gathered" (its output is gathered), row or
            vocabulary (its output is summed).
        sums: parameters that are whole on every rank, whose gradients are sums over the ranks.
        moves: path -> (it comes out, its slot) -> what happens there.
        calls: path -> how the proved programs call a module that does not run as it is, or one around it.
        draws: modules that draw random numbers for this rank's positions.
        sizes: path -> (number of the call in the module's forward -> the sizes to change).
        fused: path of a layer -> output features of the layers that stand for it.
        whole: (what, why): what is not cut.
        positions: (module, text): where it is not cut along the sequence, and why. None: nothing is.
        flops: (cut, all), of one forward.    parameters: (cut, all).
    """

    parts: int
    dims: dict[str, int] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    sums: list[str] = field(default_factory=list)
    moves: dict[str, Moves] = field(default_factory=dict)
    calls: dict[str, RecordedCalls] = field(default_factory=dict)
    draws: list[str] = field(default_factory=list)
    sizes: dict[str, dict[int, Sizes]] = field(default_factory=dict)
    fused: dict[str, list[int]] = field(default_factory=dict)
    whole: list[tuple[str, str]] = field(default_factory=list)
    positions: list[tuple[str, str]] | None = None
    flops: tuple[int, int] = (0, 0)
    parameters: tuple[int, int] = (0, 0)

    def same(self, other: Cut, *, gradients: bool = True) -> bool:
        """Whether both do the same to a model. This one may draw less."""
        names = ("parts", "dims", "modules", "sizes", "fused")
        sums = [(set(cut.sums), cut.moves) for cut in (self, other)]
        if not set(self.draws) <= set(other.draws):
            return False
        return all(getattr(self, name) == getattr(other, name) for name in names) and (
            sums[0] == sums[1] if gradients else self.forward_moves() == other.forward_moves()
        )

    def special(self, model: nn.Module) -> list[str]:
        """The modules that do not run as they are: paths in `model`, which may be cut already."""
        return [*dict.fromkeys([*self.leaves(model), *self.modules, *self.moves, *self.draws])]

    def leaves(self, model: nn.Module) -> dict[str, dict[str, int]]:
        """Path of a module -> its parameters and buffers that are cut, each with its dim."""
        values = dict([*model.named_parameters(), *model.named_buffers()])
        dims = {id(values[name]): dim for name, dim in self.dims.items()}
        found: dict[str, dict[str, int]] = {}
        for path, module in model.named_modules():
            for leaf, value in [*module._parameters.items(), *module._buffers.items()]:
                if value is not None and id(value) in dims:
                    found.setdefault(path, {})[leaf] = dims[id(value)]
        return found

    def checked(self, model: nn.Module) -> list[str]:
        """The modules whose calls are compared: these, and those around them, but for the model itself."""
        names = [path.split(".") for path in self.special(model)]
        around = [".".join(parts[:count]) for parts in names for count in range(1, len(parts))]
        return [*dict.fromkeys([*self.special(model), *around])]

    def learn(self, other: Cut) -> None:
        """Take the calls of another proved program, which this cut fits, too."""
        for path, found in other.calls.items():
            self.calls.setdefault(path, RecordedCalls()).add(found)

    def forward_moves(self) -> dict[str, Moves]:
        """The moves that do something in forward, whatever they do to gradients."""
        found: dict[str, Moves] = {}
        for path, moves in self.moves.items():
            for place, (kind, dim) in moves.items():
                if kind != "enter":
                    found.setdefault(path, {})[place] = ModuleMove(kind.removesuffix(", sum"), dim)
        return found

    def __str__(self) -> str:
        shares = [f"{cut / max(total, 1):.0%}" for cut, total in (self.parameters, self.flops)]
        what = f"{shares[0]} of the parameters and {shares[1]} of the FLOPs"
        lines = [f"tensor={self.parts} cuts {what}, proved from the recorded program"]
        for path, kind in _merged(self.modules.items()):
            lines.append(f"  {path}: {kind}")
        inside = tuple(f"{path}." for path in self.modules)
        bare = {name: f"dim {dim}" for name, dim in self.dims.items() if not name.startswith(inside)}
        lines += [f"  {name}: {text}" for name, text in _merged(bare.items())]
        lines += [
            f"  {name}: whole, its gradient is summed" for name, _ in _merged((n, "") for n in self.sums)
        ]
        moves = [
            (path, " and ".join(dict.fromkeys(TOLD[move.kind] for move in moves.values())))
            for path, moves in self.forward_moves().items()
        ]
        lines += [f"  {path}: {text}" for path, text in _merged(moves)]
        lines += [f"  {path}: {text}" for path, text in _merged(self.positions or ())]
        lines += [f"  {path}: whole, because {why}" for path, why in _merged(self.whole)]
        return "\n".join(lines)


def _merged(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Paths that differ in numbers only, with one text, are one: layers.0.fc, layers.1.fc -> layers.*.fc."""
    return list(dict.fromkeys((re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), text) for path, text in pairs))


class KnownCuts:
    """What has been found for one model."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Cut | CaptureError] = {}

    def of(self, key: Hashable, find: Callable[[], Cut]) -> Cut:
        """The cut of this key.

        Raises:
            CaptureError: it cannot be cut. It is not tried again.
        """
        if key not in self._known:
            try:
                self._known[key] = find()
            except CaptureError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, CaptureError):
            raise found
        return found
