"""Rows of experts in a dry run, beside routers that draw by chance."""

import random
import statistics

import pytest

pytest.importorskip("torch")
from inside_parallel import DrawnRows


@pytest.mark.parametrize(
    ("experts", "top", "ranks"), [(4, 2, 2), (8, 2, 4), (16, 4, 2), (2, 2, 2), (4, 1, 4)]
)
def test_rows_of_experts_are_those_of_a_full_rank(experts: int, top: int, ranks: int) -> None:
    drawer, rows, trials = random.Random(0), 64, 200
    received, pairs = [], []
    for _ in range(trials):
        chosen = [drawer.sample(range(experts), top) for _ in range(rows * ranks)]
        here = [sum(each < experts // ranks for each in row) for row in chosen]
        received.append(sum(map(bool, here)))
        pairs.append(sum(here))
    drawn = DrawnRows.of(rows, experts, top, ranks)
    for full, seen in ((drawn.received, received), (drawn.pairs, pairs)):
        assert sum(each <= full for each in seen) >= 0.95 * trials
        assert full <= max(seen) + 2  # so it is no bound for every router
    assert drawn.sent == pytest.approx(statistics.mean(received), rel=0.02)
