"""Models that compute their loss, batches as dicts, and means over all tokens: against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import unisono.parallel as up
from effort import swept
from parallel import sweep
from parallel.plain_training import begun, refused, same
from parallel.stage_table import Skips, batch, loss

PLANS = (
    up.Plan(data=2, micro_batches=2, clip=0.5),
    up.Plan(data=2, zero=3, micro_batches=2, clip=0.5),
    up.Plan(tensor=2, micro_batches=2, clip=0.5),
    up.Plan(pipeline=2, micro_batches=4, clip=0.5),
    up.Plan(data=2, micro_batches=3, precision="bf16", clip=0.5),
)


class OwnLoss(Skips):
    """Returns its loss, with labels; those of -100 do not count."""

    def forward(self, *, labels: Tensor | None = None, **inputs: Tensor) -> dict[str, Tensor]:
        output = super().forward(**inputs)
        if labels is not None:
            output["loss"] = loss(output, labels)
        return output


def padded(count: int = 3, rows: int = 8) -> list[dict[str, Tensor]]:
    """The number of labels differs from row to row."""
    generator, found = torch.Generator().manual_seed(4), []
    for _ in range(count):
        inputs, targets = batch(generator, rows)
        ends = torch.randint(1, targets.shape[1] + 1, (rows,), generator=generator)
        found.append(
            inputs | {"labels": targets.masked_fill(torch.arange(targets.shape[1]) >= ends[:, None], -100)}
        )
    return found


def same_own(make: Any, batches: list[Any], plans: Any) -> None:
    for plan in plans:
        far = 0.7 if plan.precision == "bf16" else 2e-4
        same(plan, make, batches, None, weigh="tokens", sample=batches[0], tolerance=far)


def check_the_models_own_loss_weighed_by_tokens(folder: Path) -> None:
    batches = padded()
    same_own(OwnLoss, batches, swept(PLANS[1:4], (PLANS[0], PLANS[4])))
    refused('ignored labels.*weigh="tokens"', PLANS[0], OwnLoss, batches, None, sample=batches[0])
    none = [{key: value for key, value in batches[0].items() if key != "labels"}]
    refused(
        "loss=None takes the loss of the model's output, and this dict has none",
        PLANS[0],
        OwnLoss,
        none,
        None,
    )


def check_rows_without_a_label(folder: Path) -> None:
    """The model's loss of such rows is NaN, a mean over none; it counts nothing."""
    batches = padded(2)
    batches[0]["labels"][:4] = -100
    same_own(OwnLoss, batches, (*PLANS[:2], PLANS[3]))


def summed(output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = functional.cross_entropy(output["logits"].flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def check_a_loss_that_returns_its_count(folder: Path) -> None:
    given = [({k: v for k, v in one.items() if k != "labels"}, one["labels"]) for one in padded()]
    for plan in swept(PLANS[3:0:-2], PLANS[::2]):
        far = 0.7 if plan.precision == "bf16" else 2e-4
        run = same(plan, Skips, given, summed, weigh="counted", sample=given[0][0], tolerance=far)
        assert 0 < run.evaluate(next(iter(run.shard(given)))) < 25  # as before the first step
    with pytest.raises(ValueError, match="no label of this batch counts"):
        run.step((given[0][0], torch.full_like(given[0][1], -100)))
    whole = [(given[0][0], given[0][0]["ids"])]
    refused('the loss returned a tuple.*weigh="counted"', PLANS[0], Skips, whole, summed, sample=given[0][0])
    for weigh, error in (("token", ValueError), (3, TypeError)):
        with pytest.raises(error, match="weigh is"):
            begun(PLANS[0], Skips, loss, weigh=weigh)


def check_hugging_faces_own_losses(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    import transformers

    small = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 8, "vocab_size": 12}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tiny = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    models = (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, **still)),
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(**tiny, vocab_size=12, decoder_start_token_id=0, pad_token_id=0)
        ),
    )
    batches = [
        {"input_ids": one["ids"], "attention_mask": torch.ones_like(one["ids"]), "labels": one["labels"]}
        for one in padded()
    ]
    for make in models:
        same_own(make, batches, PLANS[:4])
