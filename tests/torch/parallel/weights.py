"""Losses that are means over labels that count: padding, masked prompts, parts without any label."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import swept
from parallel import models
from parallel.plain_training import adamw, begun, same, seeded, under

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


def check_labels_that_count_are_weighed(folder: Path) -> None:
    for plan in PLANS:
        same(plan, models.gpt, padded(), models.token_loss, weigh=counted)


def check_ranks_with_few_rows_are_weighed(folder: Path) -> None:
    """Seven rows of two ranks in four parts: one rank has four rows, the other three."""
    odd = [(tokens[1:], labels[1:]) for tokens, labels in padded()]
    for zero in (0, 2):
        same(up.Plan(data=2, zero=zero, micro_batches=4), models.gpt, odd, models.token_loss, weigh=counted)


def check_an_evaluation_is_weighed(folder: Path) -> None:
    (batch,) = padded()[:1]
    wanted = models.token_loss(seeded(models.gpt)(batch[0]), batch[1]).item()
    run = begun(up.Plan(data=2), models.gpt, models.token_loss, weigh=counted)
    (mine,) = run.shard([batch])
    assert abs(run.evaluate(mine) - wanted) < 1e-5


def check_uneven_labels_without_a_weight_are_refused(folder: Path) -> None:
    says = r"-100.*weigh=\"tokens\".*weigh=lambda targets: .*weigh=\"rows\""
    for plan in PLANS:
        with pytest.raises(ValueError, match=says):
            under(plan, models.gpt, padded(), models.token_loss)
    loss: Any = functools.partial(models.token_loss)
    loss.ignore_index = 0
    with pytest.raises(ValueError, match=r"ignored labels \(0\)"):
        under(up.Plan(data=2), models.gpt, padded(0), loss)
    flat = nn.Sequential(nn.Linear(16, 4))
    x = torch.randn(8, 16)
    y = torch.tensor([0, 1, 2, 3, 0, 1, 2, 9])
    run = up.parallelize(flat, up.Plan(data=2), optimizer=adamw, loss=nn.CrossEntropyLoss(ignore_index=9))
    (batch,) = run.shard([(x, y)])
    with pytest.raises(ValueError, match=r"ignored labels \(9\)"):
        run.step(batch)


def check_even_labels_and_means_over_rows_need_no_weight(folder: Path) -> None:
    even = [
        (x, torch.cat([y[:, :-1], torch.full_like(y[:, :1], -100)], 1)) for x, y in models.text_batches(4, 8)
    ]
    for plan in swept(PLANS[1::2], PLANS[::2]):
        same(plan, models.gpt, even, models.token_loss)

    def of_rows(logits: Tensor, targets: Tensor) -> Tensor:
        lost = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return (lost.sum(1) / (targets != -100).sum(1).clamp(min=1)).mean()

    same(up.Plan(data=2, micro_batches=3), models.gpt, padded(), of_rows, weigh="rows")


def check_wrong_weights_are_named(folder: Path) -> None:
    for weigh, says in (
        (lambda targets: targets, r"weigh returned a tensor of shape"),
        (lambda targets: -1.0, "weigh returned -1.0"),
        (lambda targets: "3", "weigh returned '3'"),
        (lambda targets: 0, "no label of this batch counts"),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            under(up.Plan(data=2), models.gpt, padded(), models.token_loss, weigh=weigh)
    with pytest.raises(TypeError, match="weigh is a int"):
        under(up.Plan(data=2), models.gpt, padded(), models.token_loss, weigh=3)
