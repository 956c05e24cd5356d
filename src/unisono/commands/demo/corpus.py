"""The demo's data: the source text of the running interpreter's standard library, as bytes.

It is real text on every machine, so nothing is downloaded. The files are read in sorted order, so every rank
has the same bytes. Four spaces become a tab: otherwise the model would spend its minute on counting spaces.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def read_corpus(max_bytes: int) -> bytes:
    """Return up to `max_bytes` of Python source, file after file in sorted order.

    Raises:
        FileNotFoundError: there is no Python source (some installs ship bytecode only).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if len(text) < max_bytes and SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes().replace(b" " * 4, b"\t")
    if not text:
        raise FileNotFoundError(f"no Python source under {root}: the demo has nothing to learn from")
    return bytes(text[:max_bytes])
