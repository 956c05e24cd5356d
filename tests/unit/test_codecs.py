"""Codecs: every code, every boundary, every instruction set, against their definition in exact numbers."""

import functools
import math
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import codec_reference as exact
import unisono as un
from effort import HANG_S, times
from loops import each
from unisono import _native
from unisono.codecs import Codec

NUMBERS = {name: number for number, (name, _) in enumerate(_native.codecs())}
ISAS = _native.isas()
NAMES = list(exact.FORMATS)
ALL = [*map(Codec, NAMES), un.codecs.int8(), un.codecs.int4(), un.codecs.int8(16), un.codecs.int4(48)]


def encoded(
    codec: Codec, x: np.ndarray, isa: str = "", *, seed: int | None = None, first: int = 0
) -> np.ndarray:
    """Codes by the kernels of one instruction set, as bytes between guards."""
    nbytes = codec.nbytes(x.size)
    room = np.full(nbytes + 64, 0xA5, np.uint8)
    to = room.ctypes.data + 32
    number, stochastic = NUMBERS[codec.name], seed is not None
    done = _native.codec_encode(
        number, codec.block, to, x.ctypes.data, x.size, stochastic, seed or 0, first, isa
    )
    assert done == x.size
    assert (room[:32] == 0xA5).all()
    assert (room[nbytes + 32 :] == 0xA5).all()
    return room[32 : nbytes + 32].copy()


def decoded(
    codec: Codec, codes: np.ndarray, numel: int, isa: str = "", add: np.ndarray | None = None
) -> np.ndarray:
    """Values by the kernels of one instruction set, between guards."""
    room = np.full(numel + 16, 7.0, np.float32)
    if add is not None:
        room[8 : numel + 8] = add
    number, adds = NUMBERS[codec.name], add is not None
    _native.codec_decode(number, codec.block, room.ctypes.data + 32, codes.ctypes.data, numel, adds, isa)
    assert (room[:8] == 7).all()
    assert (room[numel + 8 :] == 7).all()
    return room[8 : numel + 8].copy()


def as_codes(codec: Codec, codes: np.ndarray) -> np.ndarray:
    return codes.view(codec.dtype)


def same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """The same bits, but that a NaN is a NaN."""
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(
        np.signbit(a) | np.isnan(a), np.signbit(b) | np.isnan(b)
    )


@each("name", NAMES)
@each("isa", ISAS)
def test_every_code_has_its_value(name, isa):
    codec, of = Codec(name), exact.FORMATS[name]
    codes = np.arange(1 << of.bits, dtype=np.uint32).astype(codec.dtype)
    values = exact.values(of).astype(np.float32)
    assert same_numbers(decoded(codec, codes, codes.size, isa), values)
    added = decoded(codec, codes, codes.size, isa, add=np.float32(0.75) + np.zeros_like(values))
    with np.errstate(over="ignore"):
        assert np.array_equal(added, np.float32(0.75) + values, equal_nan=True)
    numbers = ~np.isnan(values)
    if not of.signed:
        numbers &= ~np.signbit(values)
    back = as_codes(codec, encoded(codec, values[numbers], isa))
    assert np.array_equal(back, codes[numbers])


def boundaries(name: str) -> np.ndarray:
    """Every midpoint of two neighbours, every value, the f32 before and after each, and the ends of f32."""
    of = exact.FORMATS[name]
    values = exact.values(of)
    points = np.concatenate([exact.midpoints(of), values[np.isfinite(values)]])
    with np.errstate(over="ignore", under="ignore"):
        near = points.astype(np.float32)
        x = np.concatenate([near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(0))])
    tiny = np.array([0, 1, 2, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000], np.uint32).view(np.float32)
    x = np.concatenate([np.abs(x), tiny])
    return np.concatenate([x, -x]) if of.signed else np.concatenate([x, np.float32([-0.0])])


@functools.cache
def rounded(name: str) -> tuple[np.ndarray, np.ndarray]:
    """All boundaries and random patterns, and their codes."""
    of = exact.FORMATS[name]
    patterns = np.random.default_rng(1).integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    if not of.signed:
        patterns = np.abs(patterns)
    x = np.concatenate([boundaries(name), patterns])
    return x, exact.nearest(of, x, exact.midpoints(of)) & ((1 << of.bits) - 1)


