"""What came of one model under one plan, as a line of text, and a file that keeps such lines.

A cell that was made by the same sources is not made again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
SOURCES = (ROOT / "src" / "unisono", Path(__file__).parent)
PACKAGES = ("torch", "transformers")
TRAINED = ("same", "lossy")


class Cell(NamedTuple):
    """What came of one animal under one plan; `where` is "cpu" or "gpu"."""

    animal: str
    plan: str
    word: str
    text: str
    seconds: float
    where: str = "cpu"

    def line(self) -> str:
        return json.dumps(self)

    @staticmethod
    def of(line: str) -> Cell | None:
        """The cell of a line; None: the line is something else that a rank printed."""
        start = line.find('["')  # after the launcher's prefix
        return Cell(*json.loads(line[start:])) if start >= 0 and line.endswith("]") else None


class CellFile:
    """Cells on disk, each with a digest of the sources that made it.

    Args:
        older: take cells that trained by other sources, too.
        every: take the newest of each, by whatever sources.
    """

    def __init__(self, path: Path, *, older: bool = False, every: bool = False) -> None:
        self._path, self._digest = path, sources()
        self._cells: dict[tuple[str, str, str], Cell] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            digest, *rest = json.loads(line)
            cell = Cell(*rest)
            if every or digest == self._digest or (older and cell.word in TRAINED):
                self._add(cell)

    def _add(self, cell: Cell) -> None:
        self._cells[cell.animal, cell.plan, cell.where] = cell

    def get(self, animal: str, plan: str, where: str) -> Cell | None:
        return self._cells.get((animal, plan, where))

    def add(self, cells: Iterable[Cell]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            for cell in cells:
                self._add(cell)
                file.write(json.dumps([self._digest, *cell]) + "\n")


def sources() -> str:
    """A digest of what decides about a cell: Unisono's Python and the zoo's, versions of packages."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in SOURCES:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    installed = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    digest.update(repr([installed.get(name) for name in PACKAGES]).encode())
    return digest.hexdigest()
