"""How long an elastic run stops when a rank dies and when one joins, and how fast a newcomer gets the state.

    unisono run --elastic 1:4 --respawn 1 benchmarks/elastic_training.py [--width 2048] [--rows 512]

Rank 1 kills itself in a backward. Each line is of one rank: the median step; the step in which the rank
died, with the agreement, new groups and the step done again; the step in which the newcomer entered. The
rate of the hand-over is the newcomer's, most of it into new memory, against copies in it right afterwards.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from typing import Any

import torch
from torch import nn

import unisono.parallel as up
from unisono.parallel.elastic import transactions as elastic

NEW = "UNISONO_JOIN" in os.environ


def timed_spread(spread: Any) -> Any:
    """The hand-over, with its rate and that of copies of the same tensors."""

    def timed(group: Any, sources: Any, receivers: Any, tensors: Any) -> None:
        began = time.perf_counter()
        spread(group, sources, receivers, tensors)
        took = time.perf_counter() - began
        if group.rank in receivers:
            nbytes = sum(one.nbytes for one in tensors)
            began = time.perf_counter()
            copies = [torch.empty_like(one).copy_(one) for one in tensors]
            alone = time.perf_counter() - began
            began = time.perf_counter()
            for one, other in zip(copies, tensors, strict=True):
                one.copy_(other)
            again = time.perf_counter() - began
            rate, first, second = (nbytes / each / 1e9 for each in (took, alone, again))
            print(
                f"hand-over: {nbytes / 1e6:.0f} MB from {len(sources)} ranks at {rate:.2f} GB/s; a copy "
                f"into new memory at {first:.2f} GB/s, into the same again at {second:.2f} GB/s",
                flush=True,
            )

    return timed


def main() -> None:
    """Lose a rank, get a new one, and print times."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=512)
    asked = parser.parse_args()
    elastic.spread = timed_spread(elastic.spread)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(asked.width, asked.width) for _ in range(4)))
    plan = up.Plan(data=int(os.environ["WORLD_SIZE"]), elastic=True)
    batch = torch.randn(asked.rows, asked.width), torch.randn(asked.rows, asked.width)
    with up.parallelize(model, plan, optimizer=torch.optim.AdamW, loss=nn.functional.mse_loss) as run:
        if os.environ["RANK"] == "1" and not NEW:
            last = model[0].weight  # the last one that backward reaches
            last.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL) if run.steps == 9 else None)
        steps, changed = [], {}
        for mine in run.shard([batch] * 1000):
            seen, began = len(run.changes), time.perf_counter()
            run.step(mine)
            took = time.perf_counter() - began
            if len(run.changes) > seen:
                changed[str(run.changes[-1])] = took
            else:
                steps.append(took)
            if run.changes and run.changes[-1].joined and run.steps > run.changes[-1].steps + 5:
                break
        if not NEW:
            text = "; ".join(f"{took * 1e3:.0f} ms in {what}" for what, took in changed.items())
            print(f"median step {statistics.median(steps) * 1e3:.0f} ms; {text}", flush=True)


if __name__ == "__main__":
    main()
