"""Models with experts. Nothing here knows of ranks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, WORDS, TIME, EXPERTS, CHOSEN = 16, 32, 6, 4, 2
Make = Callable[[], nn.Module]


class Router(nn.Module):
    """Indices and weights of the chosen experts.

    Args:
        favourite: an expert that takes every row; None: the best ones do.
        capacity: rows that an expert takes at most, of those that come together; None: all.
    """

    def __init__(self, *, favourite: int | None = None, capacity: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.favourite, self.capacity = favourite, capacity

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scores = functional.linear(rows, self.weight).softmax(-1)
        weight, index = scores.topk(CHOSEN, -1)
        if self.favourite is not None:
            index, weight = torch.full_like(index[:, :1], self.favourite), scores[:, self.favourite, None]
        if self.capacity is not None:
            place = functional.one_hot(index, EXPERTS).flatten(0, 1).cumsum(0).view(*index.shape, EXPERTS)
            full = place.gather(-1, index.unsqueeze(-1)).squeeze(-1) > self.capacity
            weight = weight.masked_fill(full, 0.0)
            index = index.masked_fill(full, EXPERTS)
        return index, weight


def passed_on(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As Hugging Face's decorator of experts: the signature tells names that only places have."""

    @functools.wraps(forward)
    def passed(*args: Any, weight: Tensor) -> Tensor:
        return forward(*args, weight)

    return passed


class Stacked(nn.Module):
    """Experts as Hugging Face writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 24, WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 24) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 24) * 0.3)

    @passed_on
    def forward(self, rows: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        output = torch.zeros_like(rows)
        for expert in range(self.num_experts):
            row, slot = torch.where(index == expert)
            inner = functional.gelu(functional.linear(rows[row], self.up[expert], self.bias[expert]))
            made = functional.linear(inner, self.down[expert]) * weight[row, slot, None]
            output = output.index_add(0, row, made.to(output.dtype))
        return output


class Expert(nn.Module):
    """One expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(rows)))


class Layer(nn.Module):
    """Experts of either kind, and one that every row takes. drop: positive rows have no expert."""

    def __init__(self, experts: nn.Module, *, drop: bool = False, **router: Any) -> None:
        super().__init__()
        self.gate, self.experts, self.shared = Router(**router), experts, Expert()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        index, weight = self.gate(rows)
        if self.drop:
            index = torch.where(rows[:, :1] > 0, EXPERTS, index)
        if isinstance(self.experts, Stacked):
            output = self.experts(rows, index, weight=weight)
        else:
            output = torch.zeros_like(rows)
            for number, expert in enumerate(self.experts):
                row, slot = torch.where(index == number)
                if len(row):
                    output.index_add_(0, row, (expert(rows[row]) * weight[row, slot, None]).to(output.dtype))
        return x + (output + self.shared(rows)).view_as(x)


class ListedLayer(Layer):
    """A layer whose experts have a name that says nothing."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList())
        del self.experts
        self.branches = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("branches" if name == "experts" else name)


def stacked(**more: Any) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), Layer(Stacked(), **more), nn.Tanh(), Layer(Stacked(), **more),
        nn.Linear(WIDTH, WORDS),
    )  # fmt: skip


def experts() -> nn.ModuleList:
    return nn.ModuleList(Expert() for _ in range(EXPERTS))


def listed(**more: Any) -> nn.Module:
    def layer() -> nn.Module:
        return Layer(experts(), **more)

    return nn.Sequential(nn.Embedding(WORDS, WIDTH), layer(), nn.Tanh(), layer(), nn.Linear(WIDTH, WORDS))


def unnamed() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), ListedLayer(), nn.Linear(WIDTH, WORDS))


def hugging_face(name: str, **more: Any) -> Make:
    """A small model of Hugging Face whose router is not as even as a new one's."""

    def make() -> nn.Module:
        import transformers

        sizes = {
            "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2 * TIME,
            "num_experts_per_tok": CHOSEN, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
        } | more  # fmt: skip
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))
        with torch.no_grad():
            for key, value in model.named_parameters():
                if "experts" in key or key.endswith("gate.weight"):
                    value.normal_(std=0.5)
        return model

    return make


SMALL = {"moe_intermediate_size": 12, "num_experts": EXPERTS}
LATENT = {
    "moe_intermediate_size": 12, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
HUGGING_FACE: dict[str, Make] = {
    "mixtral": hugging_face("Mixtral", num_local_experts=EXPERTS),
    "qwen2-moe": hugging_face("Qwen2Moe", shared_expert_intermediate_size=12, **SMALL),
    "qwen3-moe": hugging_face("Qwen3Moe", head_dim=8, norm_topk_prob=True, **SMALL),
    "deepseek-v2": hugging_face("DeepseekV2", **LATENT),
    "deepseek-v3": hugging_face("DeepseekV3", n_group=2, topk_group=1, **LATENT),
    "gpt-oss": hugging_face("GptOss", num_local_experts=EXPERTS, head_dim=8, sliding_window=4),
    "granite": hugging_face("GraniteMoe", num_local_experts=EXPERTS),
    "olmoe": hugging_face("Olmoe", num_experts=EXPERTS),
    "glm-4": hugging_face("Glm4Moe", head_dim=8, **LATENT),
}  # fmt: skip


def half_dropped(make: Make) -> Make:
    """A model whose first layer has no expert for the first half of the words."""

    def made() -> nn.Module:
        model: Any = make(drop=True)  # type: ignore[call-arg]
        with torch.no_grad():
            model[0].weight[:, 0] = torch.where(torch.arange(WORDS) < WORDS // 2, 3.0, -3.0)
        return model

    return made


def batches(steps: int, rows: int = 8, *, halves: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Random words; with `halves` the first half of the rows has words of the first half."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, WORDS, (steps, 2, rows, TIME), generator=generator)
    if halves:
        later = torch.arange(rows) >= (rows + 1) // 2
        tokens = tokens % (WORDS // 2) + later.unsqueeze(1) * (WORDS // 2)
    return [(inputs, targets) for inputs, targets in tokens]


def loss(output: Any, targets: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
