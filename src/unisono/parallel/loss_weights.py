"""What each micro-batch counts in the loss: its rows, its labels, or what `weigh` says of its targets.

The loss of a step is the mean over all micro-batches of all data ranks, each weighed by its count. A loss
that is a mean over labels, some of which are ignored, needs the number of those that count.

| `weigh` | the loss of a micro-batch is |
|---|---|
| None | a mean over rows, or over labels of which all parts ignore the same share |
| "rows" | a mean over rows |
| "tokens" | a mean over its labels that are not ignored |
| a function of the targets | a mean over as many labels as it returns |
| "counted" | a sum, which the loss returns with the number over which it is one: (sum, count) |

Several calls of `step` that add up before one update are weighed as one large batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from unisono.torch_internals import version_names

from .batches import DataComparison, fingerprint, micro_batches, rows_of, stand_in
from .graph.containers import tensors_in
from .layouts.shard import whole_value
from .mesh import PlanMesh

Weigh = Callable[[Any], "float | Tensor"] | str | None
EVEN = 1e-9
IGNORED = -100  # what PyTorch's losses and Hugging Face's models ignore
WORDS = ("rows", "tokens", "counted")
SUM = "sum"  # of a loss of PyTorch that says so


def check_weigh(weigh: object, *, own_loss: bool = False) -> None:
    """Raise TypeError or ValueError if `weigh` is neither a function, one of WORDS, nor None."""
    if weigh is None or callable(weigh):
        return
    if not isinstance(weigh, str):
        raise TypeError(
            f"parallelize: weigh is a {type(weigh).__name__}, expected a function of the targets, "
            f"one of {', '.join(WORDS)}, or None"
        )
    if weigh not in WORDS:
        raise ValueError(f"parallelize: weigh is {weigh!r}, expected one of {', '.join(WORDS)}")
    if weigh == "counted" and own_loss:
        raise ValueError(
            'parallelize: weigh="counted" is for a loss= that returns (sum, count); with loss=None the model '
            'returns its mean: write weigh="tokens"'
        )


def resolved(weigh: Weigh, ignored: int, model: object, loss: object) -> Weigh:
    """`weigh` with a function for "tokens", and that of a loss of PyTorch which says by what it divides.

    Args:
        loss: the user's; None: the model computes its own.

    A causal model of Hugging Face that computes its loss itself shifts the labels: the first of each row is
    left out.
    """
    if weigh is None:
        return _own_weigh(loss, ignored)
    if weigh != "tokens":
        return weigh
    name = type(model).__name__
    shifts = loss is None and (
        getattr(model, "loss_type", None) == "ForCausalLM" or name.endswith(("ForCausalLM", "LMHeadModel"))
    )

    def tokens(targets: Any) -> int:
        labels = _labels(targets)
        if not labels:
            raise ValueError(
                'weigh="tokens" counts integer labels, and this batch has none; write weigh= as a function'
            )
        return sum(int(((label[:, 1:] if shifts else label) != ignored).sum()) for label in labels)

    return tokens


def settings_of(loss: Any) -> dict[str, Any] | None:
    """The settings of a loss of PyTorch; None: it is another function."""
    if isinstance(loss, functools.partial) and not loss.args:
        inner = settings_of(loss.func)
        return None if inner is None else inner | loss.keywords
    kind = loss if isinstance(loss, FunctionType) else type(loss)
    if kind.__module__ not in ("torch.nn.functional", "torch.nn.modules.loss"):
        return None
    own = {} if kind is loss else {"weight": getattr(loss, "weight", None), "reduction": loss.reduction}
    return {"name": kind.__name__, **own}


def is_mean(loss: Any) -> bool:
    """Whether it is known to be a mean over rows, or over labels."""
    settings = settings_of(loss)
    if settings is None or settings.get("reduction", "mean") not in ("mean", "batchmean"):
        return False
    return settings.get("weight") is None


def _own_weigh(loss: Any, ignored: int) -> Weigh:
    """What a loss of PyTorch with class weights, or a sum, says itself; None: nothing."""
    settings = settings_of(loss) or {}
    weight = settings.get("weight")
    if settings.get("reduction") == "sum":
        return SUM
    classes = settings.get("name") in ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss")
    if weight is None or not classes or settings.get("reduction", "mean") != "mean":
        return None

    def weights(labels: Any) -> Any:
        if not isinstance(labels, Tensor) or labels.is_floating_point():  # shares of classes
            return float(rows_of([labels]))
        counts = labels != ignored
        return (weight.to(labels.device)[labels.where(counts, 0)] * counts).sum()

    return weights


def own_loss(output: Any, _labels: Any) -> Tensor:
    """The loss that the model has computed itself."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise TypeError(
            f"loss=None takes the loss of the model's output, and this {type(output).__name__} has none: "
            'give the model labels, as batch["labels"], or write loss=fn'
        )
    return found.reshape(())


