"""Tokens per second of decoding with a model split over the ranks, over Unisono and over Gloo in the same
run.

    python benchmarks/decode.py --ranks 2

Batch 1, a transformer of 4 layers and width 512 with a cache of keys and values. Every rank has its share
of the heads and of the hidden units of each layer (tensor parallelism), so a token takes two all-reduces of
2 KiB per layer, and nothing can be computed meanwhile: latency is all that counts. Four sides take turns,
round by round: `torch.distributed` over Unisono, the same over Gloo, `unisono.Group` called directly, and
the same computing without any all-reduce, which tells the share of a token that is communication. Before
that the sides decode from the same weights, and have to find the same logits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.bench import worker
from unisono.bench.measure import Timing, ratio
from unisono.bench.noise import CpuMeter, ticks_of
from unisono.bench.report import noise_line
from unisono.bench.side import Side

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT = 4, 512, 8, 256, 256
ALONE = "alone"
SIDES = ("unisono-torch", "gloo", "unisono", ALONE)
COMPARED_TOKENS = 8
TOLERANCE = 1e-3  # absolute; logits are some units large, and sums differ in their order


class Decoder:
    """This rank's share of the model, and the cache of keys and values.

    Shapes: a token's activations are [WIDTH]; weights [out, in], cut by `rank` of `size` as in
    tensor_parallel.py.
    """

    def __init__(self, rank: int, size: int, all_reduce: Callable[[Any], object]) -> None:
        import torch

        self.torch, self.all_reduce = torch, all_reduce
        self.heads = HEADS // size
        generator = torch.Generator().manual_seed(0)

        def weights(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, generator=generator) / columns**0.5

        def own(whole: Any, axis: int) -> Any:
            return whole.chunk(size, dim=axis)[rank].contiguous()

        self.embedding = weights(VOCABULARY, WIDTH)
        self.layers = []
        for _ in range(LAYERS):
            query, key, value, out = (weights(WIDTH, WIDTH) for _ in range(4))
            up, down = weights(4 * WIDTH, WIDTH), weights(WIDTH, 4 * WIDTH)
            taken = torch.cat([own(each, 0) for each in (query, key, value)])
            self.layers.append((taken, own(out, 1), own(up, 0), own(down, 1)))
        self.cache = torch.zeros(LAYERS, 2, self.heads, CONTEXT, WIDTH // HEADS)
        self.restart()

    def restart(self) -> None:
        """Clear the cache."""
        self.place, self.token = 0, 1

    def step(self) -> Any:
        """Decode one token; its logits [VOCABULARY]."""
        functional = self.torch.nn.functional
        if self.place == CONTEXT:
            self.restart()
        x = self.embedding[self.token].clone()
        for number, (taken, out, up, down) in enumerate(self.layers):
            x = x + self._attention(number, taken, out, functional.layer_norm(x, (WIDTH,)))
            part = down @ functional.gelu(up @ functional.layer_norm(x, (WIDTH,)))
            self.all_reduce(part)
            x = x + part
        self.place += 1
        logits = self.embedding @ functional.layer_norm(x, (WIDTH,))
        self.token = int(logits.argmax())
        return logits

    def _attention(self, layer: int, taken: Any, out: Any, x: Any) -> Any:
        query, key, value = (taken @ x).view(3, self.heads, 1, WIDTH // HEADS)
        self.cache[layer, 0, :, self.place], self.cache[layer, 1, :, self.place] = key[:, 0], value[:, 0]
        keys, values = self.cache[layer, :, :, : self.place + 1]
        attend = self.torch.nn.functional.scaled_dot_product_attention
        part = out @ attend(query, keys, values).reshape(-1)
        self.all_reduce(part)
        return part


class DecodingRank:
    """A joined rank and its decoder."""

    def __init__(self, command: dict[str, Any]) -> None:
        import torch

        from unisono.bench.contenders import Contender, UnisonoContender, join

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        side, rank, size = command["side"], command["rank"], command["size"]
        self.contender: Contender | None = (
            None if side == ALONE else join(side, rank, size, command["address"])
        )
        if isinstance(self.contender, UnisonoContender):
            all_reduce: Callable[[Any], object] = self.contender.group.all_reduce
        else:
            all_reduce = nothing if self.contender is None else partial(torch.distributed.all_reduce)
        self.decoder = Decoder(rank, size, all_reduce)

    def obey(self, command: dict[str, Any]) -> tuple[dict[str, Any], NDArray[np.int64] | None]:
        """Decode from the start and return the logits, or decode a block of tokens and return the times."""
        match command["do"]:
            case "logits":
                self.decoder.restart()
                return {"logits": [self.decoder.step().tolist() for _ in range(command["tokens"])]}, None
            case "block":
                self.decoder.restart()
                samples = worker.time_calls(self.decoder.step, command["calls"], command["warmup"], None)
                return {"samples": True}, samples
            case "close":
                if self.contender is not None:
                    self.contender.close()
                return {}, None
            case other:
                raise ValueError(f"unknown command {other!r}")


def nothing(_: Any) -> None:
    """The all-reduce of a rank without communication."""


# ---- the command ---------------------------------------------------------------------------------------


def compare(sides: list[Side]) -> float:
    """The largest difference between any two ranks' logits; sides that communicate only."""
    joined = [side for side in sides if side.name != ALONE]
    found = [
        answer["logits"]
        for side in joined
        for answer in side.ask({"do": "logits", "tokens": COMPARED_TOKENS})
    ]
    difference = float(np.abs(np.array(found) - np.array(found[0])).max())
    if difference > TOLERANCE:
        raise SystemExit(f"the logits of the sides differ by {difference:.1e}, more than {TOLERANCE}")
    return difference


