"""A transformer as numbers: what it has, what it computes. Nothing here knows ranks beyond a tensor axis.

Layers may have experts, and attention with latent keys.
"""

from __future__ import annotations

from typing import Any

import msgspec

from unisono.engine.base.validation import flag, instance, text, whole

MOST, MOST_LAYERS = 1 << 28, 1 << 14
NUMBERS = {
    "layers": 1, "hidden": 1, "heads": 1, "vocab": 1, "sequence": 1, "kv_heads": 0, "ffn": 0, "head_size": 0,
    "positions": 0, "norms": 1,
}  # fmt: skip
"""Of a transformer, and the least value of each."""

ATTENTIONS = ("unfused", "fused")
BIASES = ("all", "heads", "none")


def _check_numbers(struct: msgspec.Struct, least: dict[str, int]) -> None:
    for name, number in least.items():
        most = MOST_LAYERS if name == "layers" else MOST
        value = whole(getattr(struct, name), name, number, most)
        msgspec.structs.force_setattr(struct, name, int(value))  # NumPy's would overflow


class ExpertShape(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose MLP is a mixture of experts: a router sends each token to `top_k` of them.

    Attributes:
        count: experts of a layer.  top_k: those of a token.  ffn: width of one.
        shared_ffn: width of the MLP that every token takes beside; 0: none.
        shared_gate: a sigmoid of one output weighs it (Qwen2-MoE).
        dense_layers: layers at the beginning that have the model's MLP and no experts.

    Source: Shazeer et al., 2017 (arXiv:1701.06538); shared experts: Dai et al., DeepSeekMoE, 2024
    (arXiv:2401.06066).
    Raises:
        TypeError, ValueError: numbers that no layer has.
    """

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    dense_layers: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self, {"count": 1, "top_k": 1, "ffn": 1, "shared_ffn": 0, "dense_layers": 0})
        flag(self.shared_gate, "shared_gate")
        if self.top_k > self.count:
            raise ValueError(f"top_k={self.top_k} is more than there are experts, {self.count}")


class LatentShape(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: keys and values of all heads come from one narrow vector of a token.

    Attributes:
        query_rank: width of the vector that queries come from; 0: they come from the hidden one.
        key_rank: width of that of keys and values.  rotary: width of the part of a key that has positions,
            which all heads share.  value: of a head. `head_size` of the model is that of queries and keys.

    Source: DeepSeek-V2, 2024 (arXiv:2405.04434), section 2.1.
    Raises:
        TypeError, ValueError: numbers that no layer has.
    """

    query_rank: int
    key_rank: int
    rotary: int
    value: int

    def __post_init__(self) -> None:
        _check_numbers(self, {"query_rank": 0, "key_rank": 1, "rotary": 0, "value": 1})


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"gated": True, "biases": "none", "tied": False, "dropout": False, "attention": "fused"},
}
"""What models of a family have in common; the defaults of `TransformerShape` are those of gpt."""


class TransformerShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer of equal layers; with experts, the first ones may have none.

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
        norms: of a layer.  head_norms: also of the queries and keys of a head.
        output_bias: the output matrix has one.
        experts: of each layer but the first `dense_layers`.  latent: attention with latent keys.

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
    norms: int = 2
    head_norms: bool = False
    output_bias: bool = False
    experts: ExpertShape | None = None
    latent: LatentShape | None = None

    def __post_init__(self) -> None:
        _check_numbers(self, NUMBERS)
        for name in ("gated", "tied", "dropout", "head_norms", "output_bias"):
            flag(getattr(self, name), name)
        instance(self.experts, (ExpertShape, type(None)), "experts")
        instance(self.latent, (LatentShape, type(None)), "latent")
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
        if self.experts is not None and self.experts.dense_layers > self.layers:
            raise ValueError(f"dense_layers={self.experts.dense_layers} is more than {self.layers} layers")
        if self.latent is not None and (self.key_heads != self.heads or self.latent.rotary >= self.head):
            raise ValueError("latent attention has as many key heads as heads, and rotary < head_size")

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

    @property
    def value_head(self) -> int:
        """Width of a head of values."""
        return self.head if self.latent is None else self.latent.value

    def values(self, tensor: int = 1) -> int:
        """Width of the values that one of `tensor` ranks has."""
        return max(self.key_heads // tensor, 1) * self.value_head

    @property
    def dense_layers(self) -> int:
        """Layers without experts; they are the first ones."""
        return self.layers if self.experts is None else self.experts.dense_layers

    def cuts(self, tensor: int) -> bool:
        """Whether `tensor` ranks can share each layer."""
        keys, widths = self.key_heads, [self.mlp] if self.dense_layers else []
        if self.experts is not None:
            widths += [self.experts.ffn, self.experts.shared_ffn]
        divided = not (self.heads % tensor or any(width % tensor for width in widths))
        return divided and not (keys % tensor and tensor % keys)

    # ---- parameters ----------------------------------------------------------------------------------------

    def attention_matrices(self, tensor: int = 1) -> list[tuple[int, int]]:
        """Outputs and inputs of the matrices of attention on one of `tensor` ranks."""
        heads, latent = self.heads // tensor, self.latent
        if latent is None:
            return [
                (heads * self.head + 2 * self.keys(tensor), self.hidden),
                (self.hidden, heads * self.head),
            ]
        queries = [(latent.query_rank, self.hidden)] if latent.query_rank else []
        return [
            *queries,
            (heads * self.head, latent.query_rank or self.hidden),
            (latent.key_rank + latent.rotary, self.hidden),
            (heads * (self.head - latent.rotary + latent.value), latent.key_rank),
            (self.hidden, heads * latent.value),
        ]

    def mlp_matrices(self, width: int, tensor: int = 1) -> list[tuple[int, int]]:
        """The same of an MLP of this width."""
        return [((2 if self.gated else 1) * width // tensor, self.hidden), (self.hidden, width // tensor)]

    def layer_matrices(self, tensor: int = 1, *, experts: bool = False) -> list[tuple[int, int]]:
        """The same of a layer, of one that has experts without these, but with its router and shared MLP."""
        found = self.attention_matrices(tensor)
        if not experts:
            return found + self.mlp_matrices(self.mlp, tensor)
        mixed = self.mixed
        found.append((mixed.count, self.hidden))
        if mixed.shared_ffn:
            found += self.mlp_matrices(mixed.shared_ffn, tensor)
        return found + ([(1, self.hidden)] if mixed.shared_gate else [])

    @property
    def mixed(self) -> ExpertShape:
        """The experts, of a model that has some."""
        if self.experts is None:
            raise ValueError("this model has no experts")
        return self.experts

    def matrices(self, tensor: int = 1, *, experts: bool = False) -> int:
        """Elements of the matrices of a layer on one of `tensor` ranks. Example: 12 x hidden^2 for GPT."""
        return sum(n * k for n, k in self.layer_matrices(tensor, experts=experts))

    def vectors(self, tensor: int = 1, *, experts: bool = False) -> int:
        """Elements of norms and biases of a layer on one of `tensor` ranks. Example: 13 x hidden for GPT."""
        heads = self.query // tensor + 2 * self.keys(tensor)
        inner = 2 * self.head if self.head_norms else 0
        if self.latent is not None:
            inner += self.latent.query_rank + self.latent.key_rank
        if self.biases != "all":
            return self.norms * self.hidden + (heads if self.biases == "heads" else 0) + inner
        mlp = self.mixed.shared_ffn if experts else self.mlp
        mlp_biases = (2 if self.gated else 1) * mlp // tensor + (self.hidden if mlp else 0)
        return heads + mlp_biases + (2 * self.norms + 1) * self.hidden + inner

    def expert_elements(self, tensor: int = 1) -> int:
        """Elements of all experts of a layer on one of `tensor` ranks."""
        if self.experts is None:
            return 0
        each = sum(n * k for n, k in self.mlp_matrices(self.experts.ffn, tensor))
        if self.biases == "all":
            each += (2 if self.gated else 1) * self.experts.ffn // tensor + self.hidden
        return self.experts.count * each

    def table(self, tensor: int = 1) -> int:
        """Elements of the table of tokens on one of `tensor` ranks."""
        return -(-self.vocab // tensor) * self.hidden

    def ends(self, tensor: int = 1, *, first: bool = True, last: bool = True) -> int:
        """Elements of the tables and the last norm on one of `tensor` ranks, at these ends of a pipeline.

        Both ends of one have a shared table.
        """
        table = self.table(tensor)
        found = table + self.positions * self.hidden if first else 0
        if last:
            found += (2 if self.biases == "all" else 1) * self.hidden + (0 if first and self.tied else table)
            found += -(-self.vocab // tensor) if self.output_bias else 0
        return found

    @property
    def parameters(self) -> int:
        """All elements, those of a shared table once."""
        dense, mixed = self.dense_layers, self.layers - self.dense_layers
        found = dense * (self.matrices() + self.vectors()) + self.ends()
        if mixed:
            found += mixed * (
                self.matrices(experts=True) + self.vectors(experts=True) + self.expert_elements()
            )
        return found

    # ---- operations ----------------------------------------------------------------------------------------

    def core_flops(self, tokens: int) -> int:
        """FLOPs of the products with scores, of a layer forward: what selective recomputation does again.

        All scores count, also where a causal kernel skips half of them.
        """
        return 2 * tokens * self.sequence * self.heads * (self.head + self.value_head)

    def layers_flops(self, tokens: int) -> int:
        """FLOPs of all layers forward: products with the matrices that a token meets, and scores."""
        elements = self.dense_layers * self.matrices()
        if mixed := self.layers - self.dense_layers:
            active = self.mixed.top_k * sum(n * k for n, k in self.mlp_matrices(self.mixed.ffn))
            elements += mixed * (self.matrices(experts=True) + active)
        return 2 * tokens * elements + self.layers * self.core_flops(tokens)

    def step_flops(self, sequences: int, recompute: str = "none") -> int:
        """FLOPs of a step on all ranks: three times those of forward, and what is recomputed.

        Source: Narayanan et al., 2021 (arXiv:2104.04473), equation 3; Korthikanti et al., 2022, appendix A.
        """
        tokens = sequences * self.sequence
        layers, core = self.layers_flops(tokens), self.layers * self.core_flops(tokens)
        again = {"none": 0, "selective": core, "full": layers}[recompute]
        return 3 * layers + again + 6 * tokens * self.vocab * self.hidden


def shape_of(family: str = "gpt", **numbers: Any) -> TransformerShape:
    """The shape of a model of a family (`FAMILIES`), from its numbers. Those that are given win.

    Raises:
        TypeError, ValueError: there is no such family, or `TransformerShape` refuses the numbers.
    """
    if text(family, "family") not in FAMILIES:
        raise ValueError(f"no family {family!r}, expected {' or '.join(FAMILIES)}")
    return TransformerShape(**{**FAMILIES[family], **numbers})
