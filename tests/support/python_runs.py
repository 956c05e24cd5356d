"""Runs a Python of its own to its end, and gives what it printed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from effort import HANG_S


def ran(
    *words: Any, limit_s: float = HANG_S, cwd: Path | None = None, **environ: Any
) -> subprocess.CompletedProcess[str]:
    """`python WORDS ...`, with these variables beside those of this process."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **{name: str(value) for name, value in environ.items()}},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def fine(*words: Any, **how: Any) -> str:
    """What it printed on stdout. Fails when it does."""
    done = ran(*words, **how)
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-6000:]}"
    return done.stdout


PATH = {"PYTHONPATH": os.pathsep.join(sys.path)}
"""For programs that import what tests import."""
