"""Plan(sequence=True): the losses, gradients and parameters of one process, and less memory. On two ranks."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel import models, sweep
from parallel.plain_training import adamw, apart, same, same_gradients, under
from parallel.run_features import in_group

PLAN = up.Plan(tensor=2, sequence=True)
WIDTH = models.WIDTH


class Dropped(nn.Module):
    """A block with a dropout of its own after each branch."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.block, self.drop, self.norm = models.Block(), nn.Dropout(p), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.norm(self.block(x)))


class Pooled(nn.Module):
    """An encoder of PyTorch's own layers; the first position decides."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.words = models.Embed()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=batch_first)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.first, self.head = batch_first, nn.Linear(WIDTH, models.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = self.body(x) if self.first else self.body(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x[:, 0])


class Mixed(nn.Module):
    """What is between two cuts mixes positions: a convolution, a mean, a shift, and a written length."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.block, self.after, self.how = models.Block(), models.Block(), how
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        if self.how == "convolution":
            x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        elif self.how == "mean":
            x = x - x.mean(1, keepdim=True)
        elif self.how == "shift":
            x = x + functional.pad(x[:, :-1], (0, 0, 1, 0))
        elif self.how == "length":
            x = x.reshape(-1, models.TIME, WIDTH) * x.shape[1]
        elif self.how == "flat":
            x = x.flatten(0, 1).tanh().view(*x.shape)
        elif self.how == "functional":
            x = functional.dropout(x, 0.1, self.training)
        return self.after(x)


def text(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(models.Embed(), *blocks, nn.Linear(WIDTH, models.VOCABULARY))


def first_target(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output, targets[:, 0])


def moves(run: up.Run, kind: str) -> set[str]:
    """The modules that make moves of a kind."""
    return {path for path, here in run.cut.moves.items() for move in here.values() if move.kind == kind}


def trained(make: Any, batches: Any, loss: Any = models.token_loss, **more: Any) -> up.Run:
    """Train under several plans, and compare all gradients with those of one process."""
    for plan in (
        PLAN,
        up.Plan(tensor=2, sequence=True, micro_batches=2),
        up.Plan(tensor=2, sequence=True, recompute=True, zero=1),
    ):
        run = same(plan, make, batches, loss, sample=batches[0][0], **more)
    same_gradients(PLAN, make, batches[0], loss, sample=batches[0][0], **more)
    return run


def check_a_short_training(folder: Path) -> None:
    batches = models.text_batches(2, 4)
    run = same(PLAN, lambda: text(Dropped(0.0)), batches, models.token_loss, sample=batches[0][0], check=True)
    assert {"1.block.out_proj", "1.block.fc2"} <= moves(run, "scatter"), str(run.cut)
    assert {"1.block.norm1", "1.block.norm2"} <= moves(run, "gather, sum"), str(run.cut)
    assert "1.norm.weight" in run.cut.sums
    vectors = models.vector_batches(2, 4)
    run = same(PLAN, models.mlp, vectors, functional.cross_entropy, sample=vectors[0][0])  # no positions
    assert not run.cut.forward_moves()


def check_models_of_our_own(folder: Path) -> None:
    batches = models.text_batches(4, 4)
    run = trained(models.gpt, batches)
    assert {"1.out_proj", "1.fc2", "4.fc2"} <= moves(run, "scatter"), str(run.cut)
    assert {"1.norm1", "1.norm2", "4.norm2"} <= moves(run, "gather, sum"), str(run.cut)
    assert {"1.norm1.weight", "1.norm2.bias"} <= set(run.cut.sums)
    trained(functools.partial(models.gpt, tied=True), batches)
    for batch_first in (True, False):
        make = functools.partial(Pooled, batch_first=batch_first)
        run = trained(make, batches, first_target)
        assert "body.layers.1.linear2" in moves(run, "scatter"), str(run.cut)


def check_a_model_of_the_benchmarks(folder: Path) -> None:
    import sys

    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    from gpt import GPT

    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randint(256, (4, 17), generator=generator), torch.zeros(4)) for _ in range(3)]
    make = functools.partial(GPT, layers=2, width=32, heads=4, context=16)
    run = trained(make, batches, lambda output, _: output.mean())
    assert "blocks.1.linear2" in moves(run, "scatter"), str(run.cut)


def check_models_of_hugging_face(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    import transformers

    ids = models.text_batches(3, 4)
    sizes = {
        "vocab_size": models.VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "pad_token_id": 0,
    }
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": models.TIME}

    def qwen2() -> Any:
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, num_key_value_heads=2))

    def bert() -> Any:
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **none))

    for make, ends in (
        (models.gpt2, "transformer.h.0.mlp.c_proj"),
        (models.llama, "model.layers.1.mlp.down_proj"),
        (qwen2, "model.layers.1.self_attn.o_proj"),
        (bert, "bert.encoder.layer.1.output.dense"),
    ):
        batches = [({"input_ids": x}, y) for x, y in ids] if make is bert else ids
        run = trained(make, batches, loss if make is bert else models.token_loss)
        assert ends in moves(run, "scatter"), str(run.cut)


def loss(output: Any, targets: Tensor) -> Tensor:
    return models.token_loss(getattr(output, "logits", output), targets)


