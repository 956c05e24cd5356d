"""What a difference means: one table of known faults of programs on several ranks, the surest first."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from .parting import Parting, allowed, differ, ranks_part, runs_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from .records import TrialRun


class Evidence(NamedTuple):
    """Two runs, and where they part.

    Attributes:
        one, many: the runs on fewer and on more ranks.
        within: where ranks of `many` part from each other first; None: not at the step that is the first.
        between: where the runs part first; None: not at that step.
    """

    one: TrialRun
    many: TrialRun
    within: Parting | None
    between: Parting | None

    @property
    def factor(self) -> float:
        """How many times as many ranks; 1: two libraries are compared."""
        return self.many.size / self.one.size

    def is_times(self, ratio: float) -> bool:
        """Whether a ratio is that of the ranks."""
        return self.factor != 1 and abs(ratio / self.factor - 1) < 0.01

    def rows(self, step: int) -> list[list[int]]:
        """The rows of each rank of `many` in a step."""
        return [[row for reading in rank for row in reading.value] for rank in self.many.of(step, "rows")]


class Diagnosis(NamedTuple):
    """Where numbers part, and why; "": no known fault explains it."""

    at: Parting
    why: str


def finding(one: TrialRun, many: TrialRun) -> Diagnosis | None:
    """Compare two runs; None: they are equal to rounding."""
    within, between = next(ranks_part(many), None), next(runs_part(one, many), None)
    if within is None and between is None and one.steps != many.steps:
        between = Parting(min(one.steps, many.steps), "steps", "", "", one.steps, many.steps)
    first = min((at.step for at in (within, between) if at is not None), default=0)
    within, between = (at if at is not None and at.step == first else None for at in (within, between))
    seen = Evidence(one, many, within, between)
    for at, kinds, explain in CAUSES:
        parting = seen.within if at == "ranks" else seen.between
        if parting is not None and parting.kind in kinds and (why := explain(seen, parting)):
            return Diagnosis(parting, why)
    left = within or between
    return Diagnosis(left, "") if left is not None else None


# ---- what a run begins with, and its rows ----


def _unequal_start(_seen: Evidence, at: Parting) -> str:
    return (
        f"ranks 0 and {at.rank} begin with other parameters. Set one seed on all ranks before the model is "
        "made, or broadcast the parameters (DDP does)"
    )


def _other_start(_seen: Evidence, _at: Parting) -> str:
    return "the model begins with other parameters: its seed depends on the number of ranks, or is not set"


def _rows(seen: Evidence, at: Parting) -> str:
    one, many, per_rank = at.one, at.many, seen.rows(at.step)
    sizes = f"a step has {len(many)} rows on {seen.many.size} ranks and {len(one)} on {seen.one.size}"
    if len(per_rank) > 1 and all(sorted(rows) == sorted(per_rank[0]) for rows in per_rank):
        return "every rank trains on the same rows. Give the DataLoader a DistributedSampler"
    if seen.is_times(len(many) / len(one)):
        return f"{sizes}: the batch of a rank has to be that of one divided by the ranks"
    if seen.is_times(len(one) / len(many)):
        return f"{sizes}: they are divided twice, as by two samplers, or by a sampler and the size of a batch"
    if _repeats(seen.many) and not _repeats(seen.one):
        return "each epoch has its rows in the same order: call sampler.set_epoch(epoch) before each one"
    missing, extra = Counter(one) - Counter(many), Counter(many) - Counter(one)
    if extra and not missing:
        return f"{extra.total()} rows of a step are there twice: DistributedSampler fills up the last batch"
    if missing and not extra:
        return f"{missing.total()} rows of a step are left out: drop_last, or ranks with fewer rows"
    if len(set(one) | {row for rank in _all_rows(seen.many) for row in rank}) > len(
        set(_all_rows(seen.one)[0])
    ):
        return (
            "a step has rows that the other run never has: data are changed at random, by the rank's own seed"
        )
    return (
        f"a step has other rows on {seen.many.size} ranks: they are drawn in another order, or divided twice"
    )


def _all_rows(run: TrialRun) -> list[list[int]]:
    return [
        [row for step in range(run.steps) for reading in run.of(step, "rows")[rank] for row in reading.value]
        for rank in range(run.size)
    ]


def _repeats(run: TrialRun) -> bool:
    """Whether the rows of rank 0 come in the same order again."""
    rows = _all_rows(run)[0]
    again = next((place for place in range(1, len(rows)) if rows[place] == rows[0]), 0)
    return again > 0 and rows[again:] == rows[: len(rows) - again]


# ---- forward and loss ----


def _output(seen: Evidence, at: Parting) -> str:
    if "BatchNorm" in at.type:
        return (
            "a mean and a variance are taken over the rows of one rank. "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) takes them over all"
        )
    if at.type != "dropout":
        rows = (
            "the same rows"
            if all(seen.rows(at.step))
            else "rows that are not known (the model gets no tensor)"
        )
        return f"a module ({at.type}) returns other numbers for {rows} and the same parameters"
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
        return f"the loss is divided by {seen.factor:g} once too often: DDP makes the mean over ranks already"
    return (
        "outputs are equal, and the mean of the ranks' losses is another one. A loss over tokens or weights "
        "has to be divided by their number on all ranks, not by that of its own rank"
    )


# ---- gradients, and the step ----


def _local_norm(_seen: Evidence, at: Parting) -> str:
    return (
        f"clip_grad_norm_ saw {at.one:.6g} on rank 0 and {at.many:.6g} on rank {at.rank}: it ran before the "
        "gradients were averaged"
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
    size = max(at.one[0], at.many[0]) if isinstance(at.one, list) else max(at.one, at.many)
    distance = max(abs(a - b) for a, b in zip(_numbers(at.one), _numbers(at.many), strict=True)) / size
    if at.type == "float32" and distance < allowed("bfloat16", 0):
        return f"they differ by {distance:.1e} of their size, as if they were rounded to 16 bits on the way"
    return (
        "rows and losses are equal, and the gradient is not the mean over ranks: it is reduced more than "
        "once (in each of several backwards), or only in part"
    )


def _numbers(value: float | list[float]) -> list[float]:
    return value[:2] if isinstance(value, list) else [value]


def _rate(_seen: Evidence, at: Parting) -> str:
    return (
        f"the learning rate is {at.one:.6g} and {at.many:.6g}: it is scaled by the number of ranks, or its "
        "schedule counts the steps of one rank"
    )


def _written(_seen: Evidence, at: Parting) -> str:
    return (
        f"rank {at.rank} has another {at.kind} than rank 0 after equal gradients: one rank writes it, or the "
        "states or settings of their optimizers differ"
    )


def _update(_seen: Evidence, at: Parting) -> str:
    return f"a {at.kind} differs after equal gradients and rates: something else writes it"


def _noted(_seen: Evidence, _at: Parting) -> str:
    return "what the script notes on each rank is, in the mean, not what one process notes"


def _steps(_seen: Evidence, _at: Parting) -> str:
    return "an epoch has another length: it depends on the number of ranks (drop_last, two samplers)"


# (between "ranks" of the run with more of them, or between "runs"; kinds of readings; what it says of them)
CAUSES: tuple[tuple[str, tuple[str, ...], Callable[[Evidence, Parting], str]], ...] = (
    ("ranks", ("start",), _unequal_start),
    ("runs", ("start",), _other_start),
    ("runs", ("rows",), _rows),
    ("ranks", ("parameter",), _written),
    ("runs", ("output",), _output),
    ("runs", ("loss", "gradient"), _uneven),
    ("runs", ("loss",), _loss),
    ("ranks", ("clip",), _local_norm),
    ("ranks", ("gradient",), _apart),
    ("runs", ("gradient", "clip"), _scaled),
    ("ranks", ("rate",), _rate),
    ("runs", ("rate",), _rate),
    ("ranks", ("buffer",), _written),
    ("runs", ("parameter", "buffer"), _update),
    ("runs", ("note",), _noted),
    ("runs", ("steps",), _steps),
)
