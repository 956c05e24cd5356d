"""What a rank that leaves says of the reason."""

from __future__ import annotations

import sys

import pytest

from loops import each
from unisono.engine.diagnosis.close_reason import close_reason, uncaught_reason


class _Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@each(
    ("error", "said"),
    [
        (ValueError("bad loss\nat step 7"), "ValueError: bad loss"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (_Silent(), "_Silent"),
        (_Silent("quiet"), "_Silent: quiet"),
        (OSError("\udcff"), "OSError: ?"),
        (SystemExit(0), ""),
        (SystemExit(), ""),
        (GeneratorExit(), ""),
    ],
)
def test_cause_of_every_exception(error: BaseException, said: str) -> None:
    assert close_reason(error) == said


def handled(code: object) -> BaseException:
    """The SystemExit with which a handler of a ValueError ends the process."""
    try:
        try:
            raise ValueError("bad loss")
        except ValueError:
            sys.exit(code)  # type: ignore[arg-type]
    except SystemExit as error:
        return error


def test_an_exit_in_a_handler_tells_what_was_handled() -> None:
    """As `mp.spawn` and multiprocessing end a process; not where the exit has words of its own."""
    assert close_reason(handled(1)) == "ValueError: bad loss"
    assert close_reason(handled("no such model")) == "SystemExit: no such model"
    assert close_reason(handled(0)) == ""


def test_cause_calls_no_repr() -> None:
    """A list of millions of numbers, a tensor whose device is busy."""

    class Slow:
        def __repr__(self) -> str:
            raise AssertionError

    class Talkative(ValueError):
        def __str__(self) -> str:
            raise AssertionError

        def __len__(self) -> int:
            return 0

    for slow in (Slow(), [Slow()], "x" * 1_000_000, 1 << 1_000_000, type("Word", (str,), {})("x")):
        assert close_reason(ValueError("x", slow)) == "ValueError"
        assert close_reason(SystemExit(slow)) == "SystemExit"
    assert close_reason(Talkative("x", 1, 2.5, None)) == "Talkative: ('x', 1, 2.5, None)"
    assert (
        close_reason(FileNotFoundError(2, "No such file", "a"))
        == "FileNotFoundError: [Errno 2] No such file: 'a'"
    )


def test_no_cause_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last error that nobody caught counts at the end of the program only: see the test of processes."""
    monkeypatch.setattr(sys, "last_value", ValueError("long ago"), raising=False)
    assert close_reason(None) == ""
    assert uncaught_reason() is None
