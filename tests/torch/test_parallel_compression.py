"""Gradients in low rank and as codes. The checks of parallel/compression.py run on two and three ranks."""

from __future__ import annotations

import pytest

import suite
from test_checks import run_all

CHECKS = [check for check in suite.checks("parallel") if check.startswith("compression.")]
ALL_S = 150


@pytest.mark.timeout(ALL_S + 30)
@pytest.mark.parametrize("size", [2, 3])
def test_checks(forks: suite.Forks, size: int, subtests: pytest.Subtests) -> None:
    for check, text in run_all(forks, size, "parallel", CHECKS, ALL_S).items():
        if text:
            with subtests.test(check=check):
                pytest.fail(text, pytrace=False)
