"""The kernels of reductions: each instruction set that this processor runs, against NumPy, bit by bit."""

import numpy as np

import unisono as un
from loops import each
from oracle import COMPLEX, FLOATS, NUMPY_DTYPES, pairs, reduced
from unisono import _native

DTYPES = {row[0]: number for number, row in enumerate(_native.dtypes())}
OPS = {name: number for number, name in enumerate(_native.reduce_ops())}
# Below, at and beyond the width of a vector, a block of the loops, a tile, a store of a whole cache line.
SIZES = (0, 1, 7, 31, 64, 100, 513, 4099)


def any_bits(dtype: str, numel: int, seed: int) -> np.ndarray:
    """Values of random bits: infinities, NaN, subnormal numbers and both zeros among them."""
    numpy = NUMPY_DTYPES[dtype]
    if dtype == "bool":
        return np.random.default_rng(seed).integers(0, 2, numel).astype(bool)
    found = np.frombuffer(np.random.default_rng(seed).bytes(numel * numpy.itemsize), numpy).copy()
    if dtype in FLOATS:
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 65504.0, 1e-7])
        with np.errstate(all="ignore"):
            found[::5] = np.resize(special.astype(numpy), len(found[::5]))
    return found


def expected(parts: list[np.ndarray], op: un.ReduceOp) -> np.ndarray:
    """The reduction in the order of ranks; complex numbers by real ones, as the kernels do."""
    if parts[0].dtype.name not in COMPLEX:
        return reduced(parts, op)
    total = parts[0].copy()
    for part in parts[1:]:
        a, b, c, d = total.real.copy(), total.imag.copy(), part.real, part.imag
        total.real, total.imag = (a * c - b * d, a * d + b * c) if op is un.PRODUCT else (a + c, b + d)
    if op is un.AVG:
        total.real, total.imag = total.real / total.real.dtype.type(len(parts)), total.imag / len(parts)
    return total


def by_kernel(op: un.ReduceOp, parts: list[np.ndarray], isa: str, shift: int) -> np.ndarray:
    """The result between guards; every array begins `shift` bytes behind a boundary."""
    dtype, numel, nbytes = parts[0].dtype, len(parts[0]), parts[0].nbytes
    rooms = [np.full(nbytes + 192, 0xA5, np.uint8) for _ in (None, *parts)]
    inside = [slice(begin := -room.ctypes.data % 64 + shift, begin + nbytes) for room in rooms]
    for room, where, part in zip(rooms[1:], inside[1:], parts, strict=True):
        room[where] = part.view(np.uint8)
    starts = [room.ctypes.data + where.start for room, where in zip(rooms, inside, strict=True)]
    divisor = float(len(parts)) if op is un.AVG else 1.0
    name = "bfloat16" if dtype.name == "bfloat16" else dtype.name
    assert _native.reduce(DTYPES[name], OPS[op.name], starts[0], starts[1:], numel, divisor, isa)
    made = rooms[0][inside[0]].copy()
    rooms[0][inside[0]] = 0xA5
    assert (rooms[0] == 0xA5).all(), "a kernel wrote outside its output"
    return made.view(dtype)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits; any NaN equals any other, as processors choose its bits."""
    if a.dtype.name in COMPLEX:
        a, b = a.view(a.real.dtype), b.view(b.real.dtype)
    bits = np.dtype(f"u{a.dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        return bool(((a.view(bits) == b.view(bits)) | ((a != a) & (b != b))).all())


@each("isa", _native.isas())
@each("dtype, op", pairs())
def test_a_kernel_equals_numpy(isa: str, dtype: str, op: un.ReduceOp) -> None:
    for ranks in (1, 2, 3, 5):
        for numel in SIZES:
            parts = [any_bits(dtype, numel, seed) for seed in range(ranks)]
            with np.errstate(all="ignore"):
                wanted = expected(parts, op)
            for shift in (0, 1):
                assert same(by_kernel(op, parts, isa, shift), wanted), (ranks, numel, shift)


@each("isa", _native.isas())
@each("nontemporal", [False, True])
def test_copies_move_every_byte_and_no_other(isa: str, nontemporal: bool) -> None:
    given = np.random.default_rng(7).integers(1, 255, 4400, np.uint8)
    for offset in (0, 1, 31, 63, 64):
        for nbytes in (0, 1, 63, 64, 65, 127, 128, 4095, 4096, 4300):
            out = np.zeros(given.size + 128, np.uint8)
            _native.copy(out.ctypes.data + offset, given.ctypes.data + 3, nbytes, nontemporal, isa)
            expected = np.zeros_like(out)
            expected[offset : offset + nbytes] = given[3 : 3 + nbytes]
            assert np.array_equal(out, expected), (offset, nbytes)