@each("name", NAMES)
@each("isa", ISAS)
def test_every_boundary_is_rounded_to_the_nearest(name, isa):
    codec, of = Codec(name), exact.FORMATS[name]
    x, expected = rounded(name)
    found = as_codes(codec, encoded(codec, x, isa))
    assert np.array_equal(found, expected.astype(codec.dtype) if of.signed else expected)


@each("name, theirs", [
    ("bf16", ml_dtypes.bfloat16), ("fp16", np.float16),
    ("fp8_e4m3", ml_dtypes.float8_e4m3fn), ("fp8_e5m2", ml_dtypes.float8_e5m2),
])  # fmt: skip
def test_common_formats_are_what_others_have(name, theirs):
    x = np.random.default_rng(2).integers(0, 1 << 32, 300_000, np.uint32).view(np.float32)
    x = np.concatenate([x, boundaries(name)])
    with np.errstate(all="ignore"):
        expected = x.astype(theirs).astype(np.float32)
    assert same_numbers(un.codecs.decode(un.codecs.encode(x, name), name), expected)


@each("name", NAMES)
def test_stochastic_rounding_is_what_is_written(name):
    codec, of = Codec(name), exact.FORMATS[name]
    rng = np.random.default_rng(3)
    x = rng.choice(boundaries(name), 1500)
    x = np.concatenate(
        [x, np.ldexp(rng.standard_normal(1500), rng.integers(-60, 40, 1500)).astype(np.float32)]
    )
    x = x if of.signed else np.abs(x)
    for seed in (0, 1, 2**64 - 1):
        expected = exact.stochastic(of, x, seed)
        for isa in ISAS:
            found = as_codes(codec, encoded(codec, x, isa, seed=seed))
            assert np.array_equal(found, expected)


@each("codec", ALL)
def test_stochastic_rounding_has_the_right_mean_and_is_repeatable(codec):
    cases, n = times(usual=15, long=40), 20_000
    for case in range(cases):
        value = np.float32(1 + case / cases) * np.float32(2.0 ** (case % 3 * -4))
        x = np.full(n, value, np.float32)
        x[:: codec.block or n] = 2  # so that a block's scale is not the value's own
        one, two = (codec.encode(x, rounding="stochastic", seed=s) for s in (case, case + 1))
        values = codec.decode(one, x.shape).astype(np.float64)[x == value]
        neighbours = np.unique(values)
        assert len(neighbours) <= 2
        spread = np.ptp(neighbours)
        assert abs(values.mean() - value) <= 5 * spread / math.sqrt(n) + 1e-6
        assert spread == 0 or not np.array_equal(one, two)
        cut = 64 * 48
        parts = [
            codec.encode(part, rounding="stochastic", seed=case, first=at)
            for part, at in ((x[:cut], 0), (x[cut:], cut))
        ]
        assert np.array_equal(np.concatenate(parts), one)


def adversarial(rng: np.random.Generator, n: int) -> list[np.ndarray]:
    """Values that are hard to hold: a huge range, denormal, one outlier, all equal, zeros."""
    wide = np.ldexp(rng.standard_normal(n), rng.integers(-149, 127, n)).astype(np.float32)
    outlier = (rng.standard_normal(n) * 1e-3).astype(np.float32)
    outlier[rng.integers(n)] = 3e38
    return [
        wide,
        rng.standard_normal(n).astype(np.float32),
        rng.integers(-(1 << 22), 1 << 22, n).astype(np.int32).astype(np.float32) * np.float32(2.0**-149),
        outlier,
        np.full(n, np.float32(rng.standard_normal()), np.float32),
        np.zeros(n, np.float32),
        -np.zeros(n, np.float32),
        np.full(n, np.finfo(np.float32).max, np.float32),
        (rng.integers(-254, 255, n) / 2).astype(np.float32),  # halves: ties, where the scale is 1
    ]


