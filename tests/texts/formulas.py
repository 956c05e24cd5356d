"""Costs of collectives: the model a + b l, the trace of a ring, networks, the planner. `formulas.py NAME`."""

import functools
import subprocess
import sys
from collections import defaultdict, deque
from fractions import Fraction

import numpy as np
from told import say

import unisono as un
from unisono.engine.costs import plan_cost
from unisono.plans import Reduce, Send, make

A, B = Fraction(7), Fraction(1, 4)
L = Fraction(144403552893600)  # the smallest number that 1 to 32 divide
EVERY, POWERS = range(2, 33), (2, 4, 8, 16, 32)


def log2(p: int) -> int:
    return (p - 1).bit_length()


def exact(collective: str, algorithm: str, sizes: range | tuple[int, ...], formula: str) -> None:
    """The time of the plan is the formula for every p, l bytes in a message or in a rank's part."""
    for p in sizes:
        parts = collective in ("gather", "scatter", "all_gather")
        l = L / p if parts else L  # noqa: E741  # the letter of the model
        wanted = eval(formula, {"a": A, "b": B, "l": l, "p": p, "log": log2})
        assert plan_cost.seconds(make(collective, algorithm, p), L, a=A, b=B) == wanted, (algorithm, p)
    listed = ", ".join(map(str, sizes)) if sizes == POWERS else "2 to 32"
    say(f"{collective}, {algorithm}: {formula}, exact for p = {listed}")


def message() -> None:
    """One message out and one in at a time, both at once: a swap of two ranks costs one message."""
    exact("broadcast", "linear", range(2, 3), "a + b * l")
    assert plan_cost.seconds(make("all_to_all", "pairwise", 2), 2 * L, a=A, b=B) == A + B * L
    say("a swap: a + b * l")


def trees() -> None:
    exact("broadcast", "linear", EVERY, "(p - 1) * (a + b * l)")
    exact("broadcast", "binomial", EVERY, "log(p) * (a + b * l)")
    exact("reduce", "binomial", EVERY, "log(p) * (a + b * l)")
    exact("all_reduce", "binomial", EVERY, "2 * log(p) * (a + b * l)")


def parts() -> None:
    exact("gather", "binomial", EVERY, "a * log(p) + (p - 1) * b * l")
    exact("scatter", "binomial", EVERY, "a * log(p) + (p - 1) * b * l")


def all_gathers() -> None:
    exact("all_gather", "doubling", POWERS, "a * log(p) + (p - 1) * b * l")
    exact("all_gather", "gather_broadcast", POWERS,
          "a * log(p) + (p - 1) * b * l + log(p) * (a + b * p * l)")  # fmt: skip


DATA = [[2.0, 4.0, 6.0], [1.0, 2.0, 3.0], [4.0, 8.0, 12.0]]


def trace() -> None:
    """What each of three devices holds after the reductions of the ring's plan; then it runs."""
    size, held = len(DATA), [list(row) for row in DATA]
    left = [iter(steps) for steps in make("all_reduce", "ring", size).steps]
    posted: dict[tuple[int, int], deque[float]] = defaultdict(deque)
    final = [0.0] * size
    for _ in range(size - 1):  # a round: each sends one part on, and adds one
        waiting = []
        for rank, steps in enumerate(left):
            for step in steps:
                if isinstance(step, Reduce):
                    waiting.append((rank, step))
                    break
                assert isinstance(step, Send)
                posted[rank, step.to[0]].append(held[rank][step.chunk.index])
        for rank, step in waiting:
            [source] = [each for each in step.frm if each != rank]
            final[rank] = held[rank][step.chunk.index] = (
                held[rank][step.chunk.index] + posted[source, rank].popleft()
            )
    say("after the reductions", final)
    with un.init_process_group() as world:
        x, own = np.array(DATA[world.rank]), np.array(DATA[world.rank])
        world.all_reduce(x, algorithm="ring")
        say("sum", x.tolist())
        world.all_reduce(own, un.AVG, algorithm="ring")
        say("mean", [round(value, 4) for value in own.tolist()])


def congestion() -> None:
    """Eight hosts at a switch, 64 MiB, 10 Gbit/s: all through one of them, or around the ring."""
    network = un.networks.star(8, cable=un.networks.Cable(5e-6, 1.25e9))
    size = 64 << 20
    times = {}
    for name in ("aggregator", "ring"):
        found = un.simulate("all_reduce", network, algorithm=name, nbytes=size)
        times[name] = found.seconds
        say(f"{name}: {found.seconds * 1e3:.0f} ms")
    limit = 2 * 7 / 8 * size / 1.25e9
    assert limit < times["ring"] < 1.2 * limit
    say(f"2 (p-1)/p S/B = {limit * 1e3:.0f} ms")


def shapes() -> None:
    """Every way to reduce has the sum of NumPy, on two 'hosts' of two ranks."""
    with un.init_process_group() as world:
        for name in ("binomial", "double_tree", "ring", "torus", "aggregator"):
            x = np.random.default_rng(world.rank).integers(9, size=1000).astype(float)
            wanted = functools.reduce(np.add, world.all_gather(x))
            world.all_reduce(x, algorithm=name)
            assert (x == wanted).all()
    network = un.networks.star(8, cable=un.networks.Cable(5e-6, 1.25e9), adds_bytes_per_s=10e9)
    switch, ring = (un.simulate("all_reduce", network, algorithm=name, nbytes=64 << 20).seconds
                    for name in ("in_network", "ring"))  # fmt: skip
    assert switch < ring
    say("binomial, double_tree, ring, torus, aggregator: the sum; a switch that adds is faster than the ring")


def measured(operation: str, ranks: int) -> dict[str, float]:
    words = [sys.executable, "-m", "unisono", "bench", operation, "-n", str(ranks), "-b", "1M", "-e", "1M"]
    done = subprocess.run([*words, "--rounds", "1", "--no-limit", "--format", "csv"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    names, values = (line.split(",") for line in done.stdout.splitlines())
    row = dict(zip(names, values, strict=True))
    assert row["wrong"] == "0"
    return {name: float(row[name]) for name in ("p50_us", "algbw_gbps", "busbw_gbps")}


def bandwidths() -> None:
    """Algorithm bandwidth is bytes over time; bus bandwidth has a factor for each collective."""
    factors = {"2(p-1)/p": 4 / 3, "(p-1)/p": 2 / 3, "1": 1.0}
    for operation, text in zip(("all_reduce", "all_gather", "broadcast"), factors, strict=True):
        row = measured(operation, 3)
        assert abs(row["busbw_gbps"] - factors[text] * row["algbw_gbps"]) < 2e-4, row
        say(f"{operation}: {text}")


def point_to_point() -> None:
    row = measured("send_recv", 2)
    assert abs(row["algbw_gbps"] - 2**20 / row["p50_us"] / 1e3) < 1e-3 * row["algbw_gbps"] + 1e-4, row
    say("bytes / time")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
