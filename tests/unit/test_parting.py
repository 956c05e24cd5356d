"""What a rank that leaves says of the reason."""

from __future__ import annotations

import sys

import pytest

from unisono.group.parting import why


class _Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("bad loss\nat step 7"), "ValueError: bad loss"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (_Silent(), "_Silent"),
        (OSError("\udcff"), "OSError: ?"),
        (SystemExit(0), ""),
        (SystemExit(), ""),
        (GeneratorExit(), ""),
    ],
)
def test_why(error: BaseException, said: str) -> None:
    assert why(error) == said


def test_the_end_of_an_interactive_program_has_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("long ago"), raising=False)
    assert why(None) == "ValueError: long ago"
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert why(None) == ""
