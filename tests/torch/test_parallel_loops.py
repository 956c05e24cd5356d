"""Features of training loops under plans: each cell of the table in docs/features.md."""

import pytest

import suite
from loop_features.feature_cells import PLANS
from loop_features.feature_table import FAILED, NOT_RUN, SIGNS, cells, note, written
from loop_features.features import FEATURES

QUICK = ("own_loss", "unfreezing", "resuming")


def test_the_page_has_each_feature_under_each_plan() -> None:
    assert set(written()) == {(name, title) for name in FEATURES for title in PLANS}


def test_some_features_in_a_pipeline(forks: suite.Forks) -> None:
    compared(forks, "1f1b", QUICK)


@pytest.mark.sweep
@pytest.mark.parametrize("title", PLANS)
def test_features(forks: suite.Forks, title: str) -> None:
    compared(forks, title, tuple(FEATURES))


def compared(forks: suite.Forks, title: str, features: tuple[str, ...]) -> None:
    """Assert that cells are as the page has them; `feature_table.py` writes it anew."""
    page = written()
    for cell in cells(forks, title, features):
        assert cell.word not in FAILED, cell
        sign = note(cell) if cell.word == "refused" else SIGNS[cell.word]
        assert page[cell.feature, title] in (sign, NOT_RUN), cell
