"""The demo's data: the source text of the running interpreter's standard library, as bytes.

It is real text on every machine, so nothing is downloaded. Tests and installed packages are excluded.
The files are read in sorted order, so every rank has the same bytes. Four spaces become a tab: a model of
single bytes would spend much of its minute on learning to count spaces.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

__all__ = ["read_corpus"]

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

INDENT = b" " * 4


def read_corpus(max_bytes: int, folder: Path | None = None) -> bytes:
    """Return up to `max_bytes` of Python source, file after file in sorted order.

    Args:
        folder: the folder to read; None: the standard library of this interpreter.
    Raises:
        FileNotFoundError: the folder holds no Python source (some installs ship bytecode only).
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    pieces: list[bytes] = []
    nbytes = 0
    for path in _sources(root):
        if nbytes >= max_bytes:
            break
        piece = path.read_bytes().replace(INDENT, b"\t")
        pieces.append(piece)
        nbytes += len(piece)
    if not pieces:
        raise FileNotFoundError(f"no Python source under {root}: the demo has nothing to learn from")
    return b"".join(pieces)[:max_bytes]


def _sources(root: Path) -> list[Path]:
    """Python files under `root`, without tests and installed packages."""
    found = (path for path in root.rglob("*.py") if path.is_file())
    return sorted(path for path in found if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts))
