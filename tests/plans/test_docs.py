"""docs/algorithms.md and the pages of the algorithms say what the plans say."""

import subprocess
import sys
from pathlib import Path

import pages
from effort import HANG_S
from unisono.plans import ALGORITHMS

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_algorithms_is_current() -> None:
    made = subprocess.run(
        [sys.executable, "tools/algorithms.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert page == made.stdout, "run: python tools/algorithms.py > docs/algorithms.md"


def test_every_algorithm_gets_a_page(tmp_path: Path) -> None:
    command = [sys.executable, "tools/algorithms.py", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=HANG_S)
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            name = f"{collective}-{algorithm}"
            page = (tmp_path / f"{name}.md").read_text()
            assert f"({name}.svg)" in page and "def " in page and "rounds, p = " in page
    for page in tmp_path.glob("*.md"):
        for path, _ in pages.links(page.read_text()):
            assert (tmp_path / path).exists(), f"{page.name} links to {path}"
