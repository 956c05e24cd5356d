"""The simulator: its speed, its scale, and its results beside published figures.

    python benchmarks/foresight.py [speed] [scale] [loggopsim] [summit] [bandwidth] [--ranks 24576,100000]

Times are CPU seconds of one core (`time.process_time`), making programs and routes included except under
`speed`. Each published figure has its source beside it.
"""

from __future__ import annotations

import argparse
import resource
import time
from array import array
from collections.abc import Callable, Iterator, Sequence

import unisono as un
from unisono import _native, networks
from unisono.networks import Cable, Costs, Network
from unisono.plans import Out, Recv, Reduce, Send
from unisono.plans.codes import RECV, SEND, chunk_code
from unisono.plans.double_tree import TreeNode
from unisono.plans.plan import Step
from unisono.simulation import Call, Compute, Operation, Program, Wait, loggops, simulate_program

MIB = 1 << 20

LOGGOPSIM = {
    "source": "LogGOPSim's README: binomialtreereduce, 8 ranks, 1,024 bytes, default parameters",
    "ends_ns": [34914, 24776, 13138, 13138, 1500, 1500, 1500, 1500],
}
SUMMIT = {
    "source": 'NVIDIA, "Massively Scale Your Deep Learning Training with NCCL 2.4", figure 3, read off it',
    "gpus_per_node": 6,
    "gpus": [96, 192, 384, 768],
    "latency_8B_us": {
        "ring": [179.5, 362.4, 653.3, 1337.3],
        "double_tree": [126.6, 140.3, 155.7, 169.2],
    },
    "busbw_64MB_ring_MBps": [19077, 17842, 13081, 7449],  # figure 4
    "predicted_gpus": [1536, 3072, 6144, 12288, 24576],
}
NVLINK_HOP_S = 0.6e-6
"""A hop over NVLink with the LL protocol, as NCCL's own tuning table has it (src/graph/tuning.cc)."""


# ---- speed ---------------------------------------------------------------------------------------------


def run_native(
    ranks: int, links: Callable[[int, int], list[int]], count: int, program: Callable[[int], array], runs: int
) -> tuple[int, float]:
    """(messages, CPU seconds) of programs that run `runs` times."""
    blocks = {rank: iter([(program(rank).tobytes(), runs)]) for rank in range(ranks)}
    begun = time.process_time()
    found = _native.simulate(
        ranks=ranks,
        streams=1,
        extra=0,
        digits=[],
        rates=[1e9] * count,
        costs=[[0.0] * 7 + [1.0] + [0.0] * 5],
        costs_index=[],
        window=16,
        most_spans=0,
        next=lambda rank: next(blocks[rank], None),
        route=lambda source, target: (1e-6, [(link, 1) for link in links(source, target)]),
    )
    return found["messages"], time.process_time() - begun


