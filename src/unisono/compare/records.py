"""Readings: what a rank has recorded of its steps, one JSON line each; and those of a run, read again."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from unisono.engine.environment import env

# In the order in which a step makes them: the first kind that differs is where runs part.
KINDS = ("seed", "start", "rows", "output", "loss", "clip", "gradient", "rate", "parameter", "buffer", "note")


class Reading(NamedTuple):
    """One number, or a few, of one step of one rank.

    Attributes:
        step: how many steps of optimizers were before.
        kind: one of KINDS.
        name: of a module, a parameter, a buffer, a group of parameters, or what a script has noted.
        value: rows: the projection of each row. output: [sum, sum of magnitudes, class]. start, parameter:
            [norm, projection, digest]. gradient, buffer: [norm, projection]. Others: a number.
        type: of the values: float32 ...; of the seed: the group's backend.
    """

    step: int
    kind: str
    name: str
    value: Any
    type: str = ""


class Writer:
    """The readings of this process, in order.

    Args:
        most_steps: the script ends after so many; 0: it ends itself.
    """

    def __init__(self, most_steps: int, folder: str, rank: int) -> None:
        self.step, self.most_steps = 0, most_steps
        self._path = Path(folder, f"rank{rank}.jsonl")
        self._file: TextIO | None = None

    def add(self, kind: str, name: str, value: Any, type_: str = "") -> None:
        """Write a reading of the current step."""
        if self._file is None:  # not before the first reading: workers of a data loader import PyTorch, too
            self._file = open(self._path, "w", encoding="utf-8")  # noqa: SIM115
        self._file.write(json.dumps([self.step, kind, name, value, type_]) + "\n")
        self._file.flush()


@cache
def writer() -> Writer | None:
    """The writer of this process; None: nothing is recorded."""
    given = env.compared()
    return None if given is None else Writer(*given)


def note(name: str, value: float) -> None:
    """Mark a number that `unisono compare` compares; without it, do nothing.

    Args:
        name: the same in each run.
        value: of this step, on this rank: a number, or an array or tensor of one element.
    """
    if (recording := writer()) is not None:
        recording.add("note", name, float(value))


class TrialRun(NamedTuple):
    """The readings of all ranks of one run.

    Attributes:
        name: "2 ranks", "2 ranks over Gloo".
        ranks: for each rank {(step, kind): [readings in order]}.
    """

    name: str
    ranks: list[dict[tuple[int, str], list[Reading]]]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def backend(self) -> str:
        """The backend of torch.distributed that the script asked for; "": none."""
        return next((reading.type for reading in self.of(0, "seed")[0]), "")

    @property
    def steps(self) -> int:
        """Steps of optimizers that rank 0 has taken."""
        return 1 + max((step for step, kind in self.ranks[0] if kind == "parameter"), default=-1)

    def mean_loss(self, step: int) -> float | None:
        """The mean of all losses of a step, of all ranks; None: it has none."""
        losses = [reading.value for rank in self.of(step, "loss") for reading in rank]
        return sum(losses) / len(losses) if losses else None

    def of(self, step: int, kind: str) -> list[list[Reading]]:
        """The readings of one kind of a step, by rank."""
        return [rank.get((step, kind), []) for rank in self.ranks]


def read_run(name: str, folder: Path, size: int) -> TrialRun:
    """Read what the ranks of a run have written.

    Raises:
        ValueError: a rank has recorded nothing.
    """
    ranks: list[dict[tuple[int, str], list[Reading]]] = []
    for rank in range(size):
        file = folder / f"rank{rank}.jsonl"
        found: dict[tuple[int, str], list[Reading]] = {}
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            reading = Reading(*json.loads(line))
            found.setdefault((reading.step, reading.kind), []).append(reading)
        if not any(kind in ("parameter", "note") for _, kind in found):
            raise ValueError(
                f"{name}: rank {rank} took no step of an optimizer of PyTorch, and noted nothing. "
                "unisono compare reads steps of torch.optim; other numbers: un.compare.note(name, value)"
            )
        ranks.append(found)
    return TrialRun(name, ranks)
