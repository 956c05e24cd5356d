"""Tests with one fault in forty of them and another in one. Copied and run by test_failure_reports.py."""

import pytest


@pytest.mark.parametrize("number", range(40))
def test_of_one_fault(number):
    pytest.fail("a long\ntraceback\nends in the cause", pytrace=False)


def test_of_its_own():
    assert 1 + 1 == 3


def test_last():
    pass
