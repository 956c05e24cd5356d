"""How often a test repeats what only sometimes goes wrong: a few times each day, many in `make test-long`."""

from __future__ import annotations

import os

LONG = "UNISONO_TEST_LONG" in os.environ
SANITIZED = "UNISONO_SANITIZED" in os.environ


def times(usual: int, long: int, sanitized: int | None = None) -> int:
    """Return how often.

    Args:
        usual: in `make test`, where a round must be worth its time.
        long: in `make test-long`.
        sanitized: under a sanitizer, which takes several times as long; None: as usual.
    """
    if LONG:
        return long
    return usual if sanitized is None or not SANITIZED else sanitized
