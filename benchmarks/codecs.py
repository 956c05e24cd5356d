"""Time of encoding and decoding against memcpy of the same f32 bytes, one core, in the same run.

    python benchmarks/codecs.py [--mib 64] [--rounds 15]

All take turns, round by round. What counts is CPU time, and the fastest round of each: what other programs
take away from a round is not the codec's. A speed of 1.0 is that of memcpy of the f32 bytes; a goal stands in
the next column. Values are normally distributed, positive for 0-6-10. `--isa base` times the kernels of
another instruction set.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import numpy as np

from unisono import _native, codecs

CODECS = {
    codecs.bf16: 0.5,
    codecs.fp16: 0.5,
    codecs.fp8_e4m3: 0.5,
    codecs.fp8_e5m2: 0.5,
    codecs.int8(): 0.5,
    codecs.f169: 0.25,
    codecs.u0610: 0.25,
    codecs.int4(): 0.25,
}


def ways(x: np.ndarray, y: np.ndarray, isa: str) -> dict[str, Callable[[], object]]:
    """The timed functions, by name."""
    numbers = {name: number for number, (name, _) in enumerate(_native.codecs())}
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    made: dict[str, Callable[[], object]] = {"memcpy": lambda: memcpy(y.ctypes.data, x.ctypes.data, x.nbytes)}
    for codec in CODECS:
        given = np.abs(x) if codec is codecs.u0610 else x
        codes = np.zeros(codec.nbytes(x.size), np.uint8)
        at = numbers[codec.name], codec.block

        def encode(stochastic: bool, at=at, codes=codes, given=given) -> None:
            _native.codec_encode(*at, codes.ctypes.data, given.ctypes.data, x.size, stochastic, 1, 0, isa)

        def decode(accumulate: bool, at=at, codes=codes) -> None:
            _native.codec_decode(*at, y.ctypes.data, codes.ctypes.data, x.size, accumulate, isa)

        made |= {
            f"{codec.name} encode": lambda encode=encode: encode(False),
            f"{codec.name} encode, stochastic": lambda encode=encode: encode(True),
            f"{codec.name} decode": lambda decode=decode: decode(False),
            f"{codec.name} decode and add": lambda decode=decode: decode(True),
        }
    return made


def main() -> None:
    """Print a line for each codec and direction."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=64, help="MiB of f32 (default: 16 Mi values)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--isa", default="", choices=["", *_native.isas()])
    given = parser.parse_args()
    x = np.random.default_rng(0).standard_normal(given.mib << 18, np.float32)
    y = np.zeros_like(x)
    timed = ways(x, y, given.isa)
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(given.rounds):
        for name, run in timed.items():
            start = time.thread_time()
            run()
            best[name] = min(best[name], time.thread_time() - start)
    isa = given.isa or _native.isa()
    print(f"{given.mib} MiB of f32, one core, CPU time, kernels {isa}, best of {given.rounds}")
    for name, seconds in best.items():
        goal = next((goal for codec, goal in CODECS.items() if name.startswith(f"{codec.name} ")), None)
        held = "" if goal is None or "," in name or "add" in name else f"   goal {goal}"
        print(f"{name:28} {x.nbytes / seconds / 1e9:6.2f} GB/s {best['memcpy'] / seconds:6.2f}{held}")


if __name__ == "__main__":
    main()