def speed() -> None:
    """Messages per second of the event loop, 64 ranks."""

    def shift(distance: int, spread: int) -> Callable[[int], array]:
        def program(rank: int) -> array:
            left = (rank - distance) % 64
            sends = chunk_code(1000.0 + rank * spread) + array("i", [SEND, 1, 1, (rank + distance) % 64])
            return sends + chunk_code(1000.0 + left * spread) + array("i", [RECV, 1, left])

        return program

    cases = [
        ("no links", shift(1, 0), lambda *_: [], 1, 50_000),
        ("a link of its own each way, as on a switch", shift(1, 0), lambda s, t: [s, 64 + t], 128, 50_000),
        ("8 flows share each link, equal sizes", shift(8, 0), lambda s, t: [s // 8, 8 + t // 8], 16, 20_000),
        ("8 flows share each link, 64 sizes", shift(8, 1), lambda s, t: [s // 8, 8 + t // 8], 16, 20_000),
        ("2 flows share a link, 64 sizes", shift(2, 1), lambda s, t: [s // 2, 64 + t], 128, 20_000),
    ]
    print("speed of the event loop: million messages per CPU second")
    for name, program, links, count, runs in cases:
        messages, seconds = run_native(64, links, count, program, runs)
        print(f"  {name:44} {messages / seconds / 1e6:6.2f}")


# ---- scale ---------------------------------------------------------------------------------------------


def scale(sizes: Sequence[int]) -> None:
    """All-reduce of 64 MiB on many ranks, six per host; the double tree in segments of 2 MiB."""
    print("scale: all_reduce of 64 MiB; the peak is that of this process so far")
    for size in sizes:
        hosts = -(-size // 6)
        network = networks.star(hosts, ranks=6, cable=Cable(1e-6, 12.5e9)).first(hosts * 6)
        for algorithm in ("ring", "torus", "hierarchical", "double_tree"):
            segment = 2 * MIB if algorithm == "double_tree" else 64 * MIB
            begun = time.process_time()
            found = un.simulate(
                "all_reduce", network, algorithm=algorithm, nbytes=64 * MIB, segment_bytes=segment
            )
            used = time.process_time() - begun
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB
            print(
                f"  {network.size:7} ranks  {algorithm:13} {found.seconds:9.4f} s simulated, "
                f"{used:6.1f} s CPU, {found.messages:14,} messages, {found.simulated:9,} run, "
                f"peak {peak:4.2f} GiB",
                flush=True,
            )


# ---- published figures ---------------------------------------------------------------------------------


def loggopsim() -> None:
    """The README's example, to the nanosecond."""
    schedule = []
    for rank in range(8):
        below = [rank + (1 << k) for k in range(3) if (1 << k) < (rank & -rank or 8)]
        operations = [Operation("recv", 1024, peer) for peer in below]
        if rank:
            operations.append(Operation("send", 1024, rank & (rank - 1), requires=tuple(range(len(below)))))
        schedule.append(operations)
    ends = sorted(loggops(schedule), reverse=True)
    equal = "equal" if ends == LOGGOPSIM["ends_ns"] else "DIFFERENT"
    print(f"LogGOPSim: {ends} ns, published {LOGGOPSIM['ends_ns']}: {equal}")


def tree_of_nodes(rank: int, size: int, root: int) -> Iterator[Step]:  # noqa: ARG001
    """NCCL's trees: a chain within each node, two trees over the nodes, each for one half."""
    each = int(SUMMIT["gpus_per_node"])
    node, local = divmod(rank, each)
    trees = [TreeNode(number, node, range(size // each)) for number in (0, 1)]
    for number, tree in enumerate(trees):
        below = (rank + 1,) if local + 1 < each else ()
        above = rank - 1 if local else None if tree.above is None else tree.above * each
        if not local:
            below += tuple(child * each for child in tree.below)
        if below:
            yield Reduce(Out(number), frm=(rank, *below))
        if above is not None:
            yield Send(Out(number), to=(above,))
    for number, tree in enumerate(trees):
        below = (rank + 1,) if local + 1 < each else ()
        above = rank - 1 if local else None if tree.above is None else tree.above * each
        if not local:
            below = tuple(child * each for child in tree.below) + below
        if above is not None:
            yield Recv(Out(number), frm=above)
        if below:
            yield Send(Out(number), to=below)


def summit_network(gpus: int, hop_s: float) -> Network:
    """Nodes of six GPUs on a fabric that does not block; a hop between nodes takes `hop_s`."""
    return networks.star(
        gpus // 6,
        ranks=6,
        cable=Cable(hop_s / 2, 23e9),
        inner=Cable(NVLINK_HOP_S, 50e9),
        costs=Costs(),
    )


def summit() -> None:
    """Latency of 8 bytes: the hop between nodes and a constant are fitted, larger jobs are predicted."""
    print(f"Summit, all_reduce of 8 bytes; {SUMMIT['source']}")
    for name in ("ring", "double_tree"):
        algorithm = "ring" if name == "ring" else tree_of_nodes

        def seconds(gpus: int, hop_s: float, algorithm: object = algorithm) -> float:
            network = summit_network(gpus, hop_s)
            return un.simulate("all_reduce", network, algorithm=algorithm, nbytes=8).seconds

        gpus, measured = SUMMIT["gpus"], SUMMIT["latency_8B_us"][name]
        hop_s, constant_s = fit(gpus, [us * 1e-6 for us in measured], seconds, constant=name != "ring")
        print(
            f"  {name}: a hop between nodes takes {hop_s * 1e6:.2f} us, a call {constant_s * 1e6:.1f} us more"
        )
        for count, us in zip(gpus, measured, strict=True):
            predicted = (seconds(count, hop_s) + constant_s) * 1e6
            print(
                f"    {count:6} GPUs {us:9.1f} us published {predicted:9.1f} us ({predicted / us - 1:+.1%})"
            )
        for count in SUMMIT["predicted_gpus"]:
            predicted = (seconds(count, hop_s) + constant_s) * 1e6
            print(f"    {count:6} GPUs {'':9}    predicted {predicted:9.1f} us", flush=True)


def ring_bandwidth(gpus: int, hop_s: float, rate: float, rings: int = 2) -> float:
    """Bus bandwidth of 64 MiB in MB/s: two rings, half a step apart, as there are two cards per node."""
    network = networks.star(
        gpus // 6, ranks=6, cable=Cable(hop_s / 2, rate), inner=Cable(3.4e-6, 250e9), costs=Costs()
    )
    nbytes = 64 * MIB
    step_s = (5 * 3.4e-6 + hop_s + nbytes / gpus / rings / rate) / 6
    items: list[Call | Compute | Wait] = []
    for ring in range(rings):
        items.append(Call("all_reduce", "ring", nbytes / rings, group=ring, handle=str(ring)))
        items.append(Compute(step_s / rings))
    items += [Wait(str(ring)) for ring in range(rings)]
    program = Program(ranks=[items], groups=[()] * rings)
    seconds = simulate_program(program, network, segment_bytes=nbytes).seconds
    return 2 * (gpus - 1) / gpus * nbytes / seconds / 1e6


def summit_bandwidth() -> None:
    """The hop with NCCL's protocol for large messages, and the rate of a node: the best of a grid."""
    gpus, measured = SUMMIT["gpus"], SUMMIT["busbw_64MB_ring_MBps"]

    def worst(point: tuple[float, float]) -> float:
        return max(
            abs(ring_bandwidth(count, *point) / rate - 1) for count, rate in zip(gpus, measured, strict=True)
        )

    grid = [(hop * 1e-6, rate * 1e9) for hop in (44, 47, 50, 53, 56) for rate in (18.0, 18.5, 19.0)]
    hop_s, rate = min(grid, key=worst)
    print(f"Summit, ring, all_reduce of 64 MiB: a hop {hop_s * 1e6:.0f} us, a node {rate / 1e9} GB/s")
    for count, published in zip(gpus, measured, strict=True):
        found = ring_bandwidth(count, hop_s, rate)
        print(f"    {count:6} GPUs {published:7} MB/s published {found:7.0f} ({found / published - 1:+.1%})")
    for count in SUMMIT["predicted_gpus"]:
        found = ring_bandwidth(count, hop_s, rate)
        print(f"    {count:6} GPUs              predicted {found:7.0f} MB/s", flush=True)


def fit(
    gpus: Sequence[int], measured: Sequence[float], seconds: Callable[[int, float], float], *, constant: bool
) -> tuple[float, float]:
    """(hop, constant) with the least squares of relative errors: times are linear in both."""
    rows = []
    for count, target in zip(gpus, measured, strict=True):
        base = seconds(count, 0.0)
        slope = (seconds(count, 1e-6) - base) / 1e-6
        rows.append((slope / target, 1 / target if constant else 0.0, (target - base) / target))
    ss, sc, cc = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    sy, cy = (sum(r[i] * r[2] for r in rows) for i in (0, 1))
    if not constant:
        return sy / ss, 0.0
    determinant = ss * cc - sc * sc
    return (sy * cc - cy * sc) / determinant, (ss * cy - sc * sy) / determinant


def main() -> None:
    """Run what was asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", help="speed, scale, loggopsim, summit, bandwidth (default: all)")
    parser.add_argument("--ranks", default="24576,100002", help="sizes for `scale`, a multiple of six each")
    args = parser.parse_args()
    parts = args.parts or ["speed", "loggopsim", "summit", "bandwidth", "scale"]
    for part in parts:
        if part == "scale":
            scale([int(size) for size in args.ranks.split(",")])
        else:
            {"speed": speed, "loggopsim": loggopsim, "summit": summit, "bandwidth": summit_bandwidth}[part]()


if __name__ == "__main__":
    main()
