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

from unisono.engine.operations.kinds import kind_of
from unisono.engine.operations.reduction import ReduceOp
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

    def run(self, state: Any, kind: str = "", root: int = 0) -> Any:
        """Run it to its end; returns its value. kind, root: by which ranks compare what goes by messages."""
        if self.engine is None:
            return complete(compared(self.schedule, state, kind, root))
        group = state.engine_group()
        if group is None:
            return complete(self.schedule)
        if not moving():
            self.engine(group, False)
        else:
            _EngineCall(self.engine(group, True), None).block()
        return None if self.after is None else self.after()

    def start(self, state: Any) -> Operation:
        """Begin it."""
        group = state.ready_group() if self.engine is not None else None
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


def compared(schedule: Schedule, state: Any, kind: str, root: int = 0, op: Any = ReduceOp.SUM) -> Schedule:
    """A schedule whose ranks compare their calls: a call of the engine moves three bytes of each.

    It follows the checks of arguments, and what the schedule sends first.

    Raises:
        Mismatch: the ranks have called different things.
    """
    group = state.engine_group() if kind else None
    if group is None:
        return (yield from schedule)
    waits = next(schedule)
    one, every = bytearray(3), [bytearray(3) for _ in range(group.size)]
    rooted = every if group.rank == root else None
    out, sent = {
        "gather": (rooted, one), "scatter": (one, rooted), "all_gather_v": (every, one),
        "all_to_all": (every, [bytes(one)] * group.size), "reduce_scatter": (one, every),
    }.get(kind_of(kind).layout, (one, None))  # fmt: skip
    work = group._call(kind, out, sent, op, root, None, False, moving(), None)
    yield waits if work is None else [*waits, _EngineCall(work, None)]
    return (yield from schedule)


KINDS = {
    "_bcast": "broadcast", "_gather": "gather", "_gatherv": "gather", "_scatter": "scatter",
    "_scatterv": "scatter", "_allgather": "all_gather_v", "_allgatherv": "all_gather_v",
    "_alltoall": "all_to_all", "_alltoallv": "all_to_all", "_alltoallw": "all_to_all",
    "_reduce": "reduce", "_allreduce": "all_reduce", "_reduce_scatter_block": "reduce_scatter",
    "_reduce_scatter": "reduce_scatter", "_scan": "scan", "_exscan": "exclusive_scan",
}  # fmt: skip
"""The engine's name of each collective."""


def forms(cls: Any, names: dict[str, str]) -> None:
    """Give a class the three forms of collectives. names: of the method, and of the blocking form."""
    for method, name in names.items():
        body = getattr(cls, method)
        this, _, *parameters = inspect.signature(body).parameters.values()
        for form, made, more in (
            (name, _blocking(method, list(inspect.signature(body).parameters)), []),
            (f"I{name[0].lower()}{name[1:]}", _immediate(method), []),
            (f"{name}_init", _persistent(method), [_INFO]),
        ):
            made.__name__, made.__qualname__, made.__doc__ = form, f"{cls.__name__}.{form}", body.__doc__
            made.__module__ = cls.__module__
            made.__signature__ = inspect.Signature([this, *parameters, *more], __validate_parameters__=False)
            setattr(cls, form, made)


_INFO = inspect.Parameter("info", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)


def _blocking(method: str, names: list[str]) -> Any:
    kind, place = KINDS.get(method, ""), names.index("root") if "root" in names else len(names) + 99

    def call(self: Any, *args: Any, **options: Any) -> None:
        state = self._alive()
        plan = getattr(state.kind, method)(self, state.lane(), *args, **options)
        plan.run(state, kind, args[place - 2] if place < len(args) + 2 else options.get("root", 0))

    return call


def _immediate(method: str) -> Any:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        state = self._alive()
        return Request._for(getattr(state.kind, method)(self, state.lane(), *args, **options).start(state))

    return call


def _persistent(method: str) -> Any:
    def call(self: Any, *args: Any, info: Any = None, **options: Any) -> Any:  # noqa: ARG001
        state = self._alive()
        body, lane = functools.partial(getattr(state.kind, method), self), state.lane()
        expected = len(inspect.signature(body).parameters) - 1
        args = args[:expected]  # an info may follow
        body(lane, *args, **options)  # checks the arguments now

        def start() -> Operation:
            return ScheduleRun(body(lane, *args, **options).schedule)

        return Prequest._starting(start)

    return call