def pair(value: Any) -> tuple[Tensor, float]:
    """What a loss returned under weigh="counted"."""
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor)):
        raise TypeError(
            f'weigh="counted": the loss returned a {type(value).__name__}, expected (sum, count), a tensor '
            "and the number of labels in it"
        )
    return _one_value(value[0]), count(value[1])


def mean(value: Any) -> Tensor:
    """What a loss returned."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"the loss returned a {type(value).__name__}, expected a tensor, the mean over the rows. One "
            'that returns (sum, count) needs parallelize(..., weigh="counted")'
        )
    return _one_value(value)


def _one_value(value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise ValueError(
            f"the loss returned {list(value.shape)} values, expected one: the mean over the rows, as of "
            'reduction="mean"'
        )
    return whole_value(value)  # on one rank alone, reading it would wait for the others


def ignored_by(loss: object) -> int:
    """Return the label that `loss` ignores, as far as it says so."""
    keywords = getattr(loss, "keywords", {})  # of a functools.partial
    found = getattr(loss, "ignore_index", keywords.get("ignore_index", IGNORED))
    return found if isinstance(found, int) else IGNORED


class CutBatch(NamedTuple):
    """A rank's micro-batches, and what each counts.

    Args:
        weights: the share of each micro-batch in the loss of all ranks; all shares add up to 1.
        total: the rows or labels of all ranks, by which the losses are divided.
        kept: the least and the largest share of labels that are not ignored, over all parts.
        changed: some rank trains other parameters than before.
    """

    micros: list[tuple[Any, Any]]
    weights: list[float]
    total: float
    kept: tuple[float, float] = (1.0, 1.0)
    changed: bool = False


def cut_batch(
    batch: tuple[Any, Any],
    weigh: Weigh,
    ignored: int,
    mesh: PlanMesh,
    *,
    several: bool = False,
    changed: bool = False,
    forward: bool = False,
    data: DataComparison | None = None,
    read: int = 0,
) -> CutBatch:
    """Cut this rank's batch into micro-batches, and weigh each in the loss of all ranks.

    One message tells all ranks the rows and labels of each; a second one is needed where ranks have too few
    rows, so that all have fewer parts.

    Args:
        several: the batch is one of several that are weighed together.
        changed: this rank trains other parameters than before.
        forward: ranks may have no rows; they run a row that counts nothing.
        data: compares what ranks have in the first batches; None: nothing does.
        read: of the numbers that the loss reads, under a context axis; equal on all ranks.
    Raises:
        ValueError: ranks that share rows have different ones; or, without `weigh`, parts of the
            batch have different shares of ignored labels.
    """
    mine, most = rows_of(list(batch)), mesh.plan.micro_batches
    if mesh.plan.context > 1:
        _check_alike(batch, read, mesh)
    micros: list[tuple[Any, Any]] = micro_batches(batch, min(most, mine)) if mine else []
    noted = _batch_weights(micros, weigh, ignored, mesh, several=several)
    told = [] if data is None else data.numbers(batch)
    table = _gather([mine, *noted.told, float(changed), *told], mesh)
    other = bool(table[..., 3].any())
    rows = _checked(table[..., 0].long(), mesh, forward=forward)
    if data is not None and told:
        data.check(table[..., 4:], mesh)
    parts = min(most, *filter(None, rows))
    if any(min(most, one) != parts for one in filter(None, rows)):
        micros = micro_batches(batch, parts) if mine else []
        noted = _batch_weights(micros, weigh, ignored, mesh, several=several)
        table = _gather([mine, *noted.told], mesh)
    least, largest = table[-1, :, 0, 1], table[-1, :, 0, 2]  # of the ranks that compute the loss
    total, kept = float(sum(rows)), (1.0, 1.0)
    if weigh in (SUM, "counted"):
        weights = [1.0 if weigh == SUM else 1.0 / total] * len(micros)
    elif callable(weigh):
        total = float(largest.sum())
        if total == 0:
            raise ValueError("no label of this batch counts: weigh returned 0 for all of it")
        weights = [count / total for count in noted.counts]
    else:
        kept = float(least.min()), float(largest.max())
        check_even(*kept, ignored)
        weights = [rows_of([x, y]) / total for x, y in micros]
    if not mine:
        micros, weights = [stand_in(batch)] * parts, [0.0] * parts
    return CutBatch(micros, weights, total, kept, other)


def share_of_rank(rows: float | None, seen: int, mesh: PlanMesh, *, changed: bool) -> tuple[float, bool]:
    """What the mean over this rank's rows is multiplied by, so that the data ranks' mean is that of all rows;
    and whether a rank has changed something.

    Args:
        rows: as the caller says; None: every rank weighs the same.
        seen: those of its last forward; 0: not known.
    Raises:
        ValueError: ranks weigh the same, and have different numbers of rows.
    """
    if rows is not None and not 0 < rows < math.inf:
        raise ValueError(f"backward: rows is {rows!r}, expected a number above 0")
    mine = seen if rows is None else rows
    told = _gather([float(rows is not None), mine, float(changed)], mesh).view(-1, 3)
    given, every, others = told.unbind(1)
    if bool(given.all()):
        return mine * len(every) / float(every.sum()), bool(others.any())
    if bool(given.any()) or bool((every != every[0]).any()):
        raise ValueError(
            f"backward: the ranks have {every.tolist()} rows, by rows= or in their last forwards. Write "
            "rows= on all ranks: over how many rows or labels this rank's loss is a mean; rows=1 lets all "
            "ranks weigh the same"
        )
    return 1.0, bool(others.any())


def check_even(least: float, largest: float, ignored: int = IGNORED) -> None:
    """Raise ValueError if parts keep different shares of their labels, from `least` to `largest`."""
    if largest - least > EVEN:
        raise ValueError(
            f"this batch has ignored labels ({ignored}), more in some parts than in others: the mean of the "
            'parts\' means is not the mean over labels. Write parallelize(..., weigh="tokens") if the loss '
            "divides by the labels that are not ignored; weigh=lambda targets: the number by which it "
            f"divides, such as the sum of class weights, weight[targets[targets != {ignored}]].sum(); "
            'weigh="rows" if it is a mean over rows'
        )


class _BatchWeights(NamedTuple):
    counts: list[float]  # of each micro-batch, by `weigh`
    told: tuple[float, float]  # (0, their sum), or the least and largest share of labels that are not ignored


def _batch_weights(
    micros: Sequence[tuple[Any, Any]], weigh: Weigh, ignored: int, mesh: PlanMesh, *, several: bool
) -> _BatchWeights:
    if callable(weigh):
        counts = [count(weigh(targets)) for _, targets in micros]
        return _BatchWeights(counts, (0.0, sum(counts)))
    alone = len(micros) == 1 and mesh.plan.data == 1 and not several
    if not micros:
        return _BatchWeights([], (math.inf, -math.inf))
    if weigh in ("rows", "counted", SUM) or alone:
        return _BatchWeights([], (1.0, 1.0))
    shares = [kept_of(targets, ignored) for _, targets in micros]
    return _BatchWeights([], (min(shares), max(shares)))


def _gather(numbers: Sequence[float], mesh: PlanMesh) -> Tensor:
    """The numbers of every rank, f64 [pipeline, data, ranks of the same rows, numbers]."""
    device, plan = mesh.control, mesh.plan
    mine = torch.tensor(list(numbers), dtype=torch.float64, device=device)
    everyone = torch.empty(plan.ranks * len(mine), dtype=torch.float64, device=device)
    with record_function("up::rows|batch"):
        version_names.all_gather_single(everyone, mine, group=mesh.world)
    return everyone.cpu().view(plan.pipeline, plan.data, -1, len(mine))


def _checked(table: Tensor, mesh: PlanMesh, *, forward: bool) -> list[int]:
    """The rows of each data rank; ranks that share rows must agree on them. forward: some may have none."""
    everyone = table.flatten()
    if bool((table != table[:1, :, :1]).any()):
        raise ValueError(
            "ranks of one pipeline, context or tensor group have different numbers of rows: "
            f"{everyone.tolist()} on ranks 0 to {mesh.plan.ranks - 1}. Give them the same part of each "
            "batch; run.shard(loader) does"
        )
    empty = (everyone == 0).nonzero().flatten().tolist()
    if len(empty) == len(everyone):
        raise ValueError("this batch has no rows")
    if empty and not forward:
        raise ValueError(
            f"rank {empty[0]} has no rows in this batch; every rank needs one at least to train. Use "
            "drop_last=True, or larger batches"
        )
    return [int(rows) for rows in table[0, :, 0].tolist()]


def _check_alike(batch: Any, read: int, mesh: PlanMesh) -> None:
    """Ranks that share sequences must have the same ones, and all ranks read the same numbers in the loss."""
    together = mesh.plan.ranks // mesh.plan.pipeline // mesh.plan.data
    table = _gather([fingerprint(batch), read], mesh).view(-1, together, 2)
    if bool((table[..., 1] != table[0, 0, 1]).any()):
        raise ValueError(
            "the loss reads other numbers on some ranks than on others, such as a weight that the loop "
            f"changes: {table[..., 1].flatten().tolist()} on ranks 0 to {mesh.plan.ranks - 1}, as "
            "fingerprints. Change it on all ranks alike"
        )
    for row, marks in enumerate(table[..., 0].tolist()):
        if len(set(marks)) > 1:
            first = row * together
            raise ValueError(
                f"ranks {first} to {first + together - 1} share their sequences, and have different "
                "batches. Give each of them the same rows, whole; run.shard(loader) does"
            )


def count(given: object) -> float:
    """A number of labels that a function of the user's returned."""
    if isinstance(given, Tensor):
        if given.numel() != 1:
            raise ValueError(f"weigh returned a tensor of shape {list(given.shape)}, expected one number")
        given = given.item()
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"weigh returned {given!r}, expected a number")
    if not 0 <= given < math.inf:
        raise ValueError(f"weigh returned {given}, expected a number of labels, 0 or more")
    return float(given)


