"""What is said of the reason why a rank leaves, and of who called something else."""

import sys

import pytest

from loops import each
from unisono.engine.diagnosis.call_text import odd_ones
from unisono.engine.diagnosis.close_reason import close_reason, uncaught_reason
from unisono.engine.diagnosis.report import CallDescription


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


# ---- who called something else than most, in words ----


SUM = CallDescription("all_reduce", ("float64[4]", "SUM", "algorithm=ring"))
MAX = CallDescription("all_reduce", ("float64[4]", "MAX", "algorithm=ring"))
OTHER = CallDescription("broadcast", ("float64[4]", "root=0", "algorithm=direct"))


@each(
    ("calls", "said"),
    [
        ([SUM, SUM, OTHER], "rank 2 called broadcast, the others all_reduce"),
        ([MAX, SUM, SUM], "rank 0 called all_reduce with MAX, the others with SUM"),
        ([SUM, MAX, SUM, MAX, SUM], "ranks 1, 3 called all_reduce with MAX, the others with SUM"),
        ([SUM, None, OTHER, SUM], "rank 2 called broadcast, most others all_reduce"),
        ([SUM, OTHER], ""),  # who is to say which of two is odd
        ([SUM, SUM, MAX, OTHER], ""),  # as many as the rest
        ([SUM, SUM, SUM, MAX, OTHER], ""),  # two odd ones, each in its own way: the table says it better
        ([SUM, SUM], ""),
        ([None, None], ""),
    ],
)
def test_minority_calls_are_named(calls: list[CallDescription | None], said: str) -> None:
    def name(*ranks: int) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

    assert odd_ones(calls, name) == said
