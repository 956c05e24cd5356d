"""The small transformer that the training examples share, its data, and what one process gets from them.

All is seeded: every rank can make the whole model and the whole batch, and takes its own part. So each
example can run the same training in one process and compare its losses, step by step, with the ranks'.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 32, 4, 4
STEPS, BATCH, TIME = 8, 24, 16  # 24 sequences: a whole number for 1, 2, 3, 4 and 6 ranks
TOLERANCE = 1e-5  # nats, of losses around 4: ranks add f32 numbers in another order than one process does


class Embed(nn.Module):
    """Tokens and their positions, as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TIME, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position.weight


class Block(nn.Module):
    """Attention, then two linear layers, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.attention_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp_in, self.mlp_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out(self.attention(self.norm_attention(x)))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.norm_mlp(x))))

    def attention(self, x: Tensor) -> Tensor:
        """As many heads as the linear layers give: all, or this rank's under tensor parallelism."""
        split = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in split)  # [batch, heads, time, width of a head]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


def transformer() -> nn.Sequential:
    """The same parameters every time. Shapes: tokens [batch, TIME] -> logits [batch, TIME, VOCABULARY]."""
    torch.manual_seed(0)
    last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
    return nn.Sequential(Embed(), *[Block() for _ in range(LAYERS)], last)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD, because Adam would not notice gradients that are all too large by the same factor."""
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def batches() -> tuple[Tensor, Tensor]:
    """Sequences that count by 1 to 4, and the same one token later. Shapes: [STEPS, BATCH, TIME] each."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(VOCABULARY, (STEPS, BATCH, 1), generator=generator)
    stride = torch.randint(1, 5, (STEPS, BATCH, 1), generator=generator)
    tokens = (first + stride * torch.arange(TIME + 1)) % VOCABULARY
    return tokens[..., :-1], tokens[..., 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per token."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def one_process() -> list[float]:
    """The losses of training without any other rank."""
    model, (inputs, targets) = transformer(), batches()
    optimizer, losses = optimizer_of(model), []
    for x, y in zip(inputs, targets, strict=True):
        losses.append(loss := loss_of(model(x), y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss.item() for loss in losses]


def assert_same_losses(losses: list[float]) -> None:
    """Compare with one process, and say by how much they differ."""
    worst = max(abs(ours - alone) for ours, alone in zip(losses, one_process(), strict=True))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, at most {worst:.1e} from one process's", flush=True)
    assert worst < TOLERANCE
