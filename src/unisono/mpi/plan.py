"""`Plan`: how a collective call runs, and the three forms that every collective has.

    Bcast(...)         runs it to its end
    Ibcast(...)        a Request
    Bcast_init(...)    a Prequest

A collective is one method `_bcast(lane, ...)` that checks its arguments and returns a Plan.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from unisono.mpi.message_spec import SIZES, equal
from unisono.mpi.progress import Operation, Pause, Schedule, ScheduleRun, complete, move_all, moving
from unisono.mpi.request import Prequest, Request


class Plan:
    """A schedule; or the call of the engine that does the same into `room`, which then fills `target`.

    engine(group, async_op): the call. Whether there is one depends only on what all ranks know.
    """

    __slots__ = ("engine", "room", "schedule", "target")

    def __init__(self, schedule: Schedule, engine: Any = None, target: Any = None, room: Any = None) -> None:
        self.schedule, self.engine, self.room = schedule, engine, room
        self.target = None if target is None or target.dense else target

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
        if self.target is not None:
            self.target.fill(self.room)
        return None

    def start(self, state: Any) -> Operation:
        """Begin it."""
        group = state.group if self.engine is not None else None
        if group is None:
            return ScheduleRun(self.schedule)
        return _EngineCall(self.engine(group, True), self)


class _EngineCall(Operation):
    """An asynchronous collective of the engine."""

    def __init__(self, work: Any, plan: Plan | None = None) -> None:
        self._work, self._plan = work, plan

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
        if self._plan is not None and self._plan.target is not None:
            self._plan.target.fill(self._plan.room)


def finished(work: Any) -> None:
    """Wait for a collective of the engine, while schedules move."""
    _EngineCall(work).block()


def forms(cls: Any, method: str, **names: dict[str, Any]) -> None:
    """Give a class the three forms of collectives. names: of the blocking form: what its method is given."""
    body = getattr(cls, method)
    this, _, *others = inspect.signature(body).parameters.values()
    parameters = [this, *(one for one in others if one.kind is not one.KEYWORD_ONLY)]
    for name, given in names.items():
        sizes = SIZES[given.get("parts", equal)]
        for form, made, more in (
            (name, _blocking(method, given), []),
            (f"I{name[0].lower()}{name[1:]}", _immediate(method, given), []),
            (f"{name}_init", _persistent(method, given, len(parameters) - 1), [_INFO]),
        ):
            made.__name__, made.__qualname__ = form, f"{cls.__name__}.{form}"
            made.__doc__, made.__module__ = body.__doc__.format(sizes=sizes), cls.__module__
            made.__signature__ = inspect.Signature([*parameters, *more], __validate_parameters__=False)
            setattr(cls, form, made)


_INFO = inspect.Parameter("info", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)


def _planned(comm: Any, state: Any, method: str, args: Any, options: Any) -> Plan:
    """The plan of a call. One whose arguments are refused does not count as a collective."""
    body = getattr(state.kind, method)
    plan: Plan = state.planned(lambda lane: body(comm, lane, *args, **options))
    return plan


def _blocking(method: str, given: dict[str, Any]) -> Any:
    def call(self: Any, *args: Any, **options: Any) -> None:
        state = self._alive()
        options |= given
        _planned(self, state, method, args, options).run(state)

    return call


def _immediate(method: str, given: dict[str, Any]) -> Any:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        state = self._alive()
        options |= given
        return Request._for(_planned(self, state, method, args, options).start(state))

    return call


def _persistent(method: str, given: dict[str, Any], most: int) -> Any:
    """most: arguments; an info may follow."""

    def call(self: Any, *args: Any, info: Any = None, **options: Any) -> Any:
        state = self._alive()
        body = functools.partial(getattr(state.kind, method), self)

        def plan(lane: Any) -> tuple[Any, Plan]:
            return lane, body(lane, *args[:most], **given, **options)  # checks the arguments

        lane, _ = state.planned(plan)
        return Prequest._starting(lambda: ScheduleRun(plan(lane)[1].schedule))

    return call
