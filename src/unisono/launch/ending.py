"""How what has to end is ended: one signal after the other, and when to give up on who dies of none.

It sends nothing itself: the supervisor asks it what is due.
"""

from __future__ import annotations

import collections
import signal
import time

__all__ = [
    "AFTER_FAILURE_S",
    "AFTER_INTERRUPT_S",
    "AFTER_SIGNAL_S",
    "STRAYS_IN_A_HURRY_S",
    "Escalation",
    "ends_of_strays",
    "undying",
]

AFTER_FAILURE_S = 3.0  # from SIGTERM to SIGKILL
AFTER_SIGNAL_S = 1.8  # what ranks get to end by themselves after Ctrl-C or SIGTERM
AFTER_INTERRUPT_S = 0.3  # from SIGTERM to SIGKILL after Ctrl-C; the job has to end within 3 s
STRAYS_S = 0.5  # what ranks leave behind may end by itself, as multiprocessing's resource tracker does:
STRAYS_IN_A_HURRY_S = 0.3  # it removes their shared memory first, so it must not be killed at once
KILL_AGAIN = [(0.02, signal.SIGKILL)] * 250  # killing a process hands us its children
KILL_ON_S = 0.5  # and so may the death of one that took longer
TELL_S = 10.0  # who has not died of SIGKILL by then is named,
LEAVE_S = 60.0  # and by then left: it waits in the kernel, or is another user's


class Escalation:
    """Signals that become due one after the other until everybody is gone; the last repeats.

    Each delay begins when the signal before it was taken, so that a process that was itself stopped
    for a while leaves the others the time they are to have.

    Example: Escalation((0, SIGINT), (2, SIGTERM)): SIGINT now, SIGTERM 2 s after it, then every 0.5 s.
    """

    def __init__(self, *steps: tuple[float, signal.Signals]) -> None:
        self._steps = collections.deque(steps)
        self._killed = False
        self._told = False
        self._killing_s = 0.0  # delays that have passed since the first SIGKILL
        self.due = time.monotonic() + steps[0][0] if steps else None  # when the next is (monotonic seconds)

    @property
    def killing(self) -> bool:
        """SIGKILL has been taken; there is nothing stronger to go on to."""
        return self._killed

    def pop(self, now: float) -> signal.Signals | None:
        """Take the signal that is due, if one is."""
        if self.due is None or now < self.due:
            return None
        delay_s, number = self._steps.popleft()
        self._killing_s += delay_s if self._killed else 0.0
        self._killed |= number == signal.SIGKILL
        if not self._steps:
            self._steps.append((KILL_ON_S, number))
        self.due = now + self._steps[0][0]
        return number

    @property
    def in_vain(self) -> bool:
        """Who is left by now is to be left alone."""
        return self._killing_s >= LEAVE_S

    def to_be_told(self) -> bool:
        """Whether SIGKILL has had no effect for so long that it should be said. True once."""
        if self._told or self._killing_s < TELL_S:
            return False
        self._told = True
        return True


def ends_of_strays(killed_after_s: float | None = None) -> Escalation:
    """What the processes get that the ranks have left behind; asked first unless they are to be killed."""
    if killed_after_s is not None:
        return Escalation((killed_after_s, signal.SIGKILL), *KILL_AGAIN)
    return Escalation((STRAYS_S, signal.SIGTERM), (STRAYS_S, signal.SIGKILL), *KILL_AGAIN)


def undying(pid: int) -> str:
    """Name a process and its state, "pid 4121 (python3, state D)"; D is a wait in the kernel."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            head, _, rest = stat.read().decode(errors="replace").rpartition(")")
    except OSError:
        return f"pid {pid}"
    return f"pid {pid} ({head.partition('(')[2]}, state {rest.split()[0]})"
