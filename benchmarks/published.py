"""Published figures beside the simulator: LogGOPSim, NCCL on Summit, TE-CCL. `foresight.py` prints them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import ceil
from pathlib import Path

import unisono as un
from unisono import networks
from unisono.networks import Cable, Costs, Machine, Network
from unisono.networks.graph import Connection, RankLocation, network_of
from unisono.plans import Out, Recv, Reduce, Send
from unisono.plans.codes import AWAIT, RECV, REDUCE, SEND, SIGNAL, chunk_code
from unisono.plans.double_tree import TreeNode
from unisono.plans.plan import Step
from unisono.simulation import Operation, loggops
from unisono.simulation.folding import unfolded
from unisono.simulation.run import Conditions, run

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
    "busbw_64MB_MBps": {  # figure 4
        "ring": [19077, 17842, 13081, 7449],
        "double_tree": [19925, 16419, 15425, 15215],
    },
    "predicted_gpus": [1536, 3072, 6144, 12288, 24576],
}
H100 = {
    "source": "astra-sim, inputs/network/hgx_h100_8gpu.yml: measured with nccl-tests",
    "bus_GBps": 370.67,
}
NVLINK_HOP_S = 0.6e-6
"""A hop over NVLink with the LL protocol, as NCCL's own tuning table has it (src/graph/tuning.cc)."""


def verdict(what: str, held: bool, detail: str) -> bool:
    """Print whether a bound holds."""
    print(f"  {'HOLDS' if held else 'DOES NOT HOLD'}: {what} ({detail})", flush=True)
    return held


# ---- published figures ---------------------------------------------------------------------------------


def loggopsim() -> bool:
    """The README's example, to the nanosecond."""
    schedule = []
    for rank in range(8):
        below = [rank + (1 << k) for k in range(3) if (1 << k) < (rank & -rank or 8)]
        operations = [Operation("recv", 1024, peer) for peer in below]
        if rank:
            operations.append(Operation("send", 1024, rank & (rank - 1), requires=tuple(range(len(below)))))
        schedule.append(operations)
    ends = sorted(loggops(schedule), reverse=True)
    print(f"LogGOPSim: {LOGGOPSIM['source']}")
    return verdict("equal in every integer", ends == LOGGOPSIM["ends_ns"], f"{ends} ns")


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


def summit() -> bool:
    """Latency of 8 bytes: the hop between nodes and a constant are fitted, larger jobs are predicted."""
    print(f"Summit, all_reduce of 8 bytes; {SUMMIT['source']}")
    worst = 0.0
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
            worst = max(worst, abs(predicted / us - 1))
            print(
                f"    {count:6} GPUs {us:9.1f} us published {predicted:9.1f} us ({predicted / us - 1:+.1%})"
            )
        for count in SUMMIT["predicted_gpus"]:
            predicted = (seconds(count, hop_s) + constant_s) * 1e6
            print(f"    {count:6} GPUs {'':9}    predicted {predicted:9.1f} us", flush=True)
    return verdict("latency of the fitted rows within 10 %", worst <= 0.10, f"worst {worst:.1%}")