def check_what_mixes_positions_gets_all_of_them(folder: Path) -> None:
    batches = models.text_batches(3, 4)
    for how in ("convolution", "mean", "shift", "length", "flat", "none"):
        run = same(
            PLAN,
            lambda h=how: text(Mixed(h)),
            batches,
            models.token_loss,
            sample=batches[0][0],
            check=True,
        )
        assert {"1.block.out_proj", "1.block.fc2"} <= moves(run, "scatter"), (how, str(run.cut))
        gathers = {"convolution": {"1.mix"}, "flat": set(), "none": set()}.get(how, {"1.block"})
        assert moves(run, "gather") == gathers, (how, str(run.cut))


def check_dropout(folder: Path) -> None:
    """Each rank drops other positions, backward of recompute drops the same, and whole parameters agree."""
    batches = models.text_batches(3, 4)
    seen = {}
    for recompute in (False, True):
        plan = up.Plan(tensor=2, sequence=True, recompute=recompute)
        run, found = under(
            plan,
            lambda: text(Dropped(0.3), Dropped(0.3)),
            batches,
            models.token_loss,
            sample=batches[0][0],
            check=True,
        )
        assert apart(run) < 1e-6
        assert set(run.cut.draws) == {"1.drop", "2.drop"}, run.cut.draws
        seen[recompute] = found.losses
    torch.testing.assert_close(seen[False], seen[True])

    run, _ = under(PLAN, lambda: text(Mixed("functional")), batches, models.token_loss, sample=batches[0][0])
    assert apart(run) < 1e-6
    assert not run.cut.draws  # it draws in a module that does more
    assert "not in a module of its own" in str(run.cut)

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            noise.append(nn.functional.dropout(torch.ones_like(x), 0.5))
            return x * noise[-1]

    noise: list[Tensor] = []
    run = up.parallelize(
        text(models.Block(), Noise(), models.Block()),
        PLAN,
        optimizer=adamw,
        loss=models.token_loss,
        sample=batches[0][0],
        check=False,
    )
    noise.clear()
    run.step(batches[0])
    (mine,) = noise
    assert mine.shape[1] == models.TIME // 2
    every = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(every, mine.detach())
    assert not torch.equal(*every)


def check_what_is_gathered_is_not_kept(folder: Path) -> None:
    """In backward each input of layers is gathered once more, also that of one row."""
    batches = models.text_batches(1, 2)
    for batch in (batches[0], tuple(part[:1] for part in batches[0])):
        run = up.parallelize(
            text(models.Block(), models.Block()),
            PLAN,
            optimizer=adamw,
            loss=models.token_loss,
            sample=batch[0],
        )
        run.step(batch, watch=True)
        counts = dict.fromkeys(("1.norm1", "2.norm2", "1.fc2"), 0)
        for call in run.explain():
            if call.operation == "all_gather" and call.where in counts:
                counts[call.where] += 1
        assert counts == {"1.norm1": 2, "2.norm2": 2, "1.fc2": 1}, (counts, run.explain())


def check_low_precision(folder: Path) -> None:
    batches = models.text_batches(4, 4)
    for precision in ("bf16", "fp16"):
        found = {}
        for sequence in (False, True):
            plan = up.Plan(tensor=2, sequence=sequence, precision=precision)
            run, seen = under(plan, models.gpt, batches, models.token_loss, sample=batches[0][0])
            assert run.skipped == 0 or precision == "fp16"
            found[sequence] = seen.losses
        torch.testing.assert_close(found[True], found[False], atol=1e-2, rtol=0)


def check_evaluation_and_other_lengths(folder: Path) -> None:
    batches = models.text_batches(2, 4)
    run = up.parallelize(
        text(Dropped(0.1)), PLAN, optimizer=adamw, loss=models.token_loss, sample=batches[0][0]
    )
    run.step(batches[0])
    run.model.eval()
    mean = run.evaluate(batches[0])
    run.model.train()
    assert 0 < mean < 10
    half = [(x[:, : models.TIME // 2], y[:, : models.TIME // 2]) for x, y in batches]

    class Any_(nn.Module):  # a table of positions for every length
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(models.VOCABULARY, WIDTH)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.token(tokens)

    def lengths() -> nn.Module:
        return nn.Sequential(Any_(), models.Block(), nn.Linear(WIDTH, models.VOCABULARY))

    same(PLAN, lengths, [*batches, *half], models.token_loss, sample=batches[0][0])
    odd = [(x[:, :7], y[:, :7]) for x, y in batches]
    says = "tensor=2 does not divide 7 positions. Pad the sequences to a multiple of 2"
    with pytest.raises(ValueError, match=says):
        under(PLAN, lengths, odd, models.token_loss, sample=odd[0][0])
    with pytest.raises(ValueError, match=says):
        under(PLAN, lengths, [batches[0], odd[0]], models.token_loss, sample=batches[0][0])


def check_what_is_refused(folder: Path) -> None:
    batches = models.text_batches(2, 4)
    with pytest.raises(ValueError, match='cuts= does not name "1.fc2"'):
        under(PLAN, models.gpt, batches, models.token_loss, cuts={"*.fc1": "column"})
    vectors = models.vector_batches(2, 4)
    run = same(PLAN, models.mlp, vectors, functional.cross_entropy, sample=vectors[0][0])  # no positions
    assert not run.cut.forward_moves()


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
