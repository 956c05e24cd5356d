"""Codecs: f32 to 16, 8 or 4 bits and back, with a stated bound of the error.

    codes = un.codecs.encode(x, "1-6-9")          # uint16, of x's shape
    y = un.codecs.decode(codes, "1-6-9")          # f32
    small = un.codecs.int8(block=64)
    small.nbytes(x.size), small.bound(x)          # 68 bytes for 64 values; the largest |y - x| there can be

docs/codecs.md defines every format to the bit.
"""

from __future__ import annotations

from typing import Any

from unisono.codecs.codec import Codec, codec_of

__all__ = [
    "Codec",
    "bf16",
    "decode",
    "encode",
    "f169",
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
