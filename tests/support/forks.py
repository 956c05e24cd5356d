"""Waits for child processes of this process."""

from __future__ import annotations

import os
import signal
import time

__all__ = ["wait"]


def wait(pids: list[int], limit_s: float, grace_s: float | None = None) -> list[int]:
    """Exit codes, negative for a signal.

    Remaining children are killed after `limit_s`, or `grace_s` after the first failure, if given.
    """
    deadline = time.monotonic() + limit_s
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] and grace_s is not None:
                    deadline = min(deadline, time.monotonic() + grace_s)
        if time.monotonic() > deadline:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]
