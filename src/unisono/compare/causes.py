"""What a difference means: one table of known faults of programs on several ranks, the surest first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from .parting import Parting, allowed, differ, numbers, ranks_part, runs_part
from .records import KINDS, TrialRun

SCALED = 16.0
"""A norm that is so many times another one was taken of scaled gradients."""


class Evidence(NamedTuple):
    """Two runs, on fewer and on more ranks, and where they part."""

    one: TrialRun
    many: TrialRun

    @property
    def factor(self) -> float:
        """How many times as many ranks; 1: two libraries are compared."""
        return self.many.size / self.one.size

    def is_times(self, ratio: float) -> bool:
        """Whether a ratio is that of the ranks."""
        return self.factor != 1 and abs(ratio / self.factor - 1) < 0.01

    def rows(self, step: int) -> list[list[float]]:
        """The rows of each rank of `many` in a step."""
        return [[row for reading in rank for row in reading.value] for rank in self.many.of(step, "rows")]


def finding(one: TrialRun, many: TrialRun) -> tuple[Parting, str] | None:
    """Where two runs part, and why, "" if no known fault explains it; None: they are equal to rounding."""
    seen = Evidence(one, many)
    found = {"ranks": next(ranks_part(many), None), "runs": next(runs_part(one, many), None)}
    if not any(found.values()) and one.steps != many.steps:
        found["runs"] = Parting(min(one.steps, many.steps), "steps", "", "", one.steps, many.steps)
    first = min((at.step for at in found.values() if at is not None), default=0)
    places = {where: at for where, at in found.items() if at is not None and at.step == first}
    for where, kinds, why in CAUSES:
        at = places.get(where)
        if at is not None and at.kind in kinds:
            text = why.format(at=at, one=at.one, many=at.many) if isinstance(why, str) else why(seen, at)
            if text:
                return at, text
    return next(((at, "") for at in places.values()), None)


def _no_number(seen: Evidence, at: Parting) -> str:
    whose = (seen.one.name, seen.many.name) if at.rank < 0 else ("rank 0", f"rank {at.rank}")
    which = [
        name
        for name, value in zip(whose, (at.one, at.many), strict=True)
        if not all(map(math.isfinite, numbers(value, at.kind)))
    ]
    return f"on {' and '.join(which)} it is no finite number" if which else ""


def _rows(seen: Evidence, at: Parting) -> str:
    one, many, per_rank = Counter(_named(at.one)), Counter(_named(at.many)), seen.rows(at.step)
    missing, extra = one - many, many - one
    sizes = f"a step has {many.total()} rows on {seen.many.size} ranks and {one.total()} on {seen.one.size}"
    known = {row for rank in _all_rows(seen.one) for row in _named(rank)}
    holders = Counter(row for rows in per_rank for row in set(rows))
    several = sum(count > 1 for count in holders.values())
    table = (
        (len(per_rank) > 1 and all(sorted(rows) == sorted(per_rank[0]) for rows in per_rank),
         "every rank trains on the same rows. Give the DataLoader a DistributedSampler"),
        (seen.is_times(many.total() / max(one.total(), 1)),
         f"{sizes}: the batch of a rank has to be that of one divided by the ranks"),
        (seen.is_times(one.total() / max(many.total(), 1)),
         f"{sizes}: they are divided twice, as by two samplers, or by a sampler and the size of a batch"),
        (_repeats(seen.many) and not _repeats(seen.one),
         "each epoch has its rows in the same order: call sampler.set_epoch(epoch) before each one"),
        (extra and not missing,
         f"{extra.total()} rows of a step are there twice: DistributedSampler fills up the last batch"),
        (missing and not extra,
         f"{missing.total()} rows of a step are left out: drop_last, or ranks with fewer rows"),
        (several > 0,
         f"{several} rows of a step are on several ranks: draw them by one seed on all ranks, then divide"),
        (any(row not in known for rank in _all_rows(seen.many) for row in _named(rank)),
         "a step has rows that the other run never has: data are changed at random, by the rank's own seed"),
        (True,
         f"other rows on {seen.many.size} ranks: they are drawn in another order, or divided twice"),
    )  # fmt: skip
    return next(why for is_so, why in table if is_so)


def _named(rows: list[float]) -> list[str]:
    """Rows of two runs are the same if these are."""
    return [f"{row:.5g}" for row in rows]


def _all_rows(run: TrialRun) -> list[list[float]]:
    return [
        [row for step in range(run.steps) for reading in run.of(step, "rows")[rank] for row in reading.value]
        for rank in range(run.size)
    ]


def _repeats(run: TrialRun) -> bool:
    """Whether the rows of rank 0 come in the same order again."""
    rows = _all_rows(run)[0]
    again = next((place for place in range(1, len(rows)) if rows[place] == rows[0]), 0)
    return again > 0 and rows[again:] == rows[: len(rows) - again]


def _output(seen: Evidence, at: Parting) -> str:
    module = at.one[2]
    if "BatchNorm" in module:
        return (
            "a mean and a variance are taken over the rows of one rank. "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) takes them over all"
        )
    if module != "dropout":
        known = all(seen.rows(at.step))
        rows = "the same rows" if known else "rows that are not known (the model gets no tensor)"
        return f"a module ({module}) returns other numbers for {rows} and the same parameters"
    if len({rank[0].value for rank in seen.many.of(0, "seed") if rank}) == 1:
        return "dropout drops the same places on all ranks: seed them apart after the model is made"
    return "dropout drops other places than one process does: compare with dropout off"


def _uneven(seen: Evidence, at: Parting) -> str:
    counts = [len(rows) for rows in seen.rows(at.step)]
    if len(set(counts)) == 1:
        return ""
    return (
        f"ranks have {', '.join(map(str, counts))} rows, and a mean over ranks weighs each rank the same. "
        "Weigh the loss of a rank by its rows"
    )


def _loss(seen: Evidence, at: Parting) -> str:
    if seen.is_times(at.ratio):
        return f"the loss is {seen.factor:g} times as large for the same outputs: it lacks a division"
    if at.ratio and seen.is_times(1 / at.ratio):
        return (
            f"the loss is divided by {seen.factor:g} once too often: DDP makes the mean over ranks already. "
            "Or it is a sum over rows: their mean has no such factor"
        )
    return (
        "outputs are equal, and the mean of the ranks' losses is another one. A loss over tokens or weights "
        "has to be divided by their number on all ranks, not by that of its own rank"
    )


def _apart(seen: Evidence, at: Parting) -> str:
    first, *others = seen.many.of(at.step, "gradient")
    apart = {
        a.name
        for other in others
        for a, b in zip(first, other, strict=False)
        if differ("gradient", a.value, b.value, a.type, at.step)
    }
    which = "gradients are" if len(apart) == len(first) else f"the gradient of {', '.join(sorted(apart))} is"
    return f"{which} not averaged over ranks. Use DDP, or all_reduce each gradient before optimizer.step()"


def _scaled(seen: Evidence, at: Parting) -> str:
    if seen.is_times(at.ratio):
        return f"gradients are {seen.factor:g} times as large: they are summed over ranks, not averaged"
    if at.ratio and seen.is_times(1 / at.ratio):
        return f"gradients are divided by {seen.factor:g} once too often: a mean of what is a mean already"
    if at.kind == "clip" and at.ratio and max(at.ratio, 1 / at.ratio) >= SCALED:
        return (
            f"clip_grad_norm_ saw a norm {max(at.ratio, 1 / at.ratio):.6g} times the other one: it ran on "
            "scaled gradients in one run. Call GradScaler.unscale_(optimizer) before"
        )
    one, many = numbers(at.one), numbers(at.many)
    distance = max(abs(a - b) for a, b in zip(one, many, strict=True)) / max(one[0], many[0])
    if at.type == "float32" and distance < allowed("bfloat16", 0):
        return f"they differ by {distance:.1e} of their size, as if they were rounded to 16 bits on the way"
    return (
        "rows and losses are equal, and the gradient is not the mean over ranks: it is reduced more than "
        "once (in each of several backwards), or only in part"
    )


def _noted(seen: Evidence, at: Parting) -> str:
    of_ranks = [
        next((reading.value for reading in rank if reading.name == at.name), None)
        for rank in seen.many.of(at.step, "note")
    ]
    if len(set(of_ranks)) == 1:
        return f"the script notes it on every rank of {seen.many.name} alike, and not as in the other run"
    each = ", ".join(map(str, of_ranks))
    return f"ranks note {each}: their mean is not what the other run notes. Does every rank change it?"


_UNEQUAL_START = (
    "ranks 0 and {at.rank} begin with other parameters. Set one seed on all ranks before the model is made, "
    "or broadcast the parameters (DDP does)"
)
_OTHER_START = (
    "the model begins with other parameters: its seed depends on the number of ranks, or is not set"
)
_LOCAL_NORM = (
    "clip_grad_norm_ saw {one:.6g} on rank 0 and {many:.6g} on rank {at.rank}: it ran before the gradients "
    "were averaged"
)
_UPDATE = "a {at.kind} differs after equal gradients and rates: something else writes it"
_STEPS = "an epoch has another length: it depends on the number of ranks (drop_last, two samplers)"
_RATE = (
    "the learning rate is {one:.6g} and {many:.6g}: it is scaled by the number of ranks, or its schedule "
    "counts the steps of one rank, or micro-batches"
)
_WRITTEN = (
    "rank {at.rank} has another {at.kind} than rank 0 after equal gradients: one rank writes it, or the "
    "states or settings of their optimizers differ"
)

# (between "ranks" of the run with more of them, or between "runs"; kinds of readings; what it says of them)
CAUSES: tuple[tuple[str, tuple[str, ...], str | Callable[[Evidence, Parting], str]], ...] = (
    ("ranks", KINDS, _no_number),
    ("runs", KINDS, _no_number),
    ("ranks", ("start",), _UNEQUAL_START),
    ("runs", ("start",), _OTHER_START),
    ("runs", ("rows",), _rows),
    ("ranks", ("parameter",), _WRITTEN),
    ("runs", ("output",), _output),
    ("runs", ("loss", "gradient"), _uneven),
    ("runs", ("loss",), _loss),
    ("ranks", ("clip",), _LOCAL_NORM),
    ("ranks", ("gradient",), _apart),
    ("runs", ("gradient", "clip"), _scaled),
    ("ranks", ("rate",), _RATE),
    ("runs", ("rate",), _RATE),
    ("ranks", ("buffer",), _WRITTEN),
    ("runs", ("parameter", "buffer"), _UPDATE),
    ("runs", ("note",), _noted),
    ("runs", ("steps",), _STEPS),
)
