"""The caller's own algorithms in one group, functions and files: each is proved once."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

from unisono.errors import PlanError
from unisono.plans import StepFunction

__all__ = ["CustomAlgorithms", "Known"]


class Known(NamedTuple):
    """A proved algorithm. code: of this rank. For the others see `plans.custom.CustomPlan`."""

    name: str
    code: list[int]
    number: int
    canonical: bool
    parts: int = 1


class CustomAlgorithms:
    """The caller's algorithms in a group of `size` ranks on these hosts."""

    def __init__(self, rank: int, size: int, hosts: tuple[int, ...]) -> None:
        self._rank = rank
        self._size = size
        self._hosts = hosts
        # Weak keys: a function may refer to the group, whose finalizer refers to this object.
        self._known: WeakKeyDictionary[StepFunction, dict[tuple[str, int], Known]] = WeakKeyDictionary()
        self._files: dict[tuple[str, str, int], Known] = {}

    def plan(self, collective: str, function: StepFunction | str, root: int) -> Known:
        """The plan of a function, or in a file, which is read once.

        Raises:
            PlanError: it is wrong; the message shows the rank and the step.
            ValueError: the file is damaged; the message shows the line.  OSError: it cannot be read.
            TypeError: the function returns no steps, or cannot be a weak reference.
        """
        if isinstance(function, str):
            key = function, collective, root
            if key not in self._files:
                self._files[key] = self._prove(collective, function, root)
            return self._files[key]
        try:
            plans = self._known.setdefault(function, {})
        except TypeError as error:
            raise TypeError(f"{collective}: algorithm {function!r} cannot be remembered: {error}") from None
        found = plans.get((collective, root))
        if found is None:
            found = plans[collective, root] = self._prove(collective, function, root)
        return found

    def _prove(self, collective: str, function: StepFunction | str, root: int) -> Known:
        from unisono.plans.custom import prepare, prepare_plan  # most programs write none
        from unisono.schedules import load

        try:
            if isinstance(function, str):
                plan = prepare_plan(load(function, collective, self._size, root, self._hosts))
            else:
                plan = prepare(collective, function, self._size, root, self._hosts)
        except PlanError as error:
            raise PlanError(
                f"{collective}: the algorithm is refused before a byte has moved: {error}"
            ) from None
        return Known(plan.name, plan.code[self._rank], plan.number, plan.canonical, plan.parts)
