"""Codecs: f32 to 16, 8 or 4 bits and back, with a stated bound of the error.

    codes = un.codecs.encode(x, "1-6-9")          # uint16, of x's shape
    y = un.codecs.decode(codes, "1-6-9")          # f32
    small = un.codecs.int8(block=64)
    small.nbytes(x.size), small.bound(x)          # 68 bytes for 64 values; the largest |y - x| there can be

docs/codecs.md defines every format to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unisono.codecs.codec import Codec, codec_of, feedback_for
from unisono.engine.base.validation import instance, whole

if TYPE_CHECKING:
    from unisono.codecs.sensitivity import Proposal

__all__ = [
    "Codec",
    "bf16",
    "classify",
    "decode",
    "encode",
    "f169",
    "feedback_for",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp16",
    "int4",
    "int8",
    "u0610",
]

bf16 = Codec("bf16")
fp16 = Codec("fp16")
fp8_e4m3 = Codec("fp8_e4m3")
fp8_e5m2 = Codec("fp8_e5m2")
f169 = Codec("1-6-9")
u0610 = Codec("0-6-10")


def int8(block: int = 64) -> Codec:
    """8-bit whole numbers, with an f32 scale for each `block` values (a multiple of 16)."""
    return Codec("int8", block)


def int4(block: int = 64) -> Codec:
    """4-bit whole numbers, with an f32 scale for each `block` values (a multiple of 16)."""
    return Codec("int4", block)


def encode(
    x: Any, codec: Codec | str, out: Any = None, *, rounding: str = "nearest", seed: int = 0, first: int = 0
) -> Any:
    """Encode f32 values; see `Codec.encode`.

    Args:
        codec: one of this module, or its name: "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "1-6-9", "0-6-10",
            "int8", "int4" (the last two with blocks of 64).
    """
    return codec_of(codec).encode(x, out, rounding=rounding, seed=seed, first=first)


def decode(codes: Any, codec: Codec | str, shape: Any = None, out: Any = None) -> Any:
    """Decode to f32 values; see `Codec.decode`. `codec` as in `encode`."""
    return codec_of(codec).decode(codes, shape, out)


def classify(
    model: Any,
    batches: Any,
    loss: Any = None,
    *,
    ranks: Sequence[int] = (2, 4, 8),
    least: float = 0.8,
    codec: Codec | str = "bf16",
    rounding: float = 0.02,
    small: int = 1024,
    saving: float = 2.0,
    step: float = 0.01,
) -> Proposal:
    """Propose for each parameter's gradient: low rank, a codec of 16 bits, or exact. Needs PyTorch.

    For each matrix a step is made that changes it alone, with its gradient and with the gradient's best
    approximation of each rank. The smallest rank whose step keeps `least` of the decrease of the loss is
    proposed; if none does, the codec; if that changes the gradient by more than `rounding`, or the parameter
    is small, exact. The model is left as it was; nothing is sent. Gradients at the beginning of training are
    of lower rank than later ones: ask again after some hundred steps.

    Cost: a backward for each batch; for each matrix an SVD of rank max(ranks) and 1 + len(ranks) forwards.

    Args:
        model: a torch.nn.Module; call `eval()` first if it has dropout.
        batches: one batch, or a list of them, as large as those of training: a gradient of few rows has a
            low rank by itself. Of several, the last one gives the loss, the others give the gradient.
        loss: (output, targets) -> the loss, batches are (inputs, targets). None: model(batch) is the loss.
        ranks: to try.
        least: the share of the loss's decrease that low rank has to keep; of the gradient's squared norm
            where the exact step does not lower the loss.
        codec: of the second class.
        rounding: the largest relative error of a gradient in the codec.
        small: parameters with fewer elements are exact.
        saving: a rank is tried when its factors in 16 bits are smaller than the gradient by this ratio.
        step: the length of a step as a share of the parameter's.
    Returns:
        A mapping from names to choices, for `up.PowerSGD(rank=...)`; printed, a table of what was measured.
    Raises:
        TypeError, ValueError: wrong arguments, a loss that is no number or not finite.
    """
    from unisono.codecs.sensitivity import SensitivityLimits, proposal

    tried = tuple(sorted({whole(rank, "ranks", 1) for rank in ranks}))
    for name, value in (("least", least), ("rounding", rounding), ("saving", saving), ("step", step)):
        if not instance(value, (int, float), name) > 0:
            raise ValueError(f"{name} is {value}, expected a number above 0")
    given = list(batches) if isinstance(batches, list) else [batches]
    if not given:
        raise ValueError("batches is empty, expected at least one")
    limits = SensitivityLimits(
        tried, least, codec_of(codec), rounding, whole(small, "small", 0), saving, step
    )
    return proposal(model, given, loss, limits)
