"""A byte-level GPT of PyTorch's own layers: the model of the demo and of the benchmarks.

With `looked_back`, a position starts from the embeddings of its own byte and of the few before it. A single
byte carries little information; with this the model learns words in the first minute, not which byte came
before (loss 1.8 instead of 2.2 nats per byte after 300 steps of 2048 bytes).

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GPT", "VOCABULARY", "generate"]

VOCABULARY = 256


class GPT(nn.Module):
    """Next-byte predictor; `forward` returns the mean cross-entropy in nats per byte.

    Args:
        looked_back: earlier bytes whose embeddings are added to a position's own.
    """

    def __init__(
        self, layers: int = 4, width: int = 160, heads: int = 5, context: int = 128, looked_back: int = 2
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.earlier = nn.ModuleList(nn.Embedding(VOCABULARY, width) for _ in range(looked_back))
        self.position = nn.Parameter(torch.zeros(context, width))
        options: dict[str, Any] = {
            "dropout": 0.0,
            "activation": functional.gelu,
            "batch_first": True,
            "norm_first": True,
        }
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_a_branch = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(parameter, std=0.02 * ((2 * layers) ** -0.5 if ends_a_branch else 1.0))

    def logits(self, tokens: Tensor) -> Tensor:
        """Shapes: tokens [batch, time] of int64 -> [batch, time, 256]."""
        time = tokens.shape[1]
        x = self.embedding(tokens) + self.position[:time]
        for distance, embedding in enumerate(self.earlier, start=1):
            x = x + functional.pad(embedding(tokens[:, :-distance]), (0, 0, distance, 0))
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return functional.linear(self.norm(x), self.embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Shapes: tokens [batch, time + 1]: predicts tokens[:, 1:] from tokens[:, :-1]."""
        logits = self.logits(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def generate(model: GPT, prompt: bytes, nbytes: int, *, temperature: float, seed: int) -> bytes:
    """Continue `prompt` by `nbytes` sampled bytes; the result includes the prompt."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)])
    for _ in range(nbytes):
        logits = model.logits(tokens[:, -model.context :])[0, -1]
        probabilities = functional.softmax(logits / temperature, dim=-1)
        following = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, following[None]], dim=1)
    return bytes(tokens[0].tolist())
