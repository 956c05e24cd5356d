"""Models of Hugging Face on the tensor axis. On two ranks."""

from typing import Any

from torch import Tensor, nn

from parallel import models, sweep
from parallel.rows import Row
from parallel.tensor_table import BOTH, HEADS, WIDTH, text_row


def hugging_face(name: str, **more: Any) -> Any:
    import transformers

    kind = "Gemma3Text" if name == "Gemma3" else name
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=models.VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=models.TIME,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, **more,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config)


class Logits(nn.Module):
    """A model of Hugging Face that returns its logits."""

    def __init__(self, name: str, **more: Any) -> None:
        super().__init__()
        self.inner = hugging_face(name, head_dim=8, **more)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens, use_cache=False).logits


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
Q_NORM = "inner.model.layers.0.self_attn.q_norm.weight"
HEADS_OF_HUGGING_FACE = {f"*.self_attn.{x}_proj": "column" for x in "qkv"} | {"*.self_attn.o_proj": "row"}


def of_hugging_face() -> dict[str, Row]:
    """Those that the rules know, and norms of single heads."""
    rows = {
        name: text_row(make, trains=BOTH, holds=lambda run: run.cut.dims)
        for name, make in {
            "GPT-2": models.gpt2,
            "Llama": models.llama,
            "tied Llama": lambda: hugging_face("Llama", tie_word_embeddings=True),
            "Qwen2": lambda: hugging_face("Qwen2"),
            "Mistral": lambda: hugging_face("Mistral", sliding_window=None),
        }.items()
    }
    for name, more in (("Qwen3", {}), ("Gemma3", {}), ("Qwen3Moe", EXPERTS)):
        for cuts in (None, HEADS_OF_HUGGING_FACE):
            rows[f"{name}{' by hand' if cuts else ''}"] = text_row(
                lambda name=name, more=more: Logits(name, **more),
                "inner.model.layers.0.self_attn.q_proj.weight", cuts=cuts,
                holds=lambda run: Q_NORM in run.cut.sums,
            )  # fmt: skip
    return rows


TABLE = of_hugging_face() if sweep.HAVE_TRANSFORMERS else {}
