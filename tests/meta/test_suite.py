"""The tests themselves: a file is known by its name, and the fast part covers every room."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
NAMED_BY_OTHERS = {"conftest.py", "sitecustomize.py"}  # pytest and Python look for these
OF_THEIR_OWN = {TESTS / "launchers"}  # norecursedirs in pyproject.toml: `make test-launchers` runs it


def test_a_name_names_one_file() -> None:
    """A report of a failure, and a search for a file, name it without its folder."""
    counts = Counter(path.name for path in TESTS.rglob("*.py"))
    assert {name for name, count in counts.items() if count > 1} <= NAMED_BY_OTHERS


def test_the_fast_part_covers_every_room() -> None:
    entries = (TESTS / "fast.txt").read_text().split()
    listed = {entry.split("::")[0] for entry in entries if not entry.startswith("-")}
    rooms = {path.parent for path in TESTS.glob("*/test_*.py")} - OF_THEIR_OWN
    assert rooms <= {
        room for entry in listed for room in (TESTS.parent / entry, (TESTS.parent / entry).parent)
    }
    left_out = [entry.removeprefix("--deselect=") for entry in entries if entry.startswith("-")]
    for entry in [*listed, *(one.split("::")[0] for one in left_out)]:
        assert (TESTS.parent / entry).exists(), f"fast.txt names {entry}, which there is not"
    for entry in entries:
        path, _, name = entry.removeprefix("--deselect=").partition("::")
        assert not name or f"def {name}(" in (TESTS.parent / path).read_text(), f"there is no {entry}"