@each("bits", [8, 4])
@each("length", [16, 64, 80])
def test_blocks_are_what_is_written(bits, length):
    codec = Codec(f"int{bits}", length)
    rng = np.random.default_rng(4)
    cases = adversarial(rng, 150)
    cases[-1][0] = 127.0
    for bad in (np.nan, np.inf, -np.inf):
        x = rng.standard_normal(150).astype(np.float32)
        x[70] = bad
        cases.append(x)
    for x in cases:
        for seed in (None, 5):
            expected = np.frombuffer(exact.blocks(x, bits, length, seed), np.uint8)
            for isa in ISAS:
                assert np.array_equal(encoded(codec, x, isa, seed=seed), expected)
        codes = codec.encode(x)
        y = codec.decode(codes, x.shape)
        for isa in ISAS:
            assert np.array_equal(decoded(codec, codes, x.size, isa), y, equal_nan=True)
            added = decoded(codec, codes, x.size, isa, add=x)
            with np.errstate(all="ignore"):
                assert np.array_equal(added, x + y, equal_nan=True)
        wrong = ~np.isfinite(x)
        places = np.arange(150) // length
        assert np.array_equal(np.isnan(y), np.isin(places, places[wrong]))


@each("codec", ALL)
def test_all_sizes_at_all_addresses_on_all_instruction_sets(codec):
    rng = np.random.default_rng(5)
    raw = np.abs(rng.standard_normal(210)).astype(np.float32)
    if codec.name != "0-6-10":
        raw *= np.where(rng.random(210) < 0.5, -1, 1).astype(np.float32)
    shifted = np.zeros(210 * 4 + 8, np.uint8)
    for n in range(201):
        offset = n % 7
        shifted[offset : offset + 4 * n] = raw[:n].view(np.uint8)
        x = np.frombuffer(shifted, np.float32, n, offset)
        seed = None if n % 2 else n
        expected = encoded(codec, raw[:n], "base", seed=seed)
        assert codec.nbytes(n) == expected.size
        values = decoded(codec, expected, n, "base")
        for isa in ISAS:
            assert np.array_equal(encoded(codec, x, isa, seed=seed), expected)
        out = np.zeros(expected.size + 1, np.uint8)[1:]
        codec.encode(x, out, rounding="nearest" if n % 2 else "stochastic", seed=n)
        assert np.array_equal(out, expected)
        back = np.frombuffer(bytearray(4 * n + 3), np.float32, n, 3)
        codec.decode(out, out=back)
        assert np.array_equal(back, values)
        codec.accumulate(out, back)
        assert np.array_equal(back, values + values)


@each("codec", ALL)
@each("rounding", ["nearest", "stochastic"])
def test_the_error_is_never_above_its_bound(codec, rounding):
    rng = np.random.default_rng(6)
    for case in range(times(usual=100, long=1000)):
        for x in adversarial(rng, int(rng.integers(1, 130))):
            x = np.abs(x) if codec.name == "0-6-10" else x
            bound = codec.bound(x, rounding)
            y = codec.decode(codec.encode(x, rounding=rounding, seed=case), x.shape)
            if math.isinf(bound):
                assert np.abs(x).max() > np.abs(y[np.isfinite(y)]).max(initial=0) * 0.9
                continue
            error = np.abs(y.astype(np.float64) - x).max()
            assert error <= bound
        assert codec.bound(float(np.abs(x).max()), rounding) == bound


def test_bounds_in_numbers():
    assert un.codecs.bf16.bound(1.0) == 2.0**-8
    assert un.codecs.f169.bound(1.5) == 2.0**-10
    assert un.codecs.f169.bound(0) == 2.0**-40
    assert un.codecs.u0610.bound(1.0, "stochastic") == 2.0**-10
    assert un.codecs.int8().bound(127.0) == 0.5 + 2**-15
    for value in (math.inf, math.nan, 10**400, np.float32([1, np.nan]), 65520.0):
        assert un.codecs.fp16.bound(value) == math.inf
    assert un.codecs.fp16.bound(np.zeros(0, np.float32)) == 2.0**-25
    x = np.float32([65519.0])
    assert abs(un.codecs.decode(un.codecs.encode(x, "fp16"), "fp16")[0] - x[0]) <= un.codecs.fp16.bound(x)


