"""Losses that are means over labels that count: padding, masked prompts, parts without any label."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import swept
from parallel import models
from parallel.plain_training import begun, refused, seeded
from parallel.rows import Row

PLANS = (
    up.Plan(data=2), up.Plan(data=2, micro_batches=2), up.Plan(data=2, zero=2, micro_batches=2),
    up.Plan(pipeline=2, micro_batches=4), up.Plan(pipeline=2, micro_batches=4, schedule="zb-h1"),
    up.Plan(tensor=2, micro_batches=2), up.Plan(data=2, swap="memory", micro_batches=2),
)  # fmt: skip


def padded(ignore: int = -100) -> list[tuple[Tensor, Tensor]]:
    """Rows of which 0, 2, 4 ... labels count; a micro-batch of the first row has none."""
    batches = []
    for tokens, labels in models.text_batches(4, 8):
        kept = torch.arange(models.TIME) < 2 * torch.arange(len(labels)).unsqueeze(1)
        batches.append((tokens, torch.where(kept, labels, ignore)))
    return batches


def counted(targets: Tensor) -> Tensor:
    return (targets != -100).sum()


ONE = up.Plan(data=2)
PADDED = padded()
ODD = [(tokens[1:], labels[1:]) for tokens, labels in PADDED]  # ranks with four and three rows, in four parts
EVEN = [(x, torch.cat([y[:, :-1], torch.full_like(y[:, :1], -100)], 1)) for x, y in models.text_batches(4, 8)]


def of_rows(logits: Tensor, targets: Tensor) -> Tensor:
    lost = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (lost.sum(1) / (targets != -100).sum(1).clamp(min=1)).mean()


class Ignoring(functools.partial[Tensor]):
    ignore_index = 0


def row(trains: Any, given: Any = PADDED, loss: Any = models.token_loss, **more: Any) -> Row:
    refused = more.pop("refused", {})
    return Row(models.gpt, trains, refused, given, loss, sample=None, options=more)


UNEVEN = r"-100.*weigh=\"tokens\".*weigh=lambda targets: .*weigh=\"rows\""
WRONG: dict[str, Any] = {
    r"weigh returned a tensor of shape": lambda targets: targets,
    "weigh returned -1.0": lambda targets: -1.0,
    "weigh returned '3'": lambda targets: "3",
    "no label of this batch counts": lambda targets: 0,
    "weigh is a int": 3,
}
TABLE = {
    "labels that count": row(swept(PLANS[::2], PLANS[1::2]), weigh=counted),
    "ranks with few rows": row(
        [up.Plan(data=2, zero=zero, micro_batches=4) for zero in (0, 2)], ODD, weigh=counted
    ),
    "even labels": row(swept(PLANS[1::2], PLANS[::2]), EVEN),
    "means over rows": row([up.Plan(data=2, micro_batches=3)], loss=of_rows, weigh="rows"),
    "uneven labels": row((), refused={UNEVEN: PLANS}),
    "labels of another number": row(
        (), padded(0), Ignoring(models.token_loss), refused={r"ignored labels \(0\)": [ONE]}
    ),
    **{says: row((), refused={says: [ONE]}, weigh=weigh) for says, weigh in WRONG.items()},
}  # fmt: skip


def check_an_evaluation_is_weighed(folder: Path) -> None:
    wanted = models.token_loss(seeded(models.gpt)(PADDED[0][0]), PADDED[0][1]).item()
    run = begun(ONE, models.gpt, models.token_loss, weigh=counted)
    (mine,) = run.shard(PADDED[:1])
    assert abs(run.evaluate(mine) - wanted) < 1e-5


def check_uneven_labels_of_rows_are_refused(folder: Path) -> None:
    batch = torch.randn(8, 16), torch.tensor([0, 1, 2, 3, 0, 1, 2, 9])
    loss = nn.CrossEntropyLoss(ignore_index=9)
    refused(r"ignored labels \(9\)", ONE, lambda: nn.Sequential(nn.Linear(16, 4)), [batch], loss)
