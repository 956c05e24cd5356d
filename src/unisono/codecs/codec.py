"""A codec: the size of its codes, encoding, decoding, and the bound of its error."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

from unisono import _native
from unisono.codecs.formats import FLOATS, block_bound
from unisono.codecs.memory import CodecBuffer, allocate, check_no_overlap, codes_of, shape_of, values_of
from unisono.engine.base.validation import instance, whole

__all__ = ["Codec", "codec_of", "feedback_for", "magnitude_of"]

_BITS: dict[str, int] = dict(_native.codecs())
_NUMBERS = {name: number for number, name in enumerate(_BITS)}
_SCALE_BYTES = 4
_BLOCK_STEP, _MOST_BLOCK, _BLOCK = 16, 65536, 64
_ALIASES = {"f169": "1-6-9", "u0610": "0-6-10"}
_ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Codec:
    """A format of values: single numbers, or blocks that share a scale. Codecs compare by value.

    Attributes:
        name: of the format, as in docs/codecs.md.
        block: values that share a scale (int8, int4), a multiple of 16 up to 65536; 0 for all others.
    Raises:
        ValueError: no format has this name, or it has no blocks of this size.
    """

    name: str
    block: int = 0

    def __post_init__(self) -> None:
        if instance(self.name, str, "codec") not in _BITS:
            raise ValueError(f"codec {self.name!r} is not one of {', '.join(_BITS)}")
        object.__setattr__(self, "block", whole(self.block, "block"))
        if self.name in FLOATS:
            if self.block:
                raise ValueError(f"block is {self.block}; {self.name} has no blocks")
        elif not 0 < self.block <= _MOST_BLOCK or self.block % _BLOCK_STEP:
            raise ValueError(
                f"block is {self.block}, expected a multiple of {_BLOCK_STEP} up to {_MOST_BLOCK}"
            )

    def __repr__(self) -> str:
        return f"Codec({self.name!r}, block={self.block})" if self.block else f"Codec({self.name!r})"

    @property
    def label(self) -> str:
        """The name in texts: "bf16", "int8(block=64)"."""
        return f"{self.name}(block={self.block})" if self.block else self.name

    @property
    def number(self) -> int:
        """The number of the format in the engine."""
        return _NUMBERS[self.name]

    @property
    def signed(self) -> bool:
        """Whether it has negative numbers."""
        return self.block > 0 or FLOATS[self.name].signed

    @property
    def idempotent(self) -> bool:
        """Whether encoding a decoded value gives the same codes again; a block's scale may change."""
        return not self.block

    @property
    def dtype(self) -> str:
        """The dtype of codes: "uint16", or "uint8". Blocks are bytes."""
        return "uint16" if _BITS[self.name] == 16 else "uint8"

    @property
    def most(self) -> int:
        """The largest code of a format with blocks: 127 or 7; 0 for all others."""
        return 2 ** (_BITS[self.name] - 1) - 1 if self.block else 0

    def nbytes(self, numel: int) -> int:
        """How many bytes the codes of `numel` values take."""
        count, bits = whole(numel, "numel", 0), _BITS[self.name]
        if not self.block:
            return count * bits // 8
        full, rest = divmod(count, self.block)
        codes = full * (self.block * bits // 8) + (rest * bits + 7) // 8
        return codes + (full + (rest > 0)) * _SCALE_BYTES

    def encode(
        self, x: Any, out: Any = None, *, rounding: str = "nearest", seed: int = 0, first: int = 0
    ) -> Any:
        """Encode f32 values.

        Args:
            x: float32, contiguous, in CPU memory: a NumPy array, a torch tensor, anything with the buffer
                protocol. It may begin at any address.
            out: where codes go, of exactly as many bytes; None: a new array, of x's shape, or of bytes
                [nbytes] where the codec has blocks.
            rounding: "nearest" (ties to even), or "stochastic": up with the probability that makes the mean
                right.
            seed: of stochastic rounding, 0..2^64-1. The same seed gives the same codes.
            first: the place of x[0] in the array that it is a part of; the parts of one array, encoded one by
                one, then have the codes of the whole. (With blocks, cut where a block begins.)
        Returns:
            The codes: `out`, or a new array of the kind of `x`, of dtype `dtype`.
        Raises:
            TypeError, ValueError: wrong arrays or arguments; nothing was written. ValueError also for a
                negative value under 0-6-10, with its index; then `out` is incomplete.
        """
        given = values_of(x, "x", writable=False)
        stochastic = _stochastic(rounding)
        seed, first = whole(seed, "seed", 0, 2**64 - 1), whole(first, "first", 0, 2**63)
        if out is None:
            shape = (self.nbytes(given.numel),) if self.block else tuple(getattr(x, "shape", (given.numel,)))
            out = allocate(x, shape, self.dtype)
        to = self._codes(out, "out", given.numel, writable=True)
        check_no_overlap(given, to, "x and out")
        number = _NUMBERS[self.name]
        done = _native.codec_encode(
            number, self.block, to.address, given.address, given.numel, stochastic, seed, first
        )
        if done < given.numel:
            value = ctypes.c_float.from_address(given.address + 4 * done).value
            raise ValueError(f"x[{done}] is {value}, and {self.name} has no numbers below zero")
        return out

    def decode(self, codes: Any, shape: Any = None, out: Any = None) -> Any:
        """Decode to f32 values.

        Args:
            codes: the result of `encode`, or its bytes.
            shape: of the result; None: that of `codes`. A codec with blocks needs it, or `out`.
            out: float32, where values go, instead of `shape`.
        Returns:
            `out`, or a new array of the kind of `codes`.
        Raises:
            TypeError, ValueError: wrong arrays or arguments; nothing was written.
        """
        if out is None:
            out = allocate(codes, self._shape(codes, shape), "float32")
        elif shape is not None:
            raise TypeError("decode takes shape or out, not both")
        self._decode(codes, out, accumulate=False)
        return out

    def accumulate(self, codes: Any, out: Any) -> Any:
        """Add the values of `codes` to the float32 array `out`, each sum rounded to f32.

        Raises: see `decode`.
        """
        self._decode(codes, out, accumulate=True)
        return out

    def bound(self, data: Any, rounding: str = "nearest") -> float:
        """The largest error, |decode(encode(x)) - x|, of any value of the data.

        Args:
            data: the largest magnitude, or float32 values whose largest magnitude it is.
        Returns:
            The bound by the formula in docs/codecs.md; infinite where a value may overflow, or is no
            finite number.
        """
        stochastic = _stochastic(rounding)
        largest = magnitude_of(data)
        if not math.isfinite(largest):
            return math.inf
        if self.block:
            return block_bound(largest, self.most, stochastic)
        return FLOATS[self.name].bound(largest, stochastic)

    def _shape(self, codes: Any, shape: Any) -> tuple[int, ...]:
        if shape is None:
            if self.block:
                raise TypeError(f"{self.name} decodes blocks: give the result's shape=, or out=")
            seen = self._look(codes, "codes", writable=False)
            as_given = tuple(getattr(codes, "shape", ()))
            return as_given if math.prod(as_given) == seen.numel and as_given else (seen.numel,)
        lengths = shape_of(shape)
        self._codes(codes, "codes", math.prod(lengths), writable=False)  # before memory is asked for
        return lengths

    def _decode(self, codes: Any, out: Any, accumulate: bool) -> None:
        to = values_of(out, "out", writable=True)
        given = self._codes(codes, "codes", to.numel, writable=False)
        check_no_overlap(given, to, "codes and out")
        number = _NUMBERS[self.name]
        _native.codec_decode(number, self.block, to.address, given.address, to.numel, accumulate)

    def _look(self, codes: Any, name: str, *, writable: bool) -> CodecBuffer:
        return codes_of(codes, 2 if self.dtype == "uint16" else 1, name, writable=writable)

    def _codes(self, codes: Any, name: str, numel: int, *, writable: bool) -> CodecBuffer:
        seen = self._look(codes, name, writable=writable)
        if seen.nbytes != self.nbytes(numel):
            raise ValueError(
                f"{name} has {seen.nbytes} bytes; {numel} values in {self.name} take {self.nbytes(numel)}"
            )
        return seen


def codec_of(codec: Codec | str) -> Codec:
    """A codec, or the one of this name, with blocks of 64 where it has blocks."""
    if isinstance(codec, Codec):
        return codec
    name = _ALIASES.get(instance(codec, (Codec, str), "codec"), codec)
    return Codec(name, 0 if name in FLOATS or name not in _BITS else _BLOCK)


def feedback_for(x: Any) -> Any:
    """A buffer for `feedback=`: zeros, float32, of the kind and the shape of the float32 array `x`.

    Use it for one call in a program, with the same ranks: which part of the array a rank encodes depends on
    the number of ranks and their placement. If these change, fill it with zeros.

    Raises:
        TypeError, ValueError: `x` is no float32 array, or not as a codec takes it.
    """
    seen = values_of(x, "x", writable=False)
    made = allocate(x, tuple(getattr(x, "shape", (seen.numel,))), "float32")
    made[...] = 0
    return made


def magnitude_of(data: Any) -> float:
    """The largest magnitude of float32 values, or of the number that stands for it."""
    return _magnitude(data) if isinstance(data, (int, float)) else _largest(data)


def _stochastic(rounding: str) -> bool:
    if rounding not in _ROUNDINGS:
        raise ValueError(f"rounding is {rounding!r}, expected {' or '.join(map(repr, _ROUNDINGS))}")
    return rounding == "stochastic"


def _magnitude(number: float) -> float:
    try:
        return float(abs(number))
    except OverflowError:  # a whole number that f64 does not hold
        return math.inf


def _largest(data: Any) -> float:
    seen = values_of(data, "data", writable=False)
    if not seen.numel:
        return 0.0
    import numpy as np

    memory = (ctypes.c_char * seen.nbytes).from_address(seen.address)
    values = np.frombuffer(memoryview(memory), np.float32)
    return float(np.abs(values).max())
