"""A daemon thread runs Python code that a native function has called, while the process ends.

Run by test_process_ends.py.
"""

import threading

from unisono import _native

begun = threading.Event()


def spin() -> None:
    begun.set()
    while True:
        pass


threading.Thread(target=_native.outcome, args=(spin, 0), daemon=True).start()
begun.wait()
