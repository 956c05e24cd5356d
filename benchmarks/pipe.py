"""A step of `up.Pipe` on CPU threads beside one thread, and its bubble beside the predicted one.

    python benchmarks/pipe.py [--stages 2] [--chunks 8] [--seconds 0.02] [--rounds 5]

Stages sleep, as a device computes while its thread waits; so the figures do not depend on free cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import unisono.parallel as up
from unisono.parallel.pipeline.schedule import predict, schedule


class Sleep(torch.autograd.Function):
    """Sleeps in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    """A layer that takes so long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(())), seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.weight, self.seconds)


def median_s(step: Callable[[], None], rounds: int) -> float:
    """Seconds of a step."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    plain = nn.Sequential(*(Sleeper(args.seconds) for _ in range(args.stages)))
    x = torch.randn(args.chunks, 8)

    def one_thread() -> None:
        for rows in x.chunk(args.chunks):
            plain(rows).sum().backward()

    alone = median_s(one_thread, args.rounds)
    expected = predict(schedule("gpipe", args.stages, args.chunks), {"F": 1.0, "B": 2.0}).bubble
    print(f"one thread             {alone * 1e3:7.1f} ms")
    for order in ("gpipe", "1f1b"):
        pipe = up.Pipe(plain, args.chunks, "never", balance=[1] * args.stages, schedule=order)
        bubbles: list[float] = []

        def step(pipe: up.Pipe = pipe, bubbles: list[float] = bubbles) -> None:
            pipe(x, target=x, loss=lambda output, _: output.sum()).local_value().backward()
            bubbles.append(pipe.timeline().bubble)

        took = median_s(step, args.rounds)
        found = statistics.median(bubbles)
        print(
            f"{args.stages} stages, {order:6}       {took * 1e3:7.1f} ms: {alone / took:.2f} times as fast, "
            f"bubble {found:.3f}, predicted {expected:.3f}"
        )


if __name__ == "__main__":
    main()
