"""docs/pytorch-table.md is what the committed results of `make test-torch` make it, with all explained."""

from __future__ import annotations

import json

import pytest

from pytorch_suite import notes
from recording import table

RESULTS = json.loads(table.RESULTS.read_text())


def test_the_page_is_made_of_the_results():
    assert table.PAGE.read_text() == table.render(RESULTS, notes.NOTES, notes.REASONS)


def test_every_failure_has_its_reason():
    failed = {
        (test, run.partition(" ")[0])
        for test, ends in RESULTS["suite"].items()
        for run, end in ends.items()
        if end == "failed" and not run.startswith(table.ON_GLOO)
    }
    assert failed == {(test, way) for test, ways in notes.REASONS.items() for way in ways}


def test_what_passes_on_gloo_passes_here():
    on_gloo = table.passes(RESULTS["suite"], on_gloo=True)
    assert len(on_gloo) >= 90
    assert on_gloo <= table.passes(RESULTS["suite"], on_gloo=False)


@pytest.mark.parametrize("name", notes.NOTES)
def test_remarks_are_about_rows(name: str):
    assert name in {row["name"] for row in RESULTS["rows"]} | {
        f"{row['section']}: {row['name']}" for row in RESULTS["rows"]
    }


@pytest.mark.parametrize(
    "passed, failed, expected", [(1, 1, "works"), (0, 1, "not yet"), (0, 0, "not tested")]
)
def test_states(passed: int, failed: int, expected: str):
    row = {"section": "Functions", "name": "f", "passed": passed, "failed": failed}
    assert table.state(row, {})[0] == expected
    assert table.state(row, {"f": ("differs", "why")}) == ("differs", "why")


def test_a_run_without_pytorchs_suite_keeps_what_only_that_ran():
    def row(name: str, passed: int, example: str) -> dict[str, object]:
        return {"section": "S", "name": name, "passed": passed, "failed": 0, "example": example}

    before = [
        row("a", 3, "suite gloo x3 test_a"),
        row("b", 3, "suite gloo x3 test_b"),
        row("c", 1, "t.py::c"),
    ]
    now = [row("a", 0, ""), row("b", 1, "t.py::b"), row("c", 0, "")]
    assert table.with_what_the_suite_ran(now, before) == [before[0], now[1], now[2]]
