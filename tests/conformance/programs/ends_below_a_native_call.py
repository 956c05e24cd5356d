"""A daemon thread runs Python code that a native function has called, while the process ends.

Run by test_process_ends.py. argv[1]: which function, "outcome", "call" or "iterator".
"""

import sys
import threading
from collections.abc import Iterator
from typing import Any

from unisono import _native

begun = threading.Event()


def spin(*_: Any) -> None:
    begun.set()
    while True:
        pass


def spins() -> Iterator[Any]:
    yield spin()


target, arguments = {
    "outcome": (_native.outcome, (spin, 0)),
    "call": (_native.call_each, (iter([spin]),)),
    "iterator": (_native.call_each, (spins(),)),
}[sys.argv[1]]
threading.Thread(target=target, args=arguments, daemon=True).start()
begun.wait()
