"""A short round of each fuzzer; the long one with the long tests, or by command: see the program."""

from pathlib import Path

import pytest

from effort import HANG_S, times
from python_runs import ran

HERE = Path(__file__).parent
SEEDED = ("--seed", "1")


@pytest.mark.parametrize(
    ("program", "cases", "more", "says"),
    [
        ("codec_errors", times(usual=300, long=10_000), SEEDED, ""),
        ("message_order", times(usual=150, long=10_000, sanitized=30), (), " rounds"),
        ("mismatches", times(usual=250, long=10_000, sanitized=100), ("--workers", "8"), " cases"),
        ("readers", times(usual=150, long=5000, sanitized=50), SEEDED, ""),
        ("shared_memory_messages", times(usual=30, long=1000, sanitized=10), SEEDED, " programs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.timeout(HANG_S + times(usual=300, long=10_000) + 10)
def test_no_case_is_against_the_oracle(program: str, cases: int, more: tuple[str, ...], says: str) -> None:
    """Without a seed the cases are new each time, and it is printed."""
    if program == "readers":
        pytest.importorskip("google.protobuf")
    done = ran(HERE / f"{program}.py", "--cases", cases, *more, limit_s=HANG_S + cases)
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-8000:]}"
    assert not says or f"{cases}{says}" in done.stdout
