"""Averages: of values over ranks, of a run's weights over steps; and a line of progress."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.torch.control_data import on_every_rank

from .batches import rows_of
from .gradients import local, wide_copy
from .graph.capture import CaptureError, capture
from .graph.containers import tensors_in
from .replicated_parameters import like
from .run import Run
from .sharded_parameters import TYPES


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


# ---- model FLOPs utilization ----


BACKWARD = 3.0  # forward once, backward twice: gradients of inputs and of weights
SIDE = 1024  # of the matrices whose product is timed
ROUNDS = 5


class Utilization:
    """The MFU of a run.

    Args:
        flops: of forward and backward of one row. None: three times those of forward, from the recorded
            model.
        peak: FLOP/s of one rank; "measured": that of a matrix product, on all ranks at once.
    Raises:
        TypeError, ValueError: wrong arguments; or `flops` is needed, because the plan has changed the model.
    """

    def __init__(self, run: Run, flops: float | None, peak: float | str) -> None:
        if isinstance(peak, str) and peak != "measured":
            raise ValueError(f"Progress: peak is {peak!r}, expected FLOP/s of a rank or 'measured'")
        for name, value in (("flops", flops), ("peak", peak)):
            _check_number(name, value)
        plan = run.plan
        plain = plan.tensor == plan.pipeline == 1 and plan.zero == 0 and not plan.low
        if flops is None and (not plain or plan.swap is not None):
            raise ValueError(
                f"Progress: under {plan} the model cannot be recorded any more. Before parallelize, write "
                "graph = up.capture(model, inputs), and here flops=3 * graph.flops / rows of the inputs"
            )
        self._run, self._flops, self._peak, self._measured = run, flops, peak, ""

    def begin(self, inputs: Any) -> None:
        """Count the FLOPs of a row, and measure, where that is asked for. All ranks call this.

        Raises:
            ValueError: the model cannot be recorded; the text says why.
        """
        if self._flops is None:
            try:
                self._flops = BACKWARD * capture(self._run.model, inputs).flops / rows_of(inputs)
            except CaptureError as error:
                raise ValueError(f"Progress: write flops=, the FLOPs of a row: {error}") from error
        if self._peak == "measured":
            dist.barrier(group=self._run.mesh.everyone.world)
            self._peak, self._measured = measured_peak(self._run), " (measured)"

    def text(self, rows: float, seconds: float) -> str:
        """Example: MFU 38.1% of 41.2 GFLOP/s per rank (measured)."""
        assert self._flops is not None
        assert not isinstance(self._peak, str)
        share = self._flops * rows / seconds / (self._peak * self._run.plan.ranks)
        unit, name = (1e12, "TFLOP/s") if self._peak >= 1e12 else (1e9, "GFLOP/s")
        return f"MFU {share:.1%} of {self._peak / unit:.1f} {name} per rank{self._measured}"


def measured_peak(run: Run) -> float:
    """FLOP/s of a product of two matrices in the type of compute, the best of some rounds."""
    kind = TYPES.get(run.plan.precision, torch.bfloat16)  # autocast
    left, right = (torch.ones(SIDE, SIDE, dtype=kind, device=run.mesh.axes.device_type) for _ in range(2))
    best = math.inf
    for _ in range(ROUNDS):
        _finish(left)
        began = time.perf_counter()
        _finish(left @ right)
        best = min(best, time.perf_counter() - began)
    return 2.0 * SIDE**3 / best


def _finish(tensor: torch.Tensor) -> None:
    """Wait for the device."""
    float(tensor[0, 0])


def _check_number(name: str, value: object) -> None:
    if value is None or isinstance(value, str):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"Progress: {name} is {value!r}, expected a number")
    if not 0 < value < math.inf:
        raise ValueError(f"Progress: {name} is {value}; it must be positive")


class EMA:
    """An exponential moving average of the weights: average = decay * average + (1 - decay) * weight.

    It begins with the weights as they are now. Each rank averages what it holds: its shards, its stages, its
    parts of matrices. Frozen parameters are left out, and buffers are always the model's own. Source: Polyak,
    Juditsky, Acceleration of Stochastic Approximation by Averaging, SIAM J. Control Optim. 30, 1992.

    Memory: as much as this rank's part of the parameters, in f32 at least.

    Args:
        decay: 0 to 1, without 1; or a function of the number of updates before this one.
    Attributes:
        updates: how often the average has moved.
    Raises:
        TypeError: `run` is no run, or `decay` is neither a number nor a function.
        ValueError: `decay` is out of range; or the plan is one of swap, elastic or local_steps.
    Example: weight 1.0, then 3.0 after a step, decay 0.5: the average is 2.0.
    """

    def __init__(self, run: Run, decay: float | Callable[[int], float] = 0.999) -> None:
        _check(run, decay)
        self._run, self._decay = run, decay
        self.updates = 0
        self._at = run.steps  # the step after which the average moved last
        self._averages: dict[str, Tensor] = {}
        self.begin(run.trained)
        run.averages.add(self)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights. Call it after each step.

        Without a new step, such as after `step(batch, update=False)`, nothing happens.

        Raises:
            ValueError: the function `decay` returned a number that is out of range.
        """
        if self._run.steps == self._at:
            return
        decay = self._decay(self.updates) if callable(self._decay) else self._decay
        _check_decay(decay)
        for name, average in self._averages.items():
            value = local(self._run.trained[name].detach())
            average.lerp_(value.to(average.dtype), 1.0 - decay)
        self.updates += 1
        self._at = self._run.steps

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """Have the averages in place of the weights, for `evaluate`, `predict`, `state_dict` and `export`.

        Meanwhile `step`, `save` and `load` raise. All ranks call this. A rank needs memory for its part of
        the weights once more.

        Raises:
            ValueError: gradients wait for an update; or averages are in place already.
        """
        return self._run.replaced(self._averages)

    def tensors(self) -> dict[str, Tensor]:
        """The average of each parameter, cut as the parameter is, for a checkpoint."""
        return {name: like(self._averages[name], self._run.trained[name]) for name in self._averages}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the averages: `run.save(folder, also={"ema": ema})`."""
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after so many updates. `run.load(folder, also={"ema": ema})` calls it."""
        self.updates, self._at = int(state["updates"]), self._run.steps

    def begin(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Average these parameters, too, from their present values on: the run calls it."""
        for name, parameter in trained.items():
            self._averages[name] = wide_copy(parameter)


def _check(run: object, decay: object) -> None:
    if not isinstance(run, Run):
        raise TypeError(f"EMA: run is a {type(run).__name__}, expected what parallelize returned")
    if not callable(decay):
        _check_decay(decay)
    for name, why in (
        ("swap", "parameters are in a file between steps"),
        ("elastic", "its shards change with the ranks"),
        ("local_steps", "each replica has weights of its own between meetings"),
    ):
        if getattr(run.plan, name):
            raise ValueError(f"EMA is not for Plan({name}={getattr(run.plan, name)!r}): {why}")


def _check_decay(decay: object) -> None:
    if isinstance(decay, bool) or not isinstance(decay, (int, float)):
        raise TypeError(f"EMA: decay is {decay!r}, expected a number or a function of the updates")
    if not 0 <= decay < 1:
        raise ValueError(f"EMA: decay is {decay}; it must be at least 0 and below 1")
