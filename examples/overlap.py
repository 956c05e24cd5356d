"""DDP's all-reduces run while backward still computes: a timeline of one step, and what that is worth.

    unisono run -n 2 examples/overlap.py [STEPS]

The same model is trained twice, in alternating steps: as DDP does it, and with a hook that waits for each
bucket of gradients. Overlap hides waiting: for slower ranks, for a network. No core to spare, less to hide.
"""

from __future__ import annotations

import sys
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from timeline import Timeline

LAYERS, WIDTH, BATCH, WARMUP = 8, 512, 128, 3


class Way:
    """One of the two: a model of its own, and the seconds of its steps."""

    def __init__(self, waits: bool) -> None:
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)  # a layer is 1 MiB
        self.timeline = Timeline(waits)
        self.model.register_comm_hook(self.timeline, lambda timeline, bucket: timeline.all_reduce(bucket))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.seconds: list[float] = []

    def step(self, x: torch.Tensor) -> None:
        self.seconds.append(self.timeline.step(self.model, self.optimizer, x))


def main() -> None:
    dist.init_process_group("unisono")
    overlapped, waiting = Way(waits=False), Way(waits=True)
    x, hidden = torch.randn(BATCH, WIDTH), []
    for _ in range(WARMUP + int(sys.argv[1] if len(sys.argv) > 1 else 20)):
        overlapped.step(x)
        waiting.step(x)
        hidden.append(overlapped.timeline.hidden())
    if dist.get_rank() == 0:
        ours, theirs = overlapped.seconds[WARMUP:], waiting.seconds[WARMUP:]
        ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
        print(f"overlapped\n{overlapped.timeline.draw()}\nwaiting for each\n{waiting.timeline.draw()}")
        print(f"{1e3 * median(ours):.1f} and {1e3 * median(theirs):.1f} ms a step, ratio {ratio:.2f}")
    dist.all_reduce(most := torch.tensor(float(max(hidden))), dist.ReduceOp.MAX)  # the slower rank hides some
    assert most > 0  # in some step an all-reduce was complete while backward still computed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
