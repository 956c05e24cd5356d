"""The simulator: its speed, its scale, and its results beside published figures, each with a verdict.

    python benchmarks/foresight.py [speed] [complaints] [loggopsim] [summit] [bandwidth] [h100] [teccl] [grid]
    python benchmarks/foresight.py teccl --teccl FOLDER   a copy of TE-CCL's teccl/examples/experiments

Times are CPU seconds of one core (`time.process_time`), making programs and routes included except under
`speed`. Each published figure has its source beside it. `grid` judges what `benchmarks/grid.py` has measured.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from published import h100, loggopsim, summit, summit_bandwidth, teccl, verdict

import unisono as un
from unisono import _native, networks
from unisono.networks import Cable, Network
from unisono.plans.codes import RECV, SEND, chunk_code

MIB = 1 << 20
GRID = Path(__file__).parent / "results" / "foresight-grid.json"

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
        costs=[[0.0] * 7 + [1.0] + [0.0] * 6],
        costs_index=[],
        window=16,
        most_spans=0,
        next=lambda rank: next(blocks[rank], None),
        route=lambda source, target: (1e-6, [(link, 1) for link in links(source, target)]),
    )
    return found["messages"], time.process_time() - begun


def speed() -> bool:
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
    found = []
    for name, program, links, count, runs in cases:
        messages, seconds = run_native(64, links, count, program, runs)
        found.append(messages / seconds / 1e6)
        print(f"  {name:44} {found[-1]:6.2f}")
    shared = min(found[2:])
    held = verdict("5 million messages a second without contention", found[0] >= 5, f"{found[0]:.2f}")
    return verdict("1 million with max-min sharing", shared >= 1, f"{shared:.2f} at least") and held


# ---- scale ---------------------------------------------------------------------------------------------


def scale(sizes: Sequence[int]) -> bool:
    """All-reduce of 64 MiB on many ranks, six per host; the double tree in segments of 2 MiB."""
    print("scale: all_reduce of 64 MiB; the peak is that of this process so far")
    held = True
    for size in sizes:
        limit_s = 10.0 if size <= 24576 else 60.0
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
            what = f"{algorithm} on {network.size} ranks in {limit_s:g} s and 4 GB"
            held &= verdict(what, used <= limit_s and peak <= 4, f"{used:.1f} s, {peak:.2f} GiB")
    return held


# ---- complaints about other simulators, and the grid -------------------------------------------------


def complaints() -> bool:
    """One check for each complaint that users of other simulators have filed."""

    def seconds(network: Network, **given: object) -> float:
        arguments = {"algorithm": "ring", "nbytes": 1e6, **given}
        return un.simulate("all_reduce", network, **arguments).seconds

    ring, star = networks.ring(8), networks.star(8)
    held = verdict("the topology changes the result", seconds(ring) != seconds(star), "ring and star of 8")
    held &= verdict("a straggler can be given", seconds(star, slow={3: 10.0}) > seconds(star), "rank 3 x 10")
    sizes = seconds(networks.dgx(4)), seconds(networks.dgx(8))
    held &= verdict("32 and 64 GPUs differ", sizes[0] != sizes[1], f"{sizes[0]:.3g} and {sizes[1]:.3g} s")
    link = star.links[star.route(2, 3)[0]].name
    try:
        seconds(star, lost_links=[link])
    except un.SimulationError as error:
        return verdict("a stuck run names its link", link in str(error), str(error)) and held
    return verdict("a stuck run names its link", False, "it ended")


def grid_check() -> bool:
    """What `benchmarks/grid.py` has measured and fitted."""
    import grid

    if not GRID.exists():
        print(f"own machines: left out, there is no {GRID}: see benchmarks/grid.py")
        return True
    return grid.main(["check", str(GRID)]) == 0


def main() -> int:
    """Run what was asked for, or all; the exit code is 1 if a bound does not hold."""
    parts: dict[str, Callable[[argparse.Namespace], bool]] = {
        "speed": lambda _: speed(),
        "complaints": lambda _: complaints(),
        "loggopsim": lambda _: loggopsim(),
        "summit": lambda _: summit(),
        "bandwidth": lambda _: summit_bandwidth(),
        "h100": lambda _: h100(),
        "teccl": lambda args: teccl(args.teccl),
        "grid": lambda _: grid_check(),
        "scale": lambda args: scale([int(size) for size in args.ranks.split(",")]),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(parts)} (default: all)")
    parser.add_argument("--ranks", default="24576,100002", help="sizes for `scale`, a multiple of six each")
    parser.add_argument("--teccl", default="", metavar="FOLDER", help="TE-CCL's published experiments")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(parts):
        parser.error(f"no part {min(unknown)}: there are {', '.join(parts)}")
    held = [parts[part](args) for part in args.parts or parts]
    print(f"{sum(held)} of {len(held)} parts hold")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
