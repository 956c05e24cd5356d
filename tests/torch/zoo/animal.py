"""What an animal of the zoo is: a small model, batches of it, and a loss. Batches, losses and configurations.

Inputs are what one calls the model with: a tensor, a tuple, or a dict. The loss is a mean over rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import own

WIDTH, HEADS, WORDS, TIME = own.WIDTH, own.HEADS, own.WORDS, own.TIME
Batch = tuple[Any, Any]


class Animal(NamedTuple):
    """A model, one batch of it, and its loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any, Any], Tensor]


ROWS = 4


def ids(generator: torch.Generator, time: int = TIME) -> Tensor:
    return torch.randint(2, WORDS, (ROWS, time), generator=generator)


def text(generator: torch.Generator) -> Batch:
    tokens = ids(generator, TIME + 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def masked(generator: torch.Generator) -> Batch:
    tokens, targets = text(generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, targets


def pair(generator: torch.Generator) -> Batch:
    tokens, targets = text(generator)
    return (ids(generator), tokens), targets


def seq2seq(generator: torch.Generator) -> Batch:
    tokens, targets = text(generator)
    return {"input_ids": ids(generator), "decoder_input_ids": tokens}, targets


def image(generator: torch.Generator, size: int = 8) -> Batch:
    return torch.randn(ROWS, 3, size, size, generator=generator), torch.randint(
        4, (ROWS,), generator=generator
    )


def token_loss(output: Any, targets: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def class_loss(output: Any, targets: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return functional.cross_entropy(logits.float(), targets)


def two_losses(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return token_loss(output["words"], targets) + 0.1 * class_loss(output["kind"], targets[:, 0] % 4)


def hugging_face(name: str, config: str, **more: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        settings = {
            "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 2 * TIME,
            "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
        } | more  # fmt: skip
        settings = {key: value for key, value in settings.items() if value is not None}
        return getattr(transformers, name)(getattr(transformers, config)(**settings))

    return make


def causal(name: str, config: str = "", batch: Any = text, **more: Any) -> Animal:
    return Animal(hugging_face(f"{name}ForCausalLM", f"{config or name}Config", **more), batch, token_loss)


STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
