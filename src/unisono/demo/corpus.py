"""The demo's data: the source text of the running interpreter's standard library, as bytes.

Real text that is on every machine, so nothing is downloaded. Tests and installed packages are left
out; the files are read in sorted order, so every rank sees the same bytes. Four spaces become a tab:
a model that sees single bytes would spend much of its minute on counting spaces.
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
        folder: where to read; None: the standard library of this interpreter.
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
    """Python files under `root`, tests and installed packages left out."""
    found = (path for path in root.rglob("*.py") if path.is_file())
    return sorted(path for path in found if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts))
