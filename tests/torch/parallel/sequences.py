"""Plan(sequence=True): the losses, gradients and parameters of one process, and less memory. On two ranks."""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel import models, sweep
from parallel.plain_training import apart, begun, refused, same, under
from parallel.rows import Row

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


def loss(output: Any, targets: Tensor) -> Tensor:
    return models.token_loss(getattr(output, "logits", output), targets)


TEXT, VECTORS = models.text_batches(4, 4), models.vector_batches(2, 4)
PLANS = (PLAN, dataclasses.replace(PLAN, micro_batches=2), dataclasses.replace(PLAN, recompute=True, zero=1))
OF_A_BLOCK = {"1.block.out_proj", "1.block.fc2"}
NORMS = {"1.block.norm1", "1.block.norm2"}


def scatters(*paths: str) -> Any:
    return lambda run: {*paths} <= moves(run, "scatter")


def row(make: Any, holds: Any, given: Any = TEXT[:3], loss: Any = models.token_loss) -> Row:
    """Under several plans, with all gradients beside those of one process."""
    return Row(make, PLANS, given=given, loss=loss, holds=holds, gradients=True)


def cuts_a_block(run: up.Run) -> bool:
    return (
        moves(run, "scatter") >= OF_A_BLOCK
        and moves(run, "gather, sum") >= NORMS
        and "1.norm.weight" in run.cut.sums
    )


def cuts_gpt(run: up.Run) -> bool:
    return (
        {"1.out_proj", "1.fc2", "4.fc2"} <= moves(run, "scatter")
        and {"1.norm1", "1.norm2", "4.norm2"} <= moves(run, "gather, sum")
        and {"1.norm1.weight", "1.norm2.bias"} <= set(run.cut.sums)
    )


def benchmark() -> nn.Module:
    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    from gpt import GPT

    return GPT(layers=2, width=32, heads=4, context=16)


def mixed(how: str) -> Row:
    """What mixes positions gets all of them."""
    gathers = {"convolution": {"1.mix"}, "flat": set(), "none": set()}.get(how, {"1.block"})
    return Row(
        lambda: text(Mixed(how)), [PLAN], given=TEXT[:3], loss=models.token_loss, options={"check": True},
        holds=lambda run: moves(run, "scatter") >= OF_A_BLOCK and moves(run, "gather") == gathers,
    )  # fmt: skip


def hugging_face(kind: str, **more: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=models.VOCABULARY, hidden_size=WIDTH, intermediate_size=48, pad_token_id=0,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=models.TIME, **more,
    )  # fmt: skip
    return getattr(transformers, f"{kind}For{'MaskedLM' if kind == 'Bert' else 'CausalLM'}")(config)


def qwen2() -> nn.Module:
    return hugging_face("Qwen2", num_key_value_heads=2)


def bert() -> nn.Module:
    return hugging_face("Bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


TOKENS = torch.randint(256, (3, 4, 17), generator=torch.Generator().manual_seed(1))
TABLE = {
    "short": Row(
        lambda: text(Dropped(0.0)), [PLAN], given=TEXT[:2], loss=models.token_loss, holds=cuts_a_block,
        options={"check": True},
    ),
    "short: no positions": Row(
        models.mlp, [PLAN], given=VECTORS, holds=lambda run: not run.cut.forward_moves()
    ),
    "gpt": row(models.gpt, cuts_gpt, TEXT),
    "tied gpt": row(functools.partial(models.gpt, tied=True), scatters("4.fc2"), TEXT),
    **{
        f"an encoder, batch_first={first}": row(
            functools.partial(Pooled, batch_first=first), scatters("body.layers.1.linear2"), TEXT,
            first_target,
        )
        for first in (True, False)
    },
    "the GPT of the benchmarks": row(
        benchmark, scatters("blocks.1.linear2"), [(ids, torch.zeros(4)) for ids in TOKENS],
        lambda output, _: output.mean(),
    ),
    **{f"mixes by {how}": mixed(how) for how in ("convolution", "mean", "shift", "length", "flat", "none")},
    "a layer that cuts= leaves out": Row(
        models.gpt, refused={'cuts= does not name "1.fc2"': [PLAN]}, given=TEXT[:2], loss=models.token_loss,
        sample=None, options={"cuts": {"*.fc1": "column"}},
    ),
}  # fmt: skip
if sweep.HAVE_TRANSFORMERS:
    TABLE |= {
        "GPT-2": row(models.gpt2, scatters("transformer.h.0.mlp.c_proj")),
        "Llama": row(models.llama, scatters("model.layers.1.mlp.down_proj")),
        "Qwen2": row(qwen2, scatters("model.layers.1.self_attn.o_proj")),
        "BERT": row(
            bert, scatters("bert.encoder.layer.1.output.dense"),
            [({"input_ids": x}, y) for x, y in TEXT[:3]], loss,
        ),
    }  # fmt: skip


def check_dropout(folder: Path) -> None:
    """Each rank drops other positions, backward of recompute drops the same, and whole parameters agree."""
    batches = models.text_batches(3, 4)
    seen = {}
    for recompute in (False, True):
        plan = up.Plan(tensor=2, sequence=True, recompute=recompute)
        dropped = lambda: text(Dropped(0.3), Dropped(0.3))  # noqa: E731
        run, found = under(plan, dropped, batches, models.token_loss, sample=batches[0][0], check=True)
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
    noisy = lambda: text(models.Block(), Noise(), models.Block())  # noqa: E731
    run = begun(PLAN, noisy, models.token_loss, sample=batches[0][0], check=False)
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
        run = begun(PLAN, lambda: text(models.Block(), models.Block()), models.token_loss, sample=batch[0])
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
    run = begun(PLAN, lambda: text(Dropped(0.1)), models.token_loss, sample=batches[0][0])
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
    for given in (odd, [batches[0], odd[0]]):
        refused(says, PLAN, lengths, given, models.token_loss, sample=given[0][0])
