"""README shows the failure that a run prints, and has the figures of benchmarks/results."""

import csv
import importlib
import re
from pathlib import Path

import pytest

import pages
from python_runs import ran

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SHOWN_IN = "/tmp"  # where the program was when README's failure was printed
UNITS = {"us": 1.0, "ms": 1e3}
SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def test_the_failure_is_the_one_that_is_printed(tmp_path: Path):
    # Its language is "py", not "python": it fails, so it does not run with the blocks of the pages.
    (program,) = (block.text for block in pages.blocks(README) if block.language == "py")
    command = re.search(r"`unisono (run -n \d train\.py)` prints", README)
    assert command
    shown = re.search(r"^(?:    .*\n)+", README[command.end() :], re.MULTILINE)
    assert shown
    (tmp_path / "train.py").write_text(program)
    done = ran("-m", "unisono", *command[1].split(), cwd=tmp_path)
    printed = [line.strip() for line in done.stderr.replace(str(tmp_path), SHOWN_IN).splitlines()]
    expected = [line.strip() for line in shown[0].splitlines()]
    assert printed[-len(expected) :] == expected
    assert done.returncode != 0


def test_the_table_has_the_figures_of_the_results():
    heading, _, *rows = re.findall(r"^\|.*\|$", README, re.MULTILINE)
    sizes = [amount(cell, SIZES) for cell in cells(heading)[1:]]
    with (ROOT / "benchmarks" / "results" / "2026-11-22-torch.csv").open(newline="") as file:
        measured = {
            (row["library"], float(row["nbytes"])): float(row["p50_us"])
            for row in csv.DictReader(file)
            if row["ranks"] == "2"
        }
    shown = {
        (cells(row)[0].lower(), size): amount(cell, UNITS)
        for row in rows
        for size, cell in zip(sizes, cells(row)[1:], strict=True)
    }
    assert shown == measured


def test_the_pictures_are_drawn_from_the_results(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    for path, text in importlib.import_module("figures").files().items():
        assert path.read_text() == text, f"{path.name} is out of date: run `make figures`"


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_guide_to_performance_has_the_figures_of_the_results(ranks: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    table = "\n".join(importlib.import_module("figures").table("2026-11-21", ranks))
    assert table in (ROOT / "docs" / "performance.md").read_text()


def cells(row: str) -> list[str]:
    """The cells of a row of a table, without their spaces."""
    return [cell.strip() for cell in row.strip("|").split("|")]


def amount(text: str, units: dict[str, float]) -> float:
    """The value of "13.2 ms" in the unit whose factor is 1."""
    number, unit = text.split()
    return round(float(number) * units[unit], 6)
