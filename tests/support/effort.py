"""How much a test does: a few rounds and cases in `make test`, many in `make test-long`."""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

LONG = "UNISONO_TEST_LONG" in os.environ
SWEEP = "UNISONO_TEST_SWEEP" in os.environ
SLOW = LONG or SWEEP or "UNISONO_TEST_SLOW" in os.environ
SANITIZED = "UNISONO_SANITIZED" in os.environ

HANG_S = 900.0 if LONG or SWEEP or SANITIZED else 300.0
"""How long a test waits for what comes by itself. It guards against waiting for ever, and claims nothing
about speed: what `make test` waits for takes a few seconds on a quiet machine, and a busy one is slower."""

TEST_S = HANG_S + 60
"""How long a test may take that sets no limit of its own: a wait ends before, and says what it waited for."""


def judge_time(took_s: float, limit_s: float) -> None:
    """Fail if something took too long, in `make test-long` only: `make test` also runs on busy machines."""
    assert not LONG or took_s < limit_s, f"took {took_s:.2f} s, expected less than {limit_s} s"


def times(usual: int, long: int, sanitized: int | None = None) -> int:
    """Return the number of repetitions.

    Args:
        usual: in `make test`, where a round must be worth its time.
        long: in `make test-long`.
        sanitized: under a sanitizer, which is several times slower; None: as usual.
    """
    if LONG:
        return long
    return usual if sanitized is None or not SANITIZED else sanitized


def cases(usual: Iterable[Any], long: Iterable[Any]) -> list[Any]:
    """Return the cases of a test.

    Args:
        usual: one of each kind.
        long: others of the same kinds, only in `make test-long`.
    """
    return [*usual, *(long if LONG else ())]


def crossed(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the cases of a check that has several axes, such as plans x ways to call.

    In `make test` every value of each axis is in one case at least; in the long lanes all products are.

    Example: crossed("ab", "xyz") -> ax, by, az.
    """
    if LONG or SWEEP:
        return list(itertools.product(*axes))
    most = max(map(len, axes))
    return list(zip(*(itertools.islice(itertools.cycle(axis), most) for axis in axes), strict=True))


def swept(usual: Iterable[Any], sweep: Iterable[Any]) -> list[Any]:
    """Return the cases of a check of parallel training.

    Args:
        usual: each axis and each schedule once.
        sweep: others of them, only in `make test-parallel`.
    """
    return [*usual, *(sweep if SWEEP else ())]
