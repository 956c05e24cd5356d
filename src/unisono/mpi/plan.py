"""`Plan`: how a collective call runs, and the three forms that every collective has.

    Bcast(...)         runs it to its end
    Ibcast(...)        a Request
    Bcast_init(...)    a Prequest

A collective is one method `_bcast(lane, ...)` that checks its arguments and returns a Plan.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from unisono.mpi.progress import Operation, Pause, Schedule, ScheduleRun, complete, move_all, moving
from unisono.mpi.request import Prequest, Request


class Plan:
    """A schedule; or the call of the engine that does the same, and what is to do after it.

    engine(group, async_op): the call. Whether there is one depends only on what all ranks know.
    """

    __slots__ = ("after", "engine", "schedule")

    def __init__(
        self, schedule: Schedule, engine: Any = None, after: Callable[[], Any] | None = None
    ) -> None:
        self.schedule, self.engine, self.after = schedule, engine, after

    def run(self, state: Any) -> Any:
        """Run it to its end; returns its value."""
        if self.engine is None:
            return complete(self.schedule)
        state.calls += 1
        group = state.engine_group()
        if group is None:
            return complete(self.schedule)
        if not moving():
            self.engine(group, False)
        else:
            finished(self.engine(group, True))
        return None if self.after is None else self.after()

    def start(self, state: Any) -> Operation:
        """Begin it."""
        group = state.group if self.engine is not None else None
        if group is None:
            return ScheduleRun(self.schedule)
        return _EngineCall(self.engine(group, True), self.after)


class _EngineCall(Operation):
    """An asynchronous collective of the engine."""

    def __init__(self, work: Any, after: Callable[[], Any] | None) -> None:
        self._work, self._after = work, after

    def poll(self) -> bool:
        if not self.done and self._work.done():
            self._conclude()
        return self.done

    def block(self) -> None:
        pause = Pause()
        while moving() and not self._work.done():
            move_all()
            pause()
        if not self.done:
            self._conclude()

    def _conclude(self) -> None:
        self.done = True
        self._work.wait()
        if self._after is not None:
            self._after()


def finished(work: Any) -> None:
    """Wait for a collective of the engine, while schedules move."""
    _EngineCall(work, None).block()


def forms(cls: Any, names: dict[str, str]) -> None:
    """Give a class the three forms of collectives. names: of the method, and of the blocking form."""
    for method, name in names.items():
        body = getattr(cls, method)
        this, _, *parameters = inspect.signature(body).parameters.values()
        for form, made, more in (
            (name, _blocking(method), []),
            (f"I{name[0].lower()}{name[1:]}", _immediate(method), []),
            (f"{name}_init", _persistent(method), [_INFO]),
        ):
            made.__name__, made.__qualname__, made.__doc__ = form, f"{cls.__name__}.{form}", body.__doc__
            made.__module__ = cls.__module__
            made.__signature__ = inspect.Signature([this, *parameters, *more], __validate_parameters__=False)
            setattr(cls, form, made)


_INFO = inspect.Parameter("info", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)


def _planned(comm: Any, state: Any, method: str, args: Any, options: Any) -> Plan:
    """The plan of a call. One whose arguments are refused does not count as a collective."""
    body = getattr(state.kind, method)
    plan: Plan = state.planned(lambda lane: body(comm, lane, *args, **options))
    return plan


def _blocking(method: str) -> Any:
    def call(self: Any, *args: Any, **options: Any) -> None:
        state = self._alive()
        _planned(self, state, method, args, options).run(state)

    return call


def _immediate(method: str) -> Any:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        state = self._alive()
        return Request._for(_planned(self, state, method, args, options).start(state))

    return call


def _persistent(method: str) -> Any:
    def call(self: Any, *args: Any, info: Any = None, **options: Any) -> Any:  # noqa: ARG001
        state = self._alive()
        body = functools.partial(getattr(state.kind, method), self)
        expected = len(inspect.signature(body).parameters) - 1
        args = args[:expected]  # an info may follow

        def plan(lane: Any) -> tuple[Any, Plan]:
            return lane, body(lane, *args, **options)  # checks the arguments

        lane, _ = state.planned(plan)

        def start() -> Operation:
            return ScheduleRun(plan(lane)[1].schedule)

        return Prequest._starting(start)

    return call