class PipelinedTrees:
    """NCCL's two trees over nodes, with a chain in each node: a piece goes up while the one before goes down.

    Streams of a rank: up and down in tree 0 and in tree 1. Each tree has one half of the buffer.
    """

    def __init__(self, gpus: int, nbytes: float, piece: float) -> None:
        self.size, self.pieces = gpus, max(1, round(nbytes / 2 / piece))
        self.chunk = nbytes / 2 / self.pieces
        self.each = int(SUMMIT["gpus_per_node"])
        self.trees: dict[tuple[int, int], TreeNode] = {}

    def place(self, tree: int, rank: int) -> tuple[int | None, list[int]]:
        """The rank above, and those below."""
        node, local = divmod(rank, self.each)
        below = [rank + 1] if local + 1 < self.each else []
        if local:
            return rank - 1, below
        if (tree, node) not in self.trees:
            self.trees[tree, node] = TreeNode(tree, node, range(self.size // self.each))
        found = self.trees[tree, node]
        above = None if found.above is None else found.above * self.each
        return above, [child * self.each for child in found.below] + below

    def blocks(self, actor: int) -> Iterator[tuple[array, int]]:
        """The codes of a stream."""
        stream, rank = divmod(actor, self.size)
        tree, first = stream % 2, stream * self.size
        above, below = self.place(tree, rank)
        yield chunk_code(self.chunk), 1
        if stream < 2:
            adds = array(
                "i", [REDUCE, 1, len(below), len(below), *(first + each for each in below)] if below else []
            )
            if above is not None:
                yield adds + array("i", [SEND, 1, 1, first + above]), self.pieces
                return
            for piece in range(self.pieces):
                yield adds + array("i", [SIGNAL, tree * self.pieces + piece]), 1
            return
        sends = array("i", [number for each in below for number in (SEND, 1, 1, first + each)])
        if above is not None:
            yield array("i", [RECV, 1, first + above]) + sends, self.pieces
            return
        for piece in range(self.pieces):
            yield array("i", [AWAIT, tree * self.pieces + piece]) + sends, 1


def bus_bandwidth(kind: str, gpus: int, hop_s: float, rate: float, piece: float) -> float:
    """Of an all_reduce of 64 MB in MB/s. piece: of the trees; a ring sends chunks of 1/gpus."""
    network = networks.star(
        gpus // 6, ranks=6, cable=Cable(hop_s / 2, rate), inner=Cable(NVLINK_HOP_S, 1e12), costs=Costs()
    )
    nbytes = 64 * MIB
    if kind == "ring":
        found = un.simulate("all_reduce", network, algorithm="ring", nbytes=nbytes, segment_bytes=nbytes)
    else:
        trees = PipelinedTrees(gpus, nbytes, piece)
        conditions = Conditions({}, {}, {}, 0)
        found = run("trees", network, trees.blocks, unfolded(), conditions, nbytes=nbytes, streams=4)
    return 2 * (gpus - 1) / gpus * nbytes / found.seconds / 1e6


def summit_bandwidth() -> bool:
    """Three constants for both algorithms: a hop between nodes, the rate of a node, the trees' piece."""
    gpus, measured = SUMMIT["gpus"], SUMMIT["busbw_64MB_MBps"]

    def errors(kind: str, *point: float) -> list[float]:
        return [
            bus_bandwidth(kind, count, *point) / rate - 1
            for count, rate in zip(gpus, measured[kind], strict=True)
        ]

    best: tuple[float, tuple[float, float, float]] = (float("inf"), (0.0, 0.0, 0.0))
    for hop, rate in product((60e-6, 65e-6, 70e-6), (19.5e9, 20e9, 20.5e9)):
        ring = sum(error**2 for error in errors("ring", hop, rate, 0))
        for piece in (MIB / 2, MIB, 2 * MIB):
            point = (hop, rate, piece)
            best = min(best, (ring + sum(error**2 for error in errors("double_tree", *point)), point))
    hop, rate, piece = best[1]
    print(f"Summit, all_reduce of 64 MB; {SUMMIT['source']}")
    print(f"  a hop {hop * 1e6:.0f} us, a node {rate / 1e9} GB/s, pieces of {piece / MIB:g} MiB, for both")
    worst = 0.0
    for kind, rates in measured.items():
        for count, published in zip(gpus, rates, strict=True):
            found = bus_bandwidth(kind, count, *best[1])
            worst = max(worst, abs(found / published - 1))
            off = f"({found / published - 1:+.1%})"
            print(f"    {kind:12} {count:6} GPUs {published:7} MB/s published {found:7.0f} {off}")
        for count in SUMMIT["predicted_gpus"]:
            found = bus_bandwidth(kind, count, *best[1])
            print(f"    {kind:12} {count:6} GPUs              predicted {found:7.0f} MB/s", flush=True)
    return verdict("bandwidth of the fitted rows within 15 %", worst <= 0.15, f"worst {worst:.1%}")


# ---- one host of H100 ----------------------------------------------------------------------------------


def h100() -> bool:
    """NCCL's ring on eight H100 that share NVSwitches, beside the shipped network; nothing is fitted."""
    print(f"DGX H100, all_reduce of 1 GiB, ring; {H100['source']}")
    found = un.simulate("all_reduce", "dgx_h100", size=8, algorithm="ring", nbytes=2**30, segment_bytes=2**30)
    bandwidth = 2 * 7 / 8 * 2**30 / found.seconds / 1e9
    off = bandwidth / H100["bus_GBps"] - 1
    return verdict("bandwidth within 5 %", abs(off) <= 0.05,
                   f"{H100['bus_GBps']} GB/s published, {bandwidth:.0f} predicted ({off:+.1%})")  # fmt: skip


# ---- TE-CCL ----------------------------------------------------------------------------------------------


def dgx2(epoch_s: float) -> Network:
    """Two hosts of 16 GPUs on a switch each, and 8 cables each way between them: TE-CCL's figures.

    Its model counts latencies in whole epochs, and neglects what is at most a tenth of one.
    """

    def epochs(latency_s: float) -> float:
        return ceil(latency_s / epoch_s - 1e-9) * epoch_s if latency_s > 0.1 * epoch_s else 0.0

    inner, cross = Cable(epochs(0.35e-6), 125e9), Cable(epochs(2.6e-6), 12.5e9)
    names = [[f"gpu{host}-{gpu}" for gpu in range(16)] for host in range(2)]
    cables = [Connection((name, f"switch{host}"), inner) for host in range(2) for name in names[host]]
    cables += [
        Connection((names[host][gpu], names[1 - host][gpu - 1]), cross)
        for host in range(2)
        for gpu in range(1, 16, 2)
    ]
    return network_of(
        "two DGX-2",
        [RankLocation(name, host) for host in range(2) for name in names[host]],
        cables,
        [Machine("host0", 0, 0.0), Machine("host1", 0, 0.0)],
        memories={},
        adders=[("switch0", 0.0), ("switch1", 0.0)],
    )


def teccl(folder: str) -> bool:
    """The published all_gather schedules of two DGX-2 hosts, by TE-CCL's model of time."""
    found = sorted(Path(folder).rglob("DGX2_output/2_chassis/AllGather/*/*.json")) if folder else []
    if not found:
        print("TE-CCL: left out, needs --teccl FOLDER (teccl/examples/experiments of its repository)")
        return True
    late = early = 0
    far = []
    for file in found:
        record = json.loads(file.read_text())
        published, epoch_s = record["4-Collective_Finish_Time"], record["1-Epoch_Duration"]
        nbytes = record["5-Algo_Bandwidth"] * 1e9 * published  # twice the name of a file of "Early_Stop"
        seconds = un.simulate(
            "all_gather", dgx2(epoch_s), algorithm=str(file), nbytes=nbytes, paced=True
        ).seconds
        epochs = (seconds - published) / epoch_s
        late, early = late + (epochs > 1e-6), early + (epochs < -1 - 1e-6)
        kind, size = file.parent.name, file.stem
        if kind == "Fast":
            far.append(abs(seconds / published - 1))
        print(
            f"    {kind:16} {size:>6} {published * 1e6:12.3f} us published {seconds * 1e6:12.3f} "
            f"({epochs:+.2f} epochs, {seconds / published - 1:+.1%})"
        )
    never = verdict("TE-CCL: never later, at most one epoch earlier", not late + early,
                    f"{late} later, {early} earlier of {len(found)}")  # fmt: skip
    return verdict("DGX-2 all_gather rows within 5 %", max(far) <= 0.05, f"worst {max(far):.1%}") and never


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
