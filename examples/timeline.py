"""What a DDP step does and when, drawn as text: overlap.py shows one.

`Timeline.all_reduce` is a communication hook: DDP calls it in the middle of backward, as soon as the
gradients of a bucket are there, and writes into the gradients what the future it returns gives.
"""

from __future__ import annotations

from time import perf_counter as now

import torch
import torch.distributed as dist
from torch import Tensor, nn

COLUMNS = 60


class Timeline:
    """The hook's state, and the last step: `spans` is name -> (begin, end) in seconds.

    "backward" ends with the last gradient, when DDP hands out the last bucket. What is left of backward()
    then is "waiting": for all-reduces that computing has not hidden. `waits` makes the hook wait for each.
    """

    def __init__(self, waits: bool = False) -> None:
        self.waits = waits
        self.spans: dict[str, tuple[float, float]] = {}

    def all_reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average one bucket over the ranks."""
        name, begin = f"all-reduce {bucket.index()}", now()
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        if self.waits:
            work.wait()

        def complete(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            self.spans[name] = (begin, now())
            return future.value()[0]

        return work.get_future().then(complete)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
        """Train one step; return its seconds."""
        self.spans, stamps = {}, [now()]
        loss = model(x).square().mean()
        stamps.append(now())
        loss.backward()
        stamps.append(now())
        optimizer.step()
        optimizer.zero_grad()
        stamps.append(now())
        last_gradient = max(begin for begin, _ in self.spans.values())
        self.spans["forward"] = (stamps[0], stamps[1])
        self.spans["backward"] = (stamps[1], last_gradient)
        self.spans["waiting"] = (last_gradient, stamps[2])
        self.spans["optimizer"] = (stamps[2], stamps[3])
        return stamps[3] - stamps[0]

    def reduced(self) -> list[tuple[float, float]]:
        """The all-reduces, in the order in which they began."""
        return sorted(span for name, span in self.spans.items() if name.startswith("all-reduce"))

    def hidden(self) -> int:
        """How many all-reduces were complete before the last gradient was computed."""
        return sum(end < self.spans["backward"][1] for _, end in self.reduced())

    def draw(self) -> str:
        """One line for each span, in the order in which they began."""
        begin, end = self.spans["forward"][0], self.spans["optimizer"][1]
        lines = []
        for name, span in sorted(self.spans.items(), key=lambda item: item[1]):
            first, last = (round((stamp - begin) / (end - begin) * COLUMNS) for stamp in span)
            bar = " " * first + "#" * max(1, last - first)
            lines.append(f"{name:13}|{bar:{COLUMNS}}|{1e3 * (span[1] - span[0]):7.1f} ms")
        return "\n".join(lines)