def measure(sides: list[Side], rounds: int, tokens: int) -> dict[str, Timing]:
    """A Timing for each side; a first round warms up."""
    timings = {side.name: Timing(side.name) for side in sides}
    for number in range(rounds + 1):
        first = number % len(sides)
        for side in sides[first:] + sides[:first]:
            samples = side.time_block(tokens, warmup=2)
            if number:
                timings[side.name].add(samples)
    return timings


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes per side: 1, 2, 4 or 8 (default 2)")
    parser.add_argument("--rounds", type=int, default=7, help="turns per side (default 7)")
    parser.add_argument("--tokens", type=int, default=50, help="tokens in a turn (default 50)")
    parser.add_argument("--json", metavar="FILE", help="also write a record")
    args = parser.parse_args()
    if HEADS % args.ranks:
        parser.error(f"--ranks {args.ranks} does not divide {HEADS} heads")
    ranks_run = (os.path.abspath(__file__), "--worker")
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(name, args.ranks, ranks_run)) for name in SIDES]
        meter = CpuMeter(ticks_of([pid for side in sides for pid in side.pids]))
        print(
            f"# {args.ranks} ranks, {LAYERS} layers of width {WIDTH}; logits differ by {compare(sides):.1e}"
        )
        timings = measure(sides, args.rounds, args.tokens)
        noise = noise_line(meter.read(), len(os.sched_getaffinity(0)))
    gloo, alone = timings["gloo"], timings[ALONE]
    record: dict[str, Any] = {"ranks": args.ranks, "sides": {}}
    for name, timing in timings.items():
        found = record["sides"][name] = {
            "tokens_per_s": 1e6 / timing.p50_us,
            "communication": max(0.0, 1 - alone.p50_us / timing.p50_us),
            "time_over_gloo": ratio(timing, gloo),
        }
        print(
            f"{name:14} {found['tokens_per_s']:8.0f} tokens/s   communication {found['communication']:4.0%}"
            f"   time over Gloo's {found['time_over_gloo']:.3f}"
        )
    print(noise)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(worker.main(sys.argv[2:], DecodingRank))
    main()
