"""What a difference means: one table of known faults of programs on several ranks, the surest first.

Each is a function of the evidence that returns a sentence, or "" where it does not apply.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from .parting import Parting, allowed, differ, ranks_part, runs_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from .records import Run


class Evidence(NamedTuple):
    """Two runs, and where they part.

    Attributes:
        one, many: the runs on fewer and on more ranks.
        within: where ranks of `many` part from each other first; None: nowhere.
        between: where the runs part first; None: nowhere.
    """

    one: Run
    many: Run
    within: Parting | None
    between: Parting | None

    @property
    def factor(self) -> int:
        """How many times as many ranks."""
        return self.many.size // self.one.size


def evidence(one: Run, many: Run) -> Evidence:
    """Compare two runs."""
    return Evidence(one, many, next(ranks_part(many), None), next(runs_part(one, many), None))


def cause(seen: Evidence) -> str:
    """The first known fault that explains what was seen; "" if none does."""
    return next((words for find in CAUSES if (words := find(seen))), "")


# ---- what they begin with, and their rows ----


def _other_start(seen: Evidence) -> str:
    if seen.within is not None and seen.within.kind == "start":
        return (
            f"ranks 0 and {seen.within.rank} begin with different parameters ({seen.within.name}). Set one seed "
            "on all ranks before the model is made, or broadcast the parameters (DDP does)"
        )
    if seen.between is not None and seen.between.kind == "start":
        return (
            f"the model begins with other parameters on {seen.many.size} ranks ({seen.between.name}). Its seed "
            "depends on the number of ranks, or is not set"
        )
    return ""


def _rows(seen: Evidence) -> str:
    at = seen.between
    if at is None or at.kind != "rows":
        return ""
    one, many = at.one, at.many
    per_rank = [[row for reading in rank for row in reading.value] for rank in seen.many.of(at.step, "rows")]
    if len(per_rank) > 1 and all(sorted(rows) == sorted(per_rank[0]) for rows in per_rank):
        if sorted(per_rank[0]) == one:
            return "every rank trains on the same rows. Give the DataLoader a DistributedSampler"
        return (
            "every rank trains on the same rows, and not on those of one process: its sampler knows no ranks"
        )
    if len(many) == seen.factor * len(one):
        return (
            f"a step has {len(many)} rows on {seen.many.size} ranks and {len(one)} on {seen.one.size}: the batch "
            "of a rank has to be the whole batch divided by the number of ranks"
        )
    if len(many) * seen.factor == len(one):
        return (
            f"a step has {len(many)} rows on {seen.many.size} ranks and {len(one)} on {seen.one.size}: the rows "
            "are divided between ranks twice, as by a sampler twice, or by a sampler and the loader's batch"
        )
    repeated = _epochs(seen)
    if repeated:
        return repeated
    missing, extra = Counter(one) - Counter(many), Counter(many) - Counter(one)
    if not missing and extra and all(row in one for row in extra):
        return f"{extra.total()} rows of a step are there twice: DistributedSampler fills up the last batch"
    if missing and not extra:
        return f"{missing.total()} rows of a step are left out on {seen.many.size} ranks: drop_last, or uneven shards"
    return f"a step has other rows on {seen.many.size} ranks: they are drawn in another order, or changed at random"


def _epochs(seen: Evidence) -> str:
    """Whether the rows of several ranks come in the same order again, and those of one do not."""

    def repeats(run: Run) -> bool:
        rows = [
            [row for reading in run.of(step, "rows")[0] for row in reading.value] for step in range(run.steps)
        ]
        again = next((step for step in range(1, len(rows)) if set(rows[step]) & set(rows[0])), 0)
        return bool(again) and rows[again:] == rows[: len(rows) - again]

    if repeats(seen.many) and not repeats(seen.one):
        return "each epoch has its rows in the same order: call sampler.set_epoch(epoch) before each one"
    return ""


# ---- forward and loss ----


def _outputs(seen: Evidence) -> str:
    at = seen.between
    if at is None or at.kind != "output":
        return ""
    if at.type.startswith("BatchNorm"):
        return (
            f'"{at.name}" takes mean and variance over the rows of its rank only. '
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) takes them over all"
        )
    if at.type == "dropout":
        seeds = [rank[0].value for rank in seen.many.of(0, "seed") if rank]
        if len(set(seeds)) == 1:
            return f'"{at.name}" drops the same places of all ranks\' rows: seed them apart after the model is made'
        return f'"{at.name}" drops other places than one process does: compare with dropout off'
    return f'"{at.name}" ({at.type}) returns other numbers for the same rows and parameters'


def _uneven(seen: Evidence) -> str:
    at = seen.within or seen.between
    if seen.between is None or seen.between.kind not in ("loss", "gradient", "clip"):
        return ""
    counts = [sum(len(r.value) for r in rank) for rank in seen.many.of(seen.between.step, "rows")]
    if len(set(counts)) > 1 and (at is None or at.kind != "gradient"):
        return (
            f"ranks have {', '.join(map(str, counts))} rows, and the mean over ranks weighs each rank the same. "
            "Weigh the loss of a rank by its rows"
        )
    return ""


def _loss(seen: Evidence) -> str:
    at = seen.between
    if at is None or at.kind != "loss":
        return ""
    times = round(at.ratio)
    if times > 1 and abs(at.ratio - times) < 0.01:
        return (
            f"the loss is {times} times as large for the same outputs: it is divided by a number of one rank"
        )
    if at.ratio and abs(1 / at.ratio - seen.factor) < 0.01:
        return f"the loss is divided by {seen.factor} once too often for the same outputs"
    return (
        "the outputs are equal, and the mean of the ranks' losses is another one: a loss over tokens or weights "
        "has to be divided by their number on all ranks, not by that of its own rank"
    )


# ---- gradients and the step ----


def _local_norm(seen: Evidence) -> str:
    if seen.within is not None and seen.within.kind == "clip":
        return (
            f"clip_grad_norm_ saw the norm {seen.within.one:.6g} on rank 0 and {seen.within.many:.6g} on rank "
            f"{seen.within.rank}: it ran before the gradients were averaged"
        )
    return ""


def _apart(seen: Evidence) -> str:
    at = seen.within
    if at is None or at.kind != "gradient":
        return ""
    every = {reading.name for reading in seen.many.of(at.step, "gradient")[0]}
    which = (
        "gradients are" if len(every) == len(_apart_names(seen, at.step)) else f"the gradient of {at.name} is"
    )
    return (
        f"{which} not averaged over ranks: ranks 0 and {at.rank} step with their own. Use DDP, or all_reduce "
        "each gradient before optimizer.step()"
    )


def _apart_names(seen: Evidence, step: int) -> set[str]:
    first, *others = seen.many.of(step, "gradient")
    return {
        a.name
        for other in others
        for a, b in zip(first, other, strict=False)
        if differ("gradient", a.value, b.value, a.type, step)
    }


def _scaled(seen: Evidence) -> str:
    at = seen.between
    if at is None or at.kind not in ("gradient", "clip"):
        return ""
    for times, words in (
        (seen.factor, f"{seen.factor} times as large: they are summed over ranks, not averaged"),
        (1 / seen.factor, f"divided by {seen.factor} once too often: averaged twice, or a mean of a mean"),
    ):
        if abs(at.ratio / times - 1) < 0.01:
            return f"gradients are {words}"
    largest = max(abs(at.one[0]), abs(at.many[0])) if isinstance(at.one, list) else abs(at.one)
    distance = abs(at.one[-1] - at.many[-1]) if isinstance(at.one, list) else abs(at.one - at.many)
    if at.type == "float32" and distance < allowed("bfloat16", 0) * largest:
        return (
            f"gradients differ by {distance / largest:.1e} of their size, as if they had been rounded to 16 bits on "
            "the way"
        )
    return (
        f"the gradient of {at.name} is another one for the same rows and the same loss: it is not the mean over "
        "ranks, as after a reduction in each of several backwards, or of a part of the gradients"
    )


def _rate(seen: Evidence) -> str:
    for at in (seen.within, seen.between):
        if at is not None and at.kind == "rate":
            where = f"rank {at.rank}" if at.rank >= 0 else f"{seen.many.size} ranks"
            return (
                f"the learning rate of {at.name} is {at.many:.6g} on {where} and {at.one:.6g} on "
                f"{'rank 0' if at.rank >= 0 else f'{seen.one.size}'}: it is scaled by the number of ranks, or its "
                "schedule counts the steps of one rank"
            )
    return ""


def _written(seen: Evidence) -> str:
    at = seen.within
    if at is None or at.kind not in ("parameter", "buffer"):
        return ""
    what = "parameter" if at.kind == "parameter" else "buffer"
    return (
        f"{what} {at.name} of rank {at.rank} is not that of rank 0 after equal gradients: one rank writes it, or "
        "their optimizers have different states or settings"
    )


def _update(seen: Evidence) -> str:
    at = seen.between
    if at is None or at.kind not in ("parameter", "buffer"):
        return ""
    return f"{at.kind} {at.name} differs after equal gradients and rates: something else writes it"


def _noted(seen: Evidence) -> str:
    at = seen.between
    if at is None or at.kind != "note":
        return ""
    return f"what the script notes as {at.name!r} is not the mean over ranks of what one process notes"


def _steps(seen: Evidence) -> str:
    if seen.one.steps == seen.many.steps:
        return ""
    return (
        f"{seen.many.size} ranks take {seen.many.steps} steps, and {seen.one.size} {seen.one.steps}: the length of "
        "an epoch depends on the number of ranks (drop_last, a sampler twice, or rows left over)"
    )


CAUSES: tuple[Callable[[Evidence], str], ...] = (
    _other_start, _rows, _outputs, _uneven, _loss, _local_norm, _apart, _scaled, _rate, _written, _update, _noted,
    _steps,
)  # fmt: skip