def test_a_negative_value_is_refused_with_its_place():
    for place in (0, 5, 1500, 4999):
        for value in (-1.0, -1e-45, -np.inf):
            x = np.ones(5000, np.float32)
            x[place] = value
            x[4999] = -3
            with pytest.raises(ValueError, match=rf"x\[{place}\] is -.*0-6-10 has no numbers below zero"):
                un.codecs.encode(x, "0-6-10")
    x = np.float32([-0.0, np.nan, -np.nan])
    y = un.codecs.decode(un.codecs.encode(x, "0-6-10"), "0-6-10")
    assert y[0] == 0
    assert not np.signbit(y[0])
    assert np.isnan(y[1:]).all()


def test_results_are_of_the_kind_of_the_input():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    codes = un.codecs.encode(x, "1-6-9")
    assert (codes.dtype, codes.shape) == (np.uint16, (2, 3))
    assert np.array_equal(un.codecs.decode(codes, un.codecs.f169), x)
    assert un.codecs.encode(x, "int8").shape == (10,)
    assert un.codecs.decode(un.codecs.encode(x, "int8"), "int8", shape=(2, 3)).shape == (2, 3)
    assert un.codecs.encode(memoryview(x.tobytes()).cast("f"), "fp8_e5m2").shape == (6,)
    assert un.codecs.encode(np.float32(2), "bf16").shape == ()
    assert un.codecs.decode(codes.view(np.int16), "f169").shape == (2, 3)
    assert un.codecs.decode(bytes(codes), "f169").tolist() == x.ravel().tolist()
    assert un.codecs.int8() == Codec("int8", 64)
    assert un.codecs.int8(32) != un.codecs.int8()


X = np.ones(8, np.float32)


