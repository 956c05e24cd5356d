"""The parts of layers that not every transformer has: experts, and attention with latent keys."""

from __future__ import annotations

import msgspec

from unisono.engine.base.validation import flag, whole

__all__ = ["ExpertShape", "LatentShape"]

MOST = 1 << 28


def _check_numbers(struct: msgspec.Struct, least: dict[str, int]) -> None:
    for name, number in least.items():
        value = whole(getattr(struct, name), name, number, MOST)
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
