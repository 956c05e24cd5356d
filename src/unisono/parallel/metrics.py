"""Averages over ranks that do not change their input, and a line of progress."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.torch.control_data import on_every_rank

from .batches import rows_of
from .graph.containers import tensors_in
from .model_flops import Utilization

if TYPE_CHECKING:
    from .run import Run


class Average:
    """Means over all samples of all ranks, which may have different numbers of samples.

    Example: rank 0 adds 1.0 over 3 samples, rank 1 adds 5.0 over 1: the mean is 2.0 on both.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, mean: float | Tensor, samples: int = 1) -> None:
        """Add a mean over `samples`; a tensor is read, never written."""
        total, count = self._sums.get(name, (0.0, 0.0))
        value = mean.detach().item() if isinstance(mean, Tensor) else mean
        self._sums[name] = (total + float(value) * samples, count + samples)

    def result(self, device: str = "cpu") -> dict[str, float]:
        """Return the means, the same on all ranks, and begin anew. All ranks call this.

        Raises:
            ValueError: ranks added different names.
        """
        names = on_every_rank(lambda: sorted(self._sums))
        if any(name != names[0] for name in names):
            raise ValueError(f"ranks added different metrics: {names}")
        table = torch.tensor([self._sums[name] for name in names[0]], dtype=torch.float64, device=device)
        dist.all_reduce(table)
        self._sums.clear()
        return {
            name: float(total / count) for name, (total, count) in zip(names[0], table.tolist(), strict=True)
        }


class Progress:
    """Trains on a loader and prints the progress, on rank 0, in one line every few steps.

    The share of communication is measured on one watched step in each line's interval; that step is slower
    than others.

    Args:
        every: steps between lines.
        out: where lines go.
        peak: FLOP/s of one rank, or "measured": lines then have the MFU, the share of it that the model's
            FLOPs are.
        flops: of forward and backward of one row. None: from the recorded model, where the plan leaves it as
            it is (zero=0, f32, data ranks only).
    Raises:
        TypeError, ValueError: wrong arguments; or the plan needs `flops`.
    Example of a line: step 20  loss 2.3041  12.1 ms/step  84628 tokens/s  communication 31%  memory 312 MB
    """

    def __init__(
        self,
        run: Run,
        *,
        every: int = 10,
        out: TextIO = sys.stderr,
        peak: float | str | None = None,
        flops: float | None = None,
    ) -> None:
        if type(every) is not int or every < 1:
            raise ValueError(f"Progress: every is {every!r}; it must be a number of steps, at least 1")
        self._run, self._every, self._out = run, every, out
        self._utilization = None if peak is None else Utilization(run, flops, peak)

    def steps(self, batches: Iterable[Any]) -> Iterator[float]:
        """Step on each of this rank's batches; yield the losses."""
        rows = tokens = steps = 0
        began, fresh = time.perf_counter(), True
        for batch in batches:
            if fresh and self._utilization is not None:
                self._utilization.begin(_inputs(batch))
                began = time.perf_counter()
            fresh = False
            last = (self._run.steps + 1) % self._every == 0
            before = time.perf_counter()
            loss = self._run.step(batch, watch=last)
            if last:
                self._say(loss, (before - began) / max(steps, 1), rows, tokens, before - began)
                rows = tokens = steps = 0
                began = time.perf_counter()
            else:
                steps, rows, tokens = steps + 1, rows + rows_of(batch), tokens + _tokens(batch)
            yield loss

    def _say(self, loss: float, step_s: float, rows: int, tokens: int, span_s: float) -> None:
        if dist.get_rank() != 0:
            return
        count, what = (tokens, "tokens") if tokens else (rows, "rows")
        speed = f"{count * self._run.plan.data / span_s:.0f} {what}/s" if count else f"no {what} yet"
        if self._utilization is not None and rows:
            speed += f"  {self._utilization.text(rows * self._run.plan.data, span_s)}"
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self._out.write(
            f"step {self._run.steps}  loss {loss:.4f}  {step_s * 1e3:.1f} ms/step  {speed}  "
            f"communication {self._run.communication_share():.0%}  memory {memory:.0f} MB\n"
        )
        self._out.flush()


def _inputs(batch: Any) -> Any:
    """What the model is called with: all of a dict, the first of a pair."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def _tokens(batch: Any) -> int:
    """Numbers of an integer matrix are tokens; other inputs have none."""
    first = next(tensors_in(_inputs(batch)))
    return first.numel() if first.dim() == 2 and not first.is_floating_point() else 0
