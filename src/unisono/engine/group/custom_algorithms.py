"""The caller's own algorithms in one group: each is proved once."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

from unisono.errors import PlanError
from unisono.plans import StepFunction

__all__ = ["CompiledAlgorithm", "CustomAlgorithms"]


class CompiledAlgorithm(NamedTuple):
    """A proved algorithm. code: of this rank. For the others see `plans.custom.CustomPlan`."""

    name: str
    code: list[int]
    number: int
    canonical: bool


class CustomAlgorithms:
    """The caller's algorithms in a group of `size` ranks on these hosts."""

    def __init__(self, rank: int, size: int, hosts: tuple[int, ...]) -> None:
        self._rank = rank
        self._size = size
        self._hosts = hosts
        # Weak keys: a function may refer to the group, whose finalizer refers to this object.
        self._known: WeakKeyDictionary[StepFunction, dict[tuple[str, int], CompiledAlgorithm]] = (
            WeakKeyDictionary()
        )

    def plan(self, collective: str, function: StepFunction, root: int) -> CompiledAlgorithm:
        """The plan of a function.

        Raises:
            PlanError: it is wrong; the message shows the rank and the step.
            TypeError: it returns no steps, or cannot be a weak reference.
        """
        try:
            plans = self._known.setdefault(function, {})
        except TypeError as error:
            raise TypeError(f"{collective}: algorithm {function!r} cannot be remembered: {error}") from None
        found = plans.get((collective, root))
        if found is None:
            found = plans[collective, root] = self._prove(collective, function, root)
        return found

    def _prove(self, collective: str, function: StepFunction, root: int) -> CompiledAlgorithm:
        from unisono.plans.custom import prepare  # most programs write none

        try:
            plan = prepare(collective, function, self._size, root, self._hosts)
        except PlanError as error:
            raise PlanError(
                f"{collective}: the algorithm is refused before a byte has moved: {error}"
            ) from None
        return CompiledAlgorithm(plan.name, plan.code[self._rank], plan.number, plan.canonical)
