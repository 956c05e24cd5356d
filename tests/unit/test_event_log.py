"""The log of a process whose threads make groups and set its level, and whose signals do."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from unisono.engine.environment.event_log import EventLog


def test_a_level_is_set_while_other_threads_make_groups() -> None:
    # "Set changed size during iteration" came out of init_process_group.
    log, before, ended = EventLog(), sys.getswitchinterval(), threading.Event()

    class Made(SimpleNamespace):
        __hash__ = object.__hash__

    def add() -> None:
        kept = [Made(closed=True) for _ in range(20_000)]
        for group in kept:
            log.add_group(group)
        ended.set()

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(1) as pool:
            adding = pool.submit(add)
            while not ended.is_set():
                log.set("off")
            adding.result()
    finally:
        sys.setswitchinterval(before)


def test_a_signal_may_set_the_level_while_it_is_set() -> None:
    log = EventLog()
    log._open = lambda _: log.set("off")  # type: ignore[method-assign]  # where a signal may come
    thread = threading.Thread(target=log.set, args=("info",), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
