"""How often a test repeats a race: a few times in `make test`, many times in `make test-long`."""

from __future__ import annotations

import os

LONG = "UNISONO_TEST_LONG" in os.environ
SANITIZED = "UNISONO_SANITIZED" in os.environ


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