@each("call, error, text", [
    (lambda c: c.encode(X, "fp4"), ValueError, "'fp4' is not one of bf16, fp16"),
    (lambda c: c.encode(X, 3), TypeError, "expected Codec or str"),
    (lambda c: c.encode(X, None), TypeError, "codec is a NoneType"),
    (lambda c: c.encode("text", "bf16"), TypeError, "x is a str"),
    (lambda c: c.encode([1.0], "bf16"), TypeError, "x is a list"),
    (lambda c: c.encode(X.astype(np.float64), "bf16"), TypeError, "x is float64, expected float32"),
    (lambda c: c.encode(X.astype(">f4"), "bf16"), TypeError, "byte order"),
    (lambda c: c.encode(X[::2], "bf16"), ValueError, "not contiguous"),
    (lambda c: c.encode(X, "bf16", np.zeros(7, np.uint16)), ValueError, "14 bytes; 8 values in bf16 take 16"),
    (lambda c: c.encode(X, "bf16", np.zeros(8, np.float32)), TypeError, "float32, expected codes as uint16"),
    (lambda c: c.encode(X, "bf16", bytes(16)), ValueError, "read-only"),
    (lambda c: c.encode(X, "bf16", X.view(np.uint8)[:16]), ValueError, "share memory"),
    (lambda c: c.encode(X, "bf16", rounding="up"), ValueError, "rounding is 'up'"),
    (lambda c: c.encode(X, "bf16", rounding=["up"]), ValueError, "rounding is"),
    (lambda c: c.encode(X, "bf16", seed=-1), ValueError, "seed is -1"),
    (lambda c: c.encode(X, "bf16", seed=2**64), ValueError, "seed is"),
    (lambda c: c.encode(X, "bf16", seed=0.5), TypeError, "seed is 0.5"),
    (lambda c: c.encode(X, "bf16", first=2**64), ValueError, "first is"),
    (lambda c: c.int8(0), ValueError, "block is 0, expected a multiple of 16 up to 65536"),
    (lambda c: c.int8(10**30), ValueError, "expected a multiple of 16"),
    (lambda c: c.int4(-16), ValueError, "expected a multiple of 16"),
    (lambda c: c.int4(24), ValueError, "expected a multiple of 16"),
    (lambda c: c.int8("64"), TypeError, "block is '64'"),
    (lambda c: c.Codec("bf16", 64), ValueError, "bf16 has no blocks"),
    (lambda c: c.Codec(["bf16"]), TypeError, "codec is a list"),
    (lambda c: c.bf16.nbytes(-1), ValueError, "numel is -1"),
    (lambda c: c.decode(np.zeros(9, np.uint8), "bf16"), ValueError, "9 bytes, and a code has 2"),
    (lambda c: c.decode(np.zeros(9, np.int32), "bf16"), TypeError, "codes is int32"),
    (lambda c: c.decode(np.zeros(9, np.uint16)[::2], "bf16"), ValueError, "not contiguous"),
    (lambda c: c.decode(np.zeros(12, np.uint8), "int8"), TypeError, "give the result's shape="),
    (lambda c: c.decode(np.zeros(12, np.uint8), "int8", 9), ValueError, "12 bytes; 9 values in int8 take 13"),
    (lambda c: c.decode(np.zeros(12, np.uint8), "int8", (2**40, 2**40)), ValueError, "no machine"),
    (lambda c: c.decode(np.zeros(12, np.uint8), "int8", 2**61), ValueError, "12 bytes"),
    (lambda c: c.decode(np.zeros(12, np.uint8), "int8", "8"), TypeError, "shape is '8'"),
    (lambda c: c.decode(np.zeros(12, np.uint8), "int8", -8), ValueError, "a length is negative"),
    (lambda c: c.decode(np.zeros(8, np.uint16), "bf16", 8, X), TypeError, "not both"),
    (lambda c: c.bf16.accumulate(np.zeros(8, np.uint16), X[:4]), ValueError, "4 values in bf16 take 8"),
    (lambda c: c.bf16.accumulate(np.zeros(8, np.uint16), np.zeros(8)), TypeError, "out is float64"),
    (lambda c: c.bf16.bound("1"), TypeError, "data is a str"),
    (lambda c: c.bf16.bound(1.0, "up"), ValueError, "rounding is 'up'"),
])  # fmt: skip
def test_wrong_arguments_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call(un.codecs)
    assert (X == 1).all()


@pytest.mark.parametrize(
    ("codec", "block"), [(un.codecs.int8(), 0), (un.codecs.int4(), 24), (Codec("bf16"), 16)]
)
def test_the_kernels_refuse_an_impossible_block(codec: Codec, block: int) -> None:
    """A block of 0 values would never end."""
    room = np.zeros(64, np.float32).ctypes.data
    number = NUMBERS[codec.name]
    with pytest.raises(ValueError, match="no blocks of this size"):
        _native.codec_encode(number, block, room, room, 0, False, 0, 0)
    with pytest.raises(ValueError, match="no blocks of this size"):
        _native.codec_decode(number, block, room, room, 0, False)


def test_the_package_loads_without_codecs():
    program = Path(__file__).parent / "programs" / "imported_when_needed.py"
    subprocess.run([sys.executable, str(program), "codecs"], check=True, timeout=HANG_S)


def test_which_codecs_are_idempotent() -> None:
    """What decodes to the same codes again may be passed on; see docs/codecs.md."""
    for name in NAMES:
        codec = Codec(name)
        codes = np.arange(1 << (8 * np.dtype(codec.dtype).itemsize), dtype=np.uint32).astype(codec.dtype)
        values = codec.decode(codes)
        values = values[values >= 0] if name == "0-6-10" else values
        once = codec.decode(codec.encode(values))
        assert same_numbers(once, values)
        assert (codec.encode(once) == codec.encode(values)).all()
        assert codec.idempotent
    changed = {}
    for most in (127, 7):
        scale = (np.arange(1 << 23, dtype=np.uint32) | 127 << 23).view(np.float32)
        again = scale * np.float32(most) / np.float32(most)
        changed[most] = int((again != scale).sum())
    assert changed == {127: 65_020, 7: 898_779}
    assert not un.codecs.int8().idempotent
    assert not un.codecs.int4().idempotent
