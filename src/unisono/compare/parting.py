"""The first reading in which the ranks of a run, or two runs, differ by more than rounding explains.

A number of a step is compared relative to its size: by eps^(3/4) of its type, times the root of the number of
steps, since differences of rounding grow. 1e-5 for float32, 0.03 for bfloat16, at the first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .records import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .records import Reading, TrialRun

EPS = {"float64": 2.2e-16, "float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.8e-3}


class Parting(NamedTuple):
    """Where numbers part.

    Attributes:
        step, kind, name: of the reading.
        type: of its values, or of the module.
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
        a, b = (v[-1] if isinstance(v, list) else v for v in (self.one, self.many))
        return b / a if isinstance(a, float) and isinstance(b, float) and a else 0.0


def allowed(type_: str, step: int) -> float:
    """The relative difference that rounding explains at a step."""
    return float(EPS.get(type_, EPS["float32"]) ** 0.75 * (1 + step) ** 0.5)


def differ(kind: str, a: Any, b: Any, type_: str, step: int) -> bool:
    """Whether two values of a kind differ by more than rounding."""
    if kind in ("rows", "seed"):
        return bool(a != b)
    limit = allowed(type_, step)
    if kind == "output":
        return any(abs(x - y) > limit * max(a[1], b[1]) for x, y in zip(a, b, strict=True))
    if isinstance(a, list):
        return any(abs(x - y) > limit * max(a[0], b[0]) for x, y in zip(a[:2], b[:2], strict=True))
    return bool(abs(a - b) > limit * max(abs(a), abs(b)))


def ranks_part(run: TrialRun) -> Iterator[Parting]:
    """Where ranks of one run have different numbers that have to be equal on all, in the order of steps."""
    for step in range(run.steps):
        for kind in ("start", "clip", "gradient", "rate", "parameter", "buffer"):
            first, *others = run.of(step, kind)
            for rank, other in enumerate(others, 1):
                for a, b in zip(first, other, strict=False):
                    exact = kind in ("start", "parameter") and a.value != b.value
                    if exact or differ(kind, a.value, b.value, a.type, step):
                        yield Parting(step, kind, a.name, a.type, a.value, b.value, rank)
                        break


def runs_part(one: TrialRun, many: TrialRun) -> Iterator[Parting]:
    """Where two runs part, in the order of steps and of what a step makes."""
    for step in range(min(one.steps, many.steps)):
        for kind in KINDS:
            if kind == "seed":
                continue
            a, b = _joined(one.of(step, kind), kind), _joined(many.of(step, kind), kind)
            for name in a:
                if name in b and differ(kind, a[name][0], b[name][0], _type(a[name][1], kind), step):
                    yield Parting(step, kind, name, a[name][1], a[name][0], b[name][0])


def _type(type_: str, kind: str) -> str:
    return "float32" if kind == "output" else type_


def _joined(ranks: list[list[Reading]], kind: str) -> dict[str, tuple[Any, str]]:
    """The value of a step by name: (of all ranks together, its type).

    Rows: those of all ranks, sorted. Outputs: sums over ranks. Losses and notes: means. Others: of rank 0.
    """
    found: dict[str, tuple[Any, str]] = {}
    if kind == "rows":
        rows = sorted(row for readings in ranks for reading in readings for row in reading.value)
        return {"": (rows, "")} if rows else {}
    if kind not in ("output", "loss", "note"):
        return {reading.name: (reading.value, reading.type) for reading in ranks[0]}
    gathered: dict[str, list[Reading]] = {}
    for readings in ranks:
        for reading in readings:
            gathered.setdefault(reading.name, []).append(reading)
    for name, of_name in gathered.items():
        values = [reading.value for reading in of_name]
        if kind == "output":
            found[name] = ([sum(v[0] for v in values), sum(v[1] for v in values)], of_name[0].type)
        else:
            found[name] = (sum(values) / len(values), of_name[0].type)
    return found
