"""Models that compute their loss, batches as dicts, and means over all tokens: against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import unisono.parallel as up
from parallel import sweep
from parallel.plain_training import ScopedValue, adamw, apart, seeded
from parallel.program_stages import Skips, batch, loss
from parallel.run_features import in_group

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


def alone(make: Any, batches: list[dict[str, Tensor]]) -> ScopedValue:
    """What one process does, with the clipping of the plans."""
    model, losses, norms = seeded(make), [], []
    optimizer = adamw(list(model.parameters()))
    for one in batches:
        optimizer.zero_grad()
        value = model(**one)["loss"]
        value.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(value.item())
    return ScopedValue(losses, norms[0])


def compare(wanted: ScopedValue, run: up.Run, batches: list[Any]) -> None:
    losses, norms = [], []
    for one in run.shard(batches):
        losses.append(run.step(one))
        norms.append(run.grad_norm or 0.0)
    far = max(abs(a - b) / a for a, b in zip(wanted.losses, losses, strict=True))
    norm = abs(norms[0] - wanted.norm) / wanted.norm
    print(f"{run.plan}: losses {far:.1e}, norm {norm:.1e}", flush=True)
    limit = 1e-5 if run.plan.precision == "f32" else 3e-2
    assert far < limit, (losses, wanted.losses)
    assert norm < 10 * limit, (norms[0], wanted.norm)
    assert apart(run) < 1e-6


def check_the_models_own_loss_weighed_by_tokens(folder: Path) -> None:
    batches = padded()
    wanted = alone(OwnLoss, batches)
    for plan in PLANS:
        run = up.parallelize(
            seeded(OwnLoss), plan, optimizer=adamw, loss=None, weigh="tokens", sample=batches[0]
        )
        compare(wanted, run, batches)
    run = up.parallelize(seeded(OwnLoss), PLANS[0], optimizer=adamw, loss=None, sample=batches[0])
    with pytest.raises(ValueError, match='ignored labels.*weigh="tokens"'):
        run.step(next(iter(run.shard(batches))))
    run = up.parallelize(seeded(OwnLoss), PLANS[0], optimizer=adamw, loss=None)
    none = {key: value for key, value in batches[0].items() if key != "labels"}
    with pytest.raises(
        TypeError, match="loss=None takes the loss of the model's output, and this dict has none"
    ):
        run.step(next(iter(run.shard([none]))))


def check_rows_without_a_label(folder: Path) -> None:
    """The model's loss of such rows is NaN, a mean over none; it counts nothing."""
    batches = padded(2)
    batches[0]["labels"][:4] = -100
    wanted = alone(OwnLoss, batches)
    for plan in (*PLANS[:2], PLANS[3]):
        run = up.parallelize(
            seeded(OwnLoss), plan, optimizer=adamw, loss=None, weigh="tokens", sample=batches[0]
        )
        compare(wanted, run, batches)


def summed(output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = functional.cross_entropy(output["logits"].flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def check_a_loss_that_returns_its_count(folder: Path) -> None:
    batches = padded()
    wanted = alone(OwnLoss, batches)
    given = [({k: v for k, v in one.items() if k != "labels"}, one["labels"]) for one in batches]
    for plan in PLANS:
        run = up.parallelize(
            seeded(Skips), plan, optimizer=adamw, loss=summed, weigh="counted", sample=given[0][0]
        )
        compare(wanted, run, given)
        final = run.evaluate(next(iter(run.shard(given))))
        assert 0 < final < wanted.losses[0]
    with pytest.raises(ValueError, match="no label of this batch counts"):
        run.step((given[0][0], torch.full_like(given[0][1], -100)))
    run = up.parallelize(seeded(Skips), PLANS[0], optimizer=adamw, loss=summed, sample=given[0][0])
    with pytest.raises(TypeError, match='the loss returned a tuple.*weigh="counted"'):
        run.step(next(iter(run.shard([(given[0][0], given[0][0]["ids"])]))))
    for weigh, error in (("token", ValueError), (3, TypeError)):
        with pytest.raises(error, match="weigh is"):
            up.parallelize(seeded(Skips), PLANS[0], optimizer=adamw, loss=loss, weigh=weigh)


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
        wanted = alone(make, batches)
        for plan in PLANS[:4]:
            run = up.parallelize(
                seeded(make), plan, optimizer=adamw, loss=None, weigh="tokens", sample=batches[0]
            )
            compare(wanted, run, batches)


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
