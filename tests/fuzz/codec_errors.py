"""Codecs in collectives on adversarial values: no error exceeds the plan's bound; ranks agree to the bit.

    python tests/fuzz/codec_errors.py --cases 10000 --seed 1

A case draws a codec, a collective, an operation, a size and values: of a huge range, denormal, with one
outlier in each block, all equal, at the format's ends, with NaN or infinity. Where the bound is infinite,
as it is for values that are no finite numbers, only bits are compared, and whether a NaN arrives.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import inside
import ranks
import unisono as un
from unisono.codecs import Codec
from unisono.engine.operations.reduction import PremulSum

PLAIN = ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "1-6-9", "0-6-10"]
BLOCKS = (16, 64, 48, 4096)
KINDS = ("normal", "huge range", "denormal", "outlier", "equal", "ends", "not finite", "zero")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
FED_BACK = ("all_reduce", "reduce_scatter", "all_to_all")
OPS: tuple[Any, ...] = (un.SUM, un.SUM, un.AVG, un.MAX, un.MIN, un.PRODUCT, un.premul_sum(0.3))
ENDS = (448.0, 464.0, 57344.0, 65504.0, 65520.0, 4094.0, 4.29e9, 3.39e38, 1e-45, 2.0**-126, 2.0**-9, 2.0**-39)
BATCH = 50
"""Cases that a group runs before it is made anew."""


def values(rng: np.random.Generator, kind: str, numel: int) -> np.ndarray:
    """What a rank contributes."""
    x = rng.standard_normal(numel)
    if kind == "huge range":
        x *= 2.0 ** rng.integers(-149, 128, numel)
    elif kind == "denormal":
        x *= 2.0**-130
    elif kind == "outlier":
        x[:: rng.integers(5, 100)] *= 10.0 ** rng.integers(2, 9)
    elif kind == "equal":
        x[:] = rng.standard_normal() * 10.0 ** rng.integers(-6, 7)
    elif kind == "ends":
        x = (
            rng.choice(ENDS, numel)
            * rng.choice([-1.0, 1.0], numel)
            * rng.choice([1.0, 0.5, 1 - 2.0**-20], numel)
        )
    elif kind == "not finite" and numel:
        x[rng.integers(numel)] = rng.choice([np.nan, np.inf, -np.inf])
    elif kind == "zero":
        x[:] = rng.choice([0.0, -0.0])
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def codec_of(draw: random.Random) -> Codec:
    """Any."""
    name = draw.choice([*PLAIN, "int8", "int4"])
    return Codec(name) if name in PLAIN else Codec(name, draw.choice(BLOCKS))


def exact(op: Any, xs: list[np.ndarray]) -> np.ndarray:
    """In f64."""
    wide = np.array(xs, np.float64)
    if isinstance(op, PremulSum):
        return (wide * op.factor).sum(0)
    functions = {un.SUM: np.sum, un.AVG: np.mean, un.MAX: np.max, un.MIN: np.min, un.PRODUCT: np.prod}
    return functions[op](wide, axis=0)


def run_case(group: un.Group, seed: int) -> bytes:
    """One case; what all ranks must agree on. Raises AssertionError where the error is above the bound."""
    draw, rng, size, rank = random.Random(seed), np.random.default_rng(seed), group.size, group.rank
    codec, collective, kind = codec_of(draw), draw.choice(COLLECTIVES), draw.choice(KINDS)
    op = draw.choice(OPS) if "reduce" in collective else un.SUM
    numel, between = draw.choice((1, 15, 64, 65, 700)), draw.choice((None, False))
    blocks = size if collective in ("reduce_scatter", "all_to_all") else 1
    given = [values(rng, kind, numel * blocks) for _ in range(size)]
    if not codec.signed:
        given = [np.abs(x) for x in given]
    mine, root = given[rank].copy(), draw.randrange(size)
    largest = max(float(np.abs(x).max()) for x in given)
    fed = None
    sums = op in (un.SUM, un.AVG) or isinstance(op, PremulSum)
    if draw.random() < 0.3 and codec.signed and sums and collective in FED_BACK:
        fed = values(rng, "normal", mine.size) * np.float32(min(largest, 1e30) if np.isfinite(largest) else 1)
    how: dict[str, Any] = {"codec": codec, "between_hosts": between}
    kept = None if fed is None else float(np.abs(fed).max())
    bound = group.error_bound(
        collective, largest, codec, op=op, between_hosts=between, feedback=kept, root=root
    )
    more = how if fed is None else {**how, "feedback": fed}
    with np.errstate(all="ignore"):
        same = b""
        if collective in ("all_reduce", "reduce"):
            root_of = {} if collective == "all_reduce" else {"dst": root}
            getattr(group, collective)(mine, op=op, **root_of, **more)
            found, wanted = (
                (mine, exact(op, given)) if collective == "all_reduce" or rank == root else (None, None)
            )
            same = mine.tobytes() if collective == "all_reduce" else b""
        elif collective == "reduce_scatter":
            found = np.empty(numel, np.float32)
            group.reduce_scatter(found, mine, op=op, **more)
            wanted = exact(op, [x.reshape(size, -1)[rank] for x in given])
        elif collective == "broadcast":
            group.broadcast(mine, root, **how)
            found, wanted, same = mine, given[root], mine.tobytes()
        else:
            found = np.empty(numel * (1 if collective == "all_to_all" else size) * blocks, np.float32)
            getattr(group, collective)(found, mine, **more)
            pieces = given if collective == "all_gather" else [x.reshape(size, -1)[rank] for x in given]
            wanted, same = np.concatenate(pieces), found.tobytes() if collective == "all_gather" else b""
        if found is not None and np.isfinite(bound):
            error = float(np.abs(found.astype(np.float64) - wanted).max())
            what = f"seed {seed}: {collective} {op} {codec} {kind} p={size} n={numel} feedback={kept}"
            assert error <= bound, f"{what}: error {error} above {bound}"
        elif found is not None:
            lost = np.isnan(wanted) & ~np.isnan(found)
            assert not lost.any(), f"seed {seed}: a NaN vanished in {collective} {op} {codec} {kind}"
    return same


def run(cases: int, seed: int) -> None:
    """Run cases on groups of 2 to 8 ranks, some of which are told they are on several hosts."""
    done = 0
    draw = random.Random(seed)
    while done < cases:
        size = draw.randint(2, 8)
        hosts = tuple(draw.randrange(3) for _ in range(size)) if draw.random() < 0.5 else (0,) * size
        first, count = seed * 1_000_003 + done, min(BATCH, cases - done)

        def work(group: un.Group, hosts: Any = hosts, first: int = first, count: int = count) -> list[bytes]:
            inside.place(group, hosts)
            return [run_case(group, each) for each in range(first, first + count)]

        results = ranks.threads(size, work)
        for number, each in enumerate(zip(*results, strict=True)):
            assert len(set(each)) == 1, f"seed {first + number}: ranks have different bits"
        done += count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    run(args.cases, args.seed)
    print(f"{args.cases} cases: no error above its bound, the same bits on all ranks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
