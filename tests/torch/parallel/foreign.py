"""Models whose names fit and whose code does not, and cuts by names: refused by name, or trained right."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel import models, sweep
from parallel.plain_training import adamw, same, same_gradients, under
from parallel.run_features import in_group

WIDTH, HEADS = models.WIDTH, models.HEADS
TENSOR = up.Plan(tensor=2)


class Mlp(nn.Module):
    """What is between its two layers mixes features, or has a parameter that all ranks hold."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 4)
        self.between = between
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if self.between == "softmax":
            x = x.softmax(-1)
        elif self.between == "parameter":
            x = torch.tanh(x * self.scale)
        return self.fc2(x) * (1.0 if self.between == "parameter" else self.scale)


class Attention(nn.Module):
    """Multi-head or multi-query attention; `fixed`: the number of heads is written, their width follows."""

    def __init__(self, *, fixed: bool = False, one_key: bool = False) -> None:
        super().__init__()
        keys = WIDTH // HEADS if one_key else WIDTH
        self.query, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, keys), nn.Linear(WIDTH, keys)
        self.shape = (HEADS, -1) if fixed else (-1, WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, self.shape).transpose(1, 2)
        shape = (1, -1) if self.key.out_features != WIDTH else self.shape
        k, v = (layer(x).unflatten(-1, shape).transpose(1, 2) for layer in (self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        return x + self.out_proj(mixed.transpose(1, 2).flatten(2))


class Thrice(nn.Module):
    """One block, three times."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(self.block(x)))


def text(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(models.Embed(), *blocks, nn.Linear(WIDTH, models.VOCABULARY))


def refused(make: Any, batches: Any, loss: Any, says: str, plan: up.Plan = TENSOR, **more: Any) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        under(plan, make, batches, loss, **more)
    print(caught.value, flush=True)


def proved(make: Any, batches: Any, loss: Any, *cut: str, plan: up.Plan = TENSOR, **more: Any) -> up.Run:
    """The recorded program proves a cut, these parameters are cut, and it trains as one process does."""
    run = same(plan, make, batches, loss, sample=batches[0][0], **more)
    for name in cut:
        assert name in run.cut.dims, (name, str(run.cut))
    return run


def check_what_mixes_features_between_two_layers_is_not_cut(folder: Path) -> None:
    batches = models.vector_batches(4, 8)
    pair, pair_names = {"fc1": "column", "fc2": "row"}, ("fc1.weight", "fc1.bias", "fc2.weight")
    says = r'"fc1" \(Linear\) cannot be cut by column: aten\._softmax needs all of it, at .*x\.softmax\(-1\)'
    refused(lambda: Mlp("softmax"), batches, functional.cross_entropy, says, cuts=pair)
    for between in ("softmax", "parameter"):
        run = proved(lambda b=between: Mlp(b), batches, functional.cross_entropy)
        if between == "softmax":
            assert run.cut.modules["fc1"] == "column, gathered"
            assert "_softmax needs all of it" in str(run.cut) or "gathered" in str(run.cut)
    run = proved(lambda: Mlp("parameter"), batches, functional.cross_entropy, *pair_names, cuts=pair)
    assert run.cut.sums == ["scale"], str(run.cut)
    proved(lambda: Mlp("nothing"), batches, functional.cross_entropy, *pair_names)


def check_heads_of_a_written_number(folder: Path) -> None:
    batches = models.text_batches(4, 4)
    by_hand = {"1.query": "column", "1.key": "column", "1.value": "column", "1.out_proj": "row"}
    by_hand |= {"2.fc1": "column", "2.fc2": "row"}
    make = lambda: text(Attention(fixed=True), models.Block())  # noqa: E731
    run = proved(make, batches, models.token_loss, "1.query.weight", "2.fc2.weight", cuts=by_hand)
    assert run.cut.sizes["1"]
    run = proved(make, batches, models.token_loss, "1.query.weight", "1.out_proj.weight", "2.fc1.weight")
    assert run.cut.sizes["1"], "the number of heads is halved while the module runs"
    whole = proved(make, batches, models.token_loss, "2.fc1.weight", cuts={"1.*": "whole"})
    assert "1.query.weight" not in whole.cut.dims
    proved(lambda: text(Attention(), models.Block()), batches, models.token_loss, "1.query.weight")


def check_a_block_that_is_used_three_times(folder: Path) -> None:
    batches = models.text_batches(4, 4)

    def thrice(block: nn.Module) -> nn.Module:
        return text(block, block, block)

    for make in (
        lambda: text(Thrice(models.Block())),
        lambda: text(Thrice(Attention(fixed=True))),
        lambda: thrice(models.Block()),
        lambda: thrice(Attention(fixed=True)),
    ):
        run = proved(make, batches, models.token_loss)
        assert any("query" in name for name in run.cut.dims), str(run.cut)

    def around() -> nn.Module:
        layer = nn.Linear(16, 16)
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), layer)

    vectors = models.vector_batches(4, 8)
    says = '"0" .Linear. cannot be cut by column: the model returns it'
    refused(around, vectors, functional.cross_entropy, says, cuts={"0": "column", "2": "row"})
    proved(around, vectors, functional.cross_entropy)


def check_multi_query_attention(folder: Path) -> None:
    batches = models.text_batches(4, 4)
    by_hand = {"1.query": "column", "1.out_proj": "row", "1.key": "whole", "1.value": "whole"}
    for cuts in (None, by_hand):
        make = lambda: text(Attention(one_key=True))  # noqa: E731
        run = proved(make, batches, models.token_loss, "1.query.weight", cuts=cuts)
        moved = {path for path, moves in run.cut.moves.items() if any(comes_out for comes_out, _ in moves)}
        assert {"1.key", "1.value"} <= moved


def hugging_face(name: str, **more: Any) -> Any:
    import transformers

    kind = "Gemma3Text" if name == "Gemma3" else name
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=models.VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=models.TIME,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, **more,
    )  # fmt: skip
    return lambda: getattr(transformers, f"{name}ForCausalLM")(config)


class Logits(nn.Module):
    """A model of Hugging Face that returns its logits."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.inner = make()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens, use_cache=False).logits


def check_norms_of_single_heads(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    batches = models.text_batches(6, 4)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    for name, more in (("Qwen3", {}), ("Gemma3", {}), ("Qwen3Moe", experts)):
        make = hugging_face(name, head_dim=8, **more)
        attention = "inner.model.layers.0.self_attn"
        run = proved(lambda m=make: Logits(m), batches, models.token_loss, f"{attention}.q_proj.weight")
        assert f"{attention}.q_norm.weight" in run.cut.sums
        by_hand = {f"*.self_attn.{x}_proj": "column" for x in "qkv"} | {"*.self_attn.o_proj": "row"}
        run = proved(lambda m=make: Logits(m), batches, models.token_loss, cuts=by_hand)
        assert f"{attention}.q_norm.weight" in run.cut.sums


def check_hugging_face_models_that_the_rules_know(folder: Path) -> None:
    if not sweep.HAVE_TRANSFORMERS:
        return
    batches = models.text_batches(6, 4)
    for make in (
        models.gpt2, models.llama, hugging_face("Llama", tie_word_embeddings=True), hugging_face("Qwen2"),
        hugging_face("Mistral", sliding_window=None),
    ):  # fmt: skip
        for plan in (TENSOR, up.Plan(tensor=2, zero=1)):
            assert same(plan, make, batches, models.token_loss).cut.dims


def check_given_cuts_with_other_axes(folder: Path) -> None:
    """Nothing else than these pairs is cut; and no sample is needed where the first layer tells inputs."""
    batches, pairs = models.text_batches(3, 4), {"*.fc1": "column", "*.fc2": "row"}
    for plan in (TENSOR, up.Plan(tensor=2, zero=1), up.Plan(tensor=2, sequence=True)):
        run = same(plan, models.gpt, batches, models.token_loss, cuts=pairs)
        assert run.cut.modules, plan
        assert all(path.endswith((".fc1", ".fc2")) for path in run.cut.modules), str(run.cut)
    same_gradients(TENSOR, models.gpt, batches[0], models.token_loss, cuts=pairs)


class Straight(torch.autograd.Function):
    """A gradient that its forward does not tell."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (1.0 + grad.norm())


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(Straight.apply(self.fc1(x)))


def check_a_backward_that_the_program_has_written(folder: Path) -> None:
    run = proved(Own, models.vector_batches(3, 8), functional.cross_entropy)
    assert run.cut.modules.get("fc2") != "row", str(run.cut)


class Evaluated(nn.Module):
    """Mixes features where it is evaluated, and only there."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.fc1(x)
        return self.fc2(inner if self.training else inner.softmax(-1))


def check_an_evaluation_that_runs_another_program(folder: Path) -> None:
    batches = models.vector_batches(2, 8)
    run = proved(Evaluated, batches, functional.cross_entropy, "fc1.weight", "fc2.weight")
    run.model.eval()
    with pytest.raises(
        ValueError, match=r"this batch runs another program of Evaluated .*_softmax needs all"
    ):
        run.evaluate(batches[0])
    run.model.train()
    run.step(batches[0])
    run = proved(models.gpt, models.text_batches(2, 4), models.token_loss)
    run.model.eval()
    run.evaluate(models.text_batches(2, 4)[0])


def check_a_program_that_depends_on_data(folder: Path) -> None:
    class Data(Own):
        def forward(self, x: Tensor) -> Tensor:
            if x.abs().sum() > 0:
                x = x + 1
            return self.fc2(self.fc1(x))

    batches = models.vector_batches(2, 8)
    says = r"Data does what depends on the values of a tensor, .* at .*foreign\.py:\d+: if x\.abs\(\)"
    refused(Data, batches, functional.cross_entropy, says, sample=batches[0][0])
    same(up.Plan(data=2, zero=1), Data, batches, functional.cross_entropy)


def check_ranks_of_a_tensor_group_need_the_same_rows(folder: Path) -> None:
    for plan in (TENSOR, up.Plan(pipeline=2), up.Plan(pipeline=2, micro_batches=2)):
        run = up.parallelize(models.gpt(), plan, optimizer=adamw, loss=models.token_loss)
        with pytest.raises(ValueError, match=r"give different rows.*run\.shard"):
            run.step(models.text_batches(2, 4)[dist.get_rank()])
        run.step(models.text_batches(2, 4)[0])


def check_a_model_that_cannot_be_copied(folder: Path) -> None:
    def make() -> nn.Module:
        model = models.gpt()
        model.lock = threading.Lock()
        return model

    batches = models.text_batches(2, 4)
    pairs = {"*.fc1": "column", "*.fc2": "row"}
    for more in ({"cuts": pairs}, {"sample": batches[0][0]}):
        with pytest.raises(ValueError, match=r"Sequential cannot be copied .* cannot be recorded"):
            under(TENSOR, make, batches, models.token_loss, **more)


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
