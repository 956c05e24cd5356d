"""Codecs by their definition in docs/codecs.md, in whole numbers and fractions, one value at a time."""

import itertools
from fractions import Fraction
from typing import NamedTuple

import numpy as np


class Layout(NamedTuple):
    """Bits of exponent and fraction, bias; whether there is a sign; whether infinity has a code."""

    exponent: int
    fraction: int
    bias: int
    signed: bool = True
    infinite: bool = True
    bits: int = 16


FORMATS = {
    "bf16": Layout(8, 7, 127),
    "fp16": Layout(5, 10, 15),
    "fp8_e4m3": Layout(4, 3, 7, infinite=False, bits=8),
    "fp8_e5m2": Layout(5, 2, 15, bits=8),
    "1-6-9": Layout(6, 9, 31),
    "0-6-10": Layout(6, 10, 51, signed=False),
}


def beyond(of: Layout) -> int:
    """The first magnitude code after the largest number."""
    top = (1 << (of.exponent + of.fraction)) - 1
    return top - (1 << of.fraction) + 1 if of.infinite else top


def number(of: Layout, magnitude: int) -> Fraction:
    """The value of a magnitude code, with an unlimited exponent."""
    field, fraction = divmod(magnitude, 1 << of.fraction)
    if field == 0:
        return Fraction(2) ** (1 - of.bias - of.fraction) * fraction
    return Fraction(2) ** (field - of.bias - of.fraction) * (fraction + (1 << of.fraction))


def values(of: Layout) -> np.ndarray:
    """The value of every code as f64, which holds each exactly."""
    limit = beyond(of)
    magnitudes = []
    for code in range(1 << (of.exponent + of.fraction)):
        exact = number(of, code) if code < limit else None
        if exact is None:
            magnitudes.append(np.inf if of.infinite and code == limit else np.nan)
        else:
            magnitudes.append(float(exact))
            assert Fraction(magnitudes[-1]) == exact
    found = np.array(magnitudes)
    return np.concatenate([found, -found]) if of.signed else found


def midpoints(of: Layout) -> np.ndarray:
    """The midpoints of neighbours, also of the largest number and the next one; exact in f64."""
    every = [number(of, code) for code in range(beyond(of) + 1)]
    return np.array([float((a + b) / 2) for a, b in itertools.pairwise(every)])


def nearest(of: Layout, x: np.ndarray, middles: np.ndarray) -> np.ndarray:
    """Codes of f32 values, ties to the even code. NaN becomes the quiet NaN with its sign."""
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        magnitude = np.abs(x.astype(np.float64))
    low = np.searchsorted(middles, magnitude, "left")  # the middle itself belongs below
    high = np.searchsorted(middles, magnitude, "right")
    codes = np.where((low != high) & (low % 2 == 1), high, low)
    return _finished(of, x, codes)


def _finished(of: Layout, x: np.ndarray, codes: np.ndarray) -> np.ndarray:
    codes = np.minimum(codes, beyond(of))
    quiet = beyond(of) | (1 << (of.fraction - 1)) if of.infinite else beyond(of)
    codes = np.where(np.isnan(x), quiet, codes)
    if of.signed:
        codes = codes | (np.signbit(x).astype(np.int64) << (of.exponent + of.fraction))
    return codes


def _mixed(x: int) -> int:
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


def random_bits(seed: int, j: int) -> int:
    """32 random bits of value j."""
    mask = 2**32 - 1
    key = _mixed((_mixed(seed) + j // 1024) & (2**64 - 1))
    x = ((key & mask) + j % 1024) & mask
    x = (x ^ (x >> 16)) * 0x7FEB352D & mask
    x = (x ^ (x >> 15) ^ (key >> 32)) * 0x846CA68B & mask
    return x ^ (x >> 16)


def stochastic(of: Layout, x: np.ndarray, seed: int) -> np.ndarray:
    """Codes of f32 values rounded stochastically."""
    return _finished(
        of, x, np.array([_stochastic_one(of, float(v), random_bits(seed, j)) for j, v in enumerate(x)])
    )


def _stochastic_one(of: Layout, value: float, random: int) -> int:
    if not np.isfinite(value):
        return beyond(of)
    exact = Fraction(abs(value))
    lowest = number(of, 1 << of.fraction)
    if exact < lowest and of.bias != 127:
        units = exact / number(of, 1)
        return (int(units * 2**16) + random % 2**16) >> 16
    shift = 23 - of.fraction
    bits = int(np.float32(abs(value)).view(np.uint32))  # of f32, whose last places are dropped
    return ((bits + random % 2**shift) >> shift) - ((127 - of.bias) << of.fraction)


LARGEST = Fraction(float(np.finfo(np.float32).max))


def as_exponent(magnitude: Fraction) -> int:
    """The largest e with 2^e <= magnitude."""
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= magnitude else exponent - 1


def as_f32(value: Fraction) -> Fraction:
    """Round to f32, ties to even; no infinity."""
    if value == 0:
        return value
    magnitude = abs(value)
    place = Fraction(2) ** max(as_exponent(magnitude) - 23, -149)
    rounded = round(magnitude / place) * place  # Python's round of a Fraction takes ties to even
    return rounded if value > 0 else -rounded


def block(x: np.ndarray, most: int, seed: int | None, first: int) -> tuple[Fraction | None, list[int]]:
    """Scale and codes of one block; scale None: NaN."""
    if not np.isfinite(x).all():
        return None, [0] * len(x)
    exact = [Fraction(float(v)) for v in x]
    scale = max(as_f32(max(map(abs, exact), default=Fraction(0)) / most), Fraction(2) ** -126)
    if scale * most > LARGEST:
        scale -= Fraction(2) ** (as_exponent(scale) - 23)
    inverse = as_f32(1 / scale)
    products = [as_f32(v * inverse) for v in exact]
    if seed is None:
        return scale, [round(v) for v in products]
    fixed = [int(v * 2**16) for v in products]  # towards zero
    codes = [(f + random_bits(seed, first + j) % 2**16) >> 16 for j, f in enumerate(fixed)]
    return scale, [max(-most, min(most, code)) for code in codes]


def blocks(x: np.ndarray, bits: int, length: int, seed: int | None) -> bytes:
    """The bytes of int8 or int4."""
    made = bytearray()
    for start in range(0, len(x), length):
        part = x[start : start + length]
        scale, codes = block(part, 2 ** (bits - 1) - 1, seed, start)
        made += np.float32(np.nan if scale is None else float(scale)).tobytes()
        if bits == 8:
            made += np.array(codes, np.int8).tobytes()
            continue
        half = (len(codes) + 1) // 2
        high = [*codes[half:], 0][:half]
        made += bytes((a & 15) | (b & 15) << 4 for a, b in zip(codes[:half], high, strict=True))
    return bytes(made)
