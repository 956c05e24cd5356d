"""The first reading in which the ranks of a run, or two runs, differ by more than rounding explains.

A number of a step is compared relative to its size: by eps^(3/4) of its type, times the root of the number of
steps, since differences of rounding grow. 1e-5 for float32, 0.03 for bfloat16, at the first step. The type is
the coarsest one that a module has returned in that step. Less than 8 eps of the largest number of its kind so
far is rounding. So is the gradient of a bias before a softmax or a normalization, and what Adam makes of it:
such parameters are not compared.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from .records import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .records import Reading, TrialRun

NOISE = 8
"""Of the largest number of a kind, so many eps are rounding in each other one."""

EPS = {"float64": 2.2e-16, "float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.8e-3}


class Parting(NamedTuple):
    """Where numbers part.

    Attributes:
        step, kind, name: of the reading.
        type: of its values, or the coarsest in the step.
        one, many: the values: of the run on fewer ranks, and of the other; or of rank 0 and another rank.
        rank: the other rank, where ranks of one run part; -1: two runs do.
    """

    step: int
    kind: str
    name: str
    type: str
    one: Any
    many: Any
    rank: int = -1

    @property
    def ratio(self) -> float:
        """How many times the first value the second one is; 0: that says nothing."""
        if self.kind in ("rows", "steps"):
            return 0.0
        a, b = (numbers(value)[-1] for value in (self.one, self.many))
        return b / a if a else 0.0


def allowed(type_: str, step: int) -> float:
    """The relative difference that rounding explains at a step."""
    return float(_eps(type_) ** 0.75 * (1 + step) ** 0.5)


def differ(kind: str, a: Any, b: Any, type_: str, step: int, noise: float = 0.0) -> bool:
    """Whether two values of a kind differ by more than rounding. noise: what it is in the largest of them."""
    one, many = numbers(a, kind), numbers(b, kind)
    pairs = [*zip(one, many, strict=False)]
    if not all(map(math.isfinite, (*one, *many))):  # no difference of them is a number
        return len(one) != len(many) or any(repr(x) != repr(y) for x, y in pairs)
    most = allowed(type_, step) * max(_size(kind, a), _size(kind, b)) + noise
    return len(one) != len(many) or any(abs(x - y) > most for x, y in pairs)


def numbers(value: Any, kind: str = "") -> list[float]:
    """What is compared of a value."""
    values: list[float] = value if isinstance(value, list) else [value]
    return values if kind == "rows" else values[:2]


def _size(kind: str, value: Any) -> float:
    """The magnitude of a value: a norm, or a sum of magnitudes."""
    if kind == "rows":
        return max(map(abs, value), default=0.0)
    return float(abs(numbers(value)[kind == "output"]))


def ranks_part(run: TrialRun) -> Iterator[Parting]:
    """Where ranks of one run have different numbers that have to be equal on all, in the order of steps."""
    for step in range(run.steps):
        for kind in ("start", "clip", "gradient", "rate", "parameter", "buffer"):
            first, *others = run.of(step, kind)
            for rank, other in enumerate(others, 1):
                for a, b in zip(first, other, strict=False):
                    exact = kind in ("start", "parameter") and repr(a.value) != repr(b.value)  # nan is nan
                    if exact or differ(kind, a.value, b.value, a.type, step):
                        yield Parting(step, kind, a.name, a.type, a.value, b.value, rank)
                        break


def runs_part(one: TrialRun, many: TrialRun) -> Iterator[Parting]:
    """Where two runs part, in the order of steps and of what a step makes."""
    largest: dict[tuple[str, str], float] = {}
    rounding: set[tuple[str, str]] = set()  # parameters whose gradient is such, and what their modules return
    for step in range(min(one.steps, many.steps)):
        outputs = [reading for run in (one, many) for rank in run.of(step, "output") for reading in rank]
        coarsest = max((reading.type for reading in outputs), key=_eps, default="float32")
        for kind in KINDS[1:]:
            a, b = _joined(one.of(step, kind), kind), _joined(many.of(step, kind), kind)
            both = [(name, *a[name], b[name][0]) for name in a if name in b and (kind, name) not in rounding]
            for name, value, _, other in both:
                like = (kind, name if kind in ("note", "rate") else "")
                sizes = filter(math.isfinite, (_size(kind, value), _size(kind, other)))
                largest[like] = max((largest.get(like, 0.0), *sizes))
            for name, value, type_, other in both:
                coarse = type_ if kind in ("start", "rows") else max(type_, coarsest, key=_eps)
                noise = NOISE * _eps(coarse) * largest[kind, name if kind in ("note", "rate") else ""]
                if kind == "gradient" and 0 < _size(kind, value) <= noise:
                    rounding |= {("parameter", name), ("output", name.rpartition(".")[0])}
                if differ(kind, value, other, coarse, step, noise):
                    yield Parting(step, kind, name, coarse, value, other)


def _eps(type_: str) -> float:
    return EPS.get(type_, EPS["float32"])


def _joined(ranks: list[list[Reading]], kind: str) -> dict[str, tuple[Any, str]]:
    """The value of a step by name: (of all ranks together, its type).

    Rows: those of all ranks, sorted. Outputs: sums over ranks. Losses and notes: means. Others: of rank 0.
    """
    gathered: dict[str, list[Reading]] = {}
    for readings in ranks if kind in _JOINS else ranks[:1]:
        for reading in readings:
            gathered.setdefault(reading.name, []).append(reading)
    join = _JOINS.get(kind, _last)
    return {name: (join([one.value for one in found]), found[0].type) for name, found in gathered.items()}


def _last(values: list[Any]) -> Any:
    return values[-1]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


_JOINS: dict[str, Callable[[list[Any]], Any]] = {
    "rows": lambda values: sorted(row for rows in values for row in rows),
    "output": lambda values: [sum(v[0] for v in values), sum(v[1] for v in values), values[0][2]],
    "loss": _mean,
    "note": _mean,
}