def _labels(targets: Any) -> list[Tensor]:
    return [t for t in tensors_in(targets) if not t.is_floating_point() and t.dtype != torch.bool]


def kept_of(targets: Any, ignored: int) -> float:
    """The share of labels that are not ignored; 1.0 where targets have no labels."""
    labels = _labels(targets)
    total = sum(label.numel() for label in labels)
    return sum(int((label != ignored).sum()) for label in labels) / total if total else 1.0


# ---- several calls of a step ----


class GradientAccumulation:
    """The calls of `step` since the last update, which trains on their batches as on one.

    The first call sets the unit: the rows or labels by which its losses are divided. Later calls divide by
    the same number. What is added up is too large by (all rows or labels) / unit, and the update divides by
    that. Example: 8 rows, then 4 rows: unit 8; the losses of the second call are divided by 8; the sum times
    8 / 12 is the mean over all 12.

    Losses of the caller's, by `backward`, add up as they are.

    Args:
        sums: losses are sums, which add up as they are.
    Attributes:
        calls: how many have added their gradients.
        lost: what `backward` has added to this rank's loss.
        own_loop: `backward` has added what waits.
        excess: the factor by which the gradients of all calls exceed those of one mean over their rows or
            labels; under "counted" that of rows, for labels are counted later.
    """

    def __init__(self, *, sums: bool = False) -> None:
        self.calls, self._sums = 0, sums
        self.lost: Any = 0.0
        self.own_loop = False
        self._unit = self._total = 0.0
        self.excess = 1.0
        self._kept = (1.0, 1.0)  # the least and the largest share of labels that count, over all parts

    def weights(self, cut: CutBatch) -> list[float]:
        """The weight of each micro-batch of the next call, in units of the first call.

        Raises:
            ValueError: without `weigh`, this batch ignores another share of its labels than those before.
        """
        if self._sums:
            return cut.weights
        if self.calls == 0:
            self._unit, self._total, self._kept, self.excess = cut.total, 0.0, cut.kept, 1.0
            return cut.weights
        check_even(min(self._kept[0], cut.kept[0]), max(self._kept[1], cut.kept[1]))
        self.excess += cut.total / self._unit
        return [weight * cut.total / self._unit for weight in cut.weights]

    def ratio(self, count: float) -> float:
        """What the loss of the present call is multiplied by. `count`: its rows or labels, of all ranks."""
        if count == 0:
            raise ValueError("no label of this batch counts: the loss returned (sum, 0) for all of it")
        return 1.0 if self._sums or self.own_loop else self._unit / count

    def add(self, count: float) -> float:
        """Count the present call; return what all gradients so far are multiplied by."""
        self.calls += 1
        self._total += count
        return 1.0 if self._sums or self.own_loop else self._unit / self._total

    def add_loss(self, loss: Tensor) -> None:
        """Count a call of `backward`."""
        self.calls += 1
        self.lost, self.own_loop = self.lost + loss, True

    @property
    def of(self) -> str:
        """The call that has added what waits."""
        return "backward(loss)" if self.own_loop else "step(batch, update=False)"

    def check(self, call: str) -> None:
        """Raise ValueError for a call of `step`, `backward` or `update` that does not go with what waits."""
        if call == "update" and not self.calls:
            raise ValueError("update: no run.backward(loss) came since the last update")
        if self.calls and self.own_loop == (call == "step"):
            ends = "run.update()" if self.own_loop else "step(batch)"
            raise ValueError(f"{call}: gradients of {self.of} wait for an update. Call {ends} first")

    def clear(self) -> None:
        """Begin anew."""
        self.calls, self.lost, self.own_loop = 0, 0.0, False
