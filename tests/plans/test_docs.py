"""docs/algorithms.md says what the plans say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_algorithms_is_current() -> None:
    made = subprocess.run(
        [sys.executable, "tools/algorithms.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert page == made.stdout, "run: python tools/algorithms.py > docs/algorithms.md"
