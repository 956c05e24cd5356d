"""What is under way: transfers by the engine, and schedules of transfers.

An `Operation` ends by `poll` or `block`. A schedule is a generator that yields lists of operations; it goes
on when all of a list have ended. Schedules move when their rank polls or waits for anything, as in other
libraries of MPI.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from unisono.mpi import constants
from unisono.mpi.errors import Exception
from unisono.mpi.handle import State

Schedule = Generator[list["Operation"], None, Any]
under_way: list[ScheduleRun] = []
"""Schedules that have not ended."""
_SPINS = 200
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.00005, 0.0005


class Operation(State):
    """Something under way: the state of a request. `done`: it has ended; `value`: for lowercase calls.

    source, tag, nbytes: of the message, for a status.
    """

    done = False
    cancelled = False
    value: Any = None
    source, tag, nbytes = constants.ANY_SOURCE, constants.ANY_TAG, 0

    def poll(self) -> bool:
        """Whether it has ended; moves it if it can."""
        return self.done

    def block(self) -> None:
        """Wait until it has ended."""
        pause = Pause()
        while not self.poll():
            move_all()
            pause()

    def cancel(self) -> None:
        """Cancel it if that is possible."""


class Ended(Operation):
    """An operation that had nothing to do."""

    done = True

    def __init__(self, source: int = constants.ANY_SOURCE, value: Any = None) -> None:
        self.source, self.value = source, value


class Every(Operation):
    """A receive and the sends beside it. An error of the receive comes when their buffers are free."""

    def __init__(self, parts: list[Operation]) -> None:
        self.parts = parts

    def poll(self) -> bool:
        if not self.done and all(part.poll() for part in reversed(self.parts)):
            first = self.parts[0]
            self.source, self.tag, self.nbytes = first.source, first.tag, first.nbytes
            self.value = first.value
            self.done = True
        return self.done

    def block(self) -> None:
        for part in reversed(self.parts):
            part.block()
        self.poll()


class Parts(Operation):
    """A message of parts under way. start: begins to send or receive the whole."""

    def __init__(self, count: int, start: Callable[[], Operation], sending: bool) -> None:
        self.count, self._start, self.sending = count, start, sending
        self._ready: set[int] = set()
        self._whole = None if sending and count else start()

    def poll(self) -> bool:
        if not self.done and self._whole is not None and self._whole.poll():
            self.source, self.tag, self.nbytes = self._whole.source, self._whole.tag, self._whole.nbytes
            self.done = True
        return self.done

    def ready(self, parts: Sequence[int]) -> None:
        """These parts may be sent."""
        for part in parts:
            if not self.sending or not 0 <= part < self.count or part in self._ready:
                raise Exception(constants.ERR_ARG, f"part {part} of {self.count}: wrong, or ready already")
            self._ready.add(part)
        if len(self._ready) == self.count and self._whole is None:
            self._whole = self._start()


class ScheduleRun(Operation):
    """A schedule under way."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._waits: list[Operation] = []
        self._turn = threading.Lock()  # of the threads that poll
        self._error: BaseException | None = None
        if not self.poll():
            under_way.append(self)

    def poll(self) -> bool:
        if self.done or not self._turn.acquire(blocking=False):
            return self.done
        try:
            return self._move()
        finally:
            self._turn.release()

    def _move(self) -> bool:
        while not self.done:
            self._waits = [one for one in self._waits if not one.poll()]
            if self._waits:
                return False
            try:
                self._waits = next(self._schedule)
            except StopIteration as end:
                self._end(end.value)
            except BaseException:
                self._end(None)
                raise
        return True

    def _end(self, value: Any) -> None:
        self.value, self.done = value, True
        if self in under_way:
            under_way.remove(self)


def begun(schedule: Schedule) -> Schedule:
    """A schedule whose first step is taken: it has accepted its arguments."""
    first: list[list[Operation]] = []
    value = None
    try:
        first.append(next(schedule))
    except StopIteration as end:
        value = end.value

    def rest() -> Schedule:
        yield from first
        return (yield from schedule) if first else value

    return rest()


def complete(schedule: Schedule) -> Any:
    """Run a schedule to its end; returns its result."""
    while True:
        try:
            waits = next(schedule)
        except StopIteration as end:
            return end.value
        pass_by(waits)


def pass_by(waits: Iterable[Operation]) -> None:
    """Wait for operations."""
    for one in waits:
        if not one.done:
            one.block()


def moving() -> bool:
    """Whether a schedule is under way, which whoever waits must move."""
    return bool(under_way)


def move_all() -> None:
    """Move all schedules under way."""
    for one in under_way:
        one.poll()


def finish_all() -> None:
    """Wait for all schedules under way."""
    while under_way:
        under_way[0].block()


class Pause:
    """Between two polls: nothing at first, then longer."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._calls > _SPINS:
            time.sleep(FIRST_PAUSE_S if self._calls < 20 * _SPINS else LONGEST_PAUSE_S)
