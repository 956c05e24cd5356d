"""Small models, seeded, and batches for them. Nothing here knows of ranks."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up

VOCABULARY, WIDTH, HEADS, LAYERS, TIME = 128, 32, 4, 4, 16
SCALES = {"of_file": 1.0, "by_name": 1.0}
TEXT = Path(__file__).resolve().parents[3] / "LICENSE"


def scale_of_file() -> float:
    """A number that a program changes between steps."""
    return SCALES["of_file"]


def scale_by_name() -> float:
    """Likewise, of a function that is imported by name."""
    return SCALES["by_name"]


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TIME, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position.weight


class Block(nn.Module):
    """The names of its layers are those the rules know."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class Pair(nn.Module):
    """Two layers, and what a variant does before them and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Any:
        self.before(x)
        return self.fc2(self.between(self.fc1(x)))

    def before(self, x: Tensor) -> None:
        """Nothing."""

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def gpt(tied: bool = False) -> nn.Module:
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
    model = nn.Sequential(Embed(), *(Block() for _ in range(LAYERS)), head)
    nn.init.normal_(model[0].token.weight, std=0.1)
    if tied:
        head[1].weight = model[0].token.weight
    return model


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "vocab_size": VOCABULARY,
        "n_positions": TIME,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
    }
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
    }
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": TIME}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def text_batches(steps: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Characters of a real text, and the same one character later."""
    codes = torch.tensor([min(ord(c), VOCABULARY - 1) for c in TEXT.read_text()])
    generator = torch.Generator().manual_seed(1)
    at = torch.randint(len(codes) - TIME - 1, (steps, rows, 1), generator=generator) + torch.arange(TIME + 1)
    return [(codes[here[:, :-1]], codes[here[:, 1:]]) for here in at]


def image_batches(steps: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(steps, rows, 1, 8, 8, generator=generator)
    return [(image, image.flatten(1).view(rows, 4, 16).sum(2).argmax(1)) for image in x]


def vector_batches(steps: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(steps, rows, 16, generator=generator)
    return [(vector, vector[:, :4].argmax(1)) for vector in x]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Case(NamedTuple):
    """A model, its batches and its loss."""

    make: Any
    batches: Any
    loss: Any
    pieces: int
    tensor: int  # the widest tensor axis it can have


CASES = {
    "gpt": Case(gpt, text_batches, token_loss, 6, 4),
    "tied": Case(lambda: gpt(tied=True), text_batches, token_loss, 6, 4),
    "mlp": Case(mlp, vector_batches, functional.cross_entropy, 17, 8),
    "conv": Case(conv, image_batches, functional.cross_entropy, 9, 1),
    "gpt2": Case(gpt2, text_batches, token_loss, 6, 4),
    "llama": Case(llama, text_batches, token_loss, 6, 4),
}


def make(name: str) -> nn.Module:
    """The same parameters every time."""
    torch.manual_seed(0)
    return CASES[name].make()


def optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    if name == "compressed":
        return up.CompressedAdam(parameters, lr=1e-3, weight_decay=0.1)
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
