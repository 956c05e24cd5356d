"""Tokens per second of decoding with a model split over the ranks, over Unisono and over Gloo.

    python benchmarks/decode.py --ranks 2

Batch 1, a transformer of 4 layers and width 512 with a cache of keys and values. Every rank has its share
of the heads and of the hidden units of each layer (tensor parallelism), so a token takes two all-reduces of
2 KiB per layer, and nothing can be computed meanwhile: latency is all that counts. In turns:
`torch.distributed` over Unisono, the same over Gloo, `unisono.Group` called directly, and the same
computing without any all-reduce, which tells the share of a token that is communication. Before that the
sides decode from the same weights, and have to find the same logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from turns import TurnWorker, WorkerGroup, arguments, ranks_run, start, started, take_turns, write

from unisono.commands.bench.contenders import UnisonoContender
from unisono.commands.bench.measure import ratio

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT = 4, 512, 8, 256, 256
ALONE = "alone"
SIDES = ("unisono-torch", "gloo", "unisono")
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


class DecodingRank(TurnWorker):
    """A joined rank with two decoders: one communicates, the other does not."""

    COMMANDS = (*TurnWorker.COMMANDS, "logits")

    def __init__(self, command: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        super().__init__(command)
        group = isinstance(self.contender, UnisonoContender) and self.contender.group
        calls = {"decode": group.all_reduce if group else dist.all_reduce, ALONE: lambda _: None}
        self.decoders = {way: Decoder(self.rank, self.size, call) for way, call in calls.items()}
        self.ways = {way: decoder.step for way, decoder in self.decoders.items()}

    def way(self, name: str) -> dict[str, Any]:
        """Choose a decoder, and restart it."""
        self.decoders[name].restart()
        return super().way(name)

    def logits(self, tokens: int) -> dict[str, Any]:
        """Decode from the start."""
        return {"logits": [self.ways["decode"]().tolist() for _ in range(tokens)]}


# ---- the command ---------------------------------------------------------------------------------------


def compare(sides: list[WorkerGroup]) -> float:
    """The largest difference between any two ranks' logits."""
    command = {"do": "logits", "tokens": COMPARED_TOKENS}
    found = np.array([answer["logits"] for side in sides for answer in side.ask(command)])
    difference = float(np.abs(found - found[0]).max())
    if difference > TOLERANCE:
        raise SystemExit(f"the logits of the sides differ by {difference:.1e}, more than {TOLERANCE}")
    return difference


def main() -> None:
    """Measure and print a table."""
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes per side: 1, 2, 4 or 8 (default 2)")
    parser.add_argument("--tokens", type=int, default=50, help="tokens in a turn (default 50)")
    args = parser.parse_args()
    if HEADS % args.ranks:
        parser.error(f"--ranks {args.ranks} does not divide {HEADS} heads")
    sides = [WorkerGroup(name, args.ranks, ranks_run(__file__)) for name in SIDES]
    record: dict[str, Any] = {"ranks": args.ranks, "sides": {}}
    with started(sides):
        model = f"{LAYERS} layers of width {WIDTH}"
        print(f"# {args.ranks} ranks, {model}; logits differ by {compare(sides):.1e}")
        turns = {side.name: (side, "decode") for side in sides} | {ALONE: (sides[0], ALONE)}
        timings = take_turns(turns, rounds=args.rounds, calls=args.tokens, warmup=2)
        for name, timing in timings.items():
            speed, over = 1e6 / timing.p50_us, ratio(timing, timings["gloo"])
            share = max(0.0, 1 - timings[ALONE].p50_us / timing.p50_us)
            found = {"tokens_per_s": speed, "communication": share, "time_over_gloo": over}
            record["sides"][name] = found
            print(
                f"{name:14} {speed:8.0f} tokens/s   communication {share:4.0%}   time over Gloo's {over:.3f}"
            )
    write(args.json, record)


if __name__ == "__main__":
    start(main, DecodingRank)
