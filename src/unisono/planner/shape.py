"""A transformer as numbers: what it has, what it computes. Nothing here knows ranks beyond a tensor axis."""

from __future__ import annotations

from typing import Any

import msgspec

from unisono.engine.base.validation import flag, whole

__all__ = ["FAMILIES", "TransformerShape", "shape_of"]

MOST, MOST_LAYERS = 1 << 28, 1 << 14
NUMBERS = ("layers", "hidden", "heads", "vocab", "sequence", "kv_heads", "ffn", "head_size", "positions")
ATTENTIONS = ("unfused", "fused")
BIASES = ("all", "heads", "none")

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"gated": True, "biases": "none", "tied": False, "dropout": False, "attention": "fused"},
}
"""What models of a family have in common; the defaults of `TransformerShape` are those of gpt."""


class TransformerShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer of equal layers.

    Attributes:
        layers, hidden, heads, vocab: as everybody calls them.  sequence: tokens of a sequence.
        kv_heads: heads of keys and values; 0: as many as `heads`.
        ffn: width of the MLP; 0: 4 x hidden.
        head_size: of a head; 0: hidden / heads.
        positions: rows of a learned table of positions; 0: none.
        gated: the MLP has a gate, so three matrices in place of two (SwiGLU).
        biases: "all": matrices and norms have them (LayerNorm); "heads": queries, keys and values; "none".
        tied: the output matrix is the table of tokens.
        dropout: three masks per layer.
        attention: "unfused" writes the scores, sequence x sequence for each head; "fused" does not
            (FlashAttention).

    Example: TransformerShape(layers=12, hidden=768, heads=12, vocab=50257, sequence=1024, positions=1024) is
    GPT-2; its `parameters` are 124,439,808.
    Raises:
        TypeError, ValueError: numbers that no transformer has.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    kv_heads: int = 0
    ffn: int = 0
    head_size: int = 0
    positions: int = 0
    gated: bool = False
    biases: str = "all"
    tied: bool = True
    dropout: bool = True
    attention: str = "unfused"

    def __post_init__(self) -> None:
        for name in NUMBERS:
            least = 0 if name in ("kv_heads", "ffn", "head_size", "positions") else 1
            number = whole(getattr(self, name), name, least, MOST_LAYERS if name == "layers" else MOST)
            msgspec.structs.force_setattr(self, name, int(number))  # NumPy's would overflow
        for name in ("gated", "tied", "dropout"):
            flag(getattr(self, name), name)
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention is {self.attention!r}, expected {' or '.join(ATTENTIONS)}")
        if self.biases not in BIASES:
            raise ValueError(f"biases is {self.biases!r}, expected {', '.join(BIASES)}")
        if not self.head_size and self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}")
        if self.heads % self.key_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.positions and self.sequence > self.positions:
            raise ValueError(
                f"sequence={self.sequence} is longer than the table of positions, {self.positions} rows"
            )

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def mlp(self) -> int:
        """Width of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_size or self.hidden // self.heads

    @property
    def query(self) -> int:
        """Width of all queries."""
        return self.heads * self.head

    def keys(self, tensor: int = 1) -> int:
        """Width of the keys that one of `tensor` ranks has; ranks share a head where there are fewer."""
        return max(self.key_heads // tensor, 1) * self.head

    def cuts(self, tensor: int) -> bool:
        """Whether `tensor` ranks can share each layer."""
        keys = self.key_heads
        return not (self.heads % tensor or self.mlp % tensor or (keys % tensor and tensor % keys))

    # ---- parameters ----------------------------------------------------------------------------------------

    def matrices(self, tensor: int = 1) -> int:
        """Elements of the matrices of a layer on one of `tensor` ranks. Example: 12 x hidden^2 for GPT."""
        attention = self.hidden * (2 * self.query // tensor + 2 * self.keys(tensor))
        return attention + (3 if self.gated else 2) * self.hidden * self.mlp // tensor

    def vectors(self, tensor: int = 1) -> int:
        """Elements of norms and biases of a layer on one of `tensor` ranks. Example: 13 x hidden for GPT."""
        heads = self.query // tensor + 2 * self.keys(tensor)
        if self.biases != "all":
            return 2 * self.hidden + (heads if self.biases == "heads" else 0)
        return heads + (2 if self.gated else 1) * self.mlp // tensor + 6 * self.hidden

    def table(self, tensor: int = 1) -> int:
        """Elements of the table of tokens on one of `tensor` ranks."""
        return -(-self.vocab // tensor) * self.hidden

    @property
    def last_norm(self) -> int:
        """Elements of the norm after the last layer."""
        return (2 if self.biases == "all" else 1) * self.hidden

    @property
    def parameters(self) -> int:
        """All elements, those of a shared table once."""
        ends = self.table() * (1 if self.tied else 2) + self.positions * self.hidden + self.last_norm
        return self.layers * (self.matrices() + self.vectors()) + ends

    # ---- operations ----------------------------------------------------------------------------------------

    def layer_flops(self, tokens: int) -> int:
        """FLOPs of a layer forward. All scores count, also where a causal kernel skips half of them."""
        return 2 * tokens * self.matrices() + 4 * tokens * self.sequence * self.query

    def core_flops(self, tokens: int) -> int:
        """FLOPs of the products with scores, of a layer forward: what selective recomputation does again."""
        return 4 * tokens * self.sequence * self.query

    def step_flops(self, sequences: int, recompute: str = "none") -> int:
        """FLOPs of a step on all ranks: three times those of forward, and what is recomputed.

        Source: Narayanan et al., 2021 (arXiv:2104.04473), equation 3; Korthikanti et al., 2022, appendix A.
        """
        tokens = sequences * self.sequence
        again = {"none": 0, "selective": self.core_flops(tokens), "full": self.layer_flops(tokens)}[recompute]
        return self.layers * (3 * self.layer_flops(tokens) + again) + 6 * tokens * self.vocab * self.hidden


def shape_of(family: str = "gpt", **numbers: Any) -> TransformerShape:
    """The shape of a model of a family (`FAMILIES`), from its numbers. Those that are given win.

    Raises:
        TypeError, ValueError: there is no such family, or `TransformerShape` refuses the numbers.
    """
    if family not in FAMILIES:
        raise ValueError(f"no family {family!r}, expected {' or '.join(FAMILIES)}")
    return TransformerShape(**{**FAMILIES[family], **numbers})
