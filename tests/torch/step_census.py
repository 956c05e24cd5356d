"""The seconds of a step as a forecast says them, beside a run, for many models and plans on this machine.

    unisono run -n 2 tests/torch/step_census.py zoo [MODEL[,PLAN] ...]
    unisono run -n 4 tests/torch/step_census.py sweep [TEXT ...]

The same rows as memory_census.py has. One line for each: the median step of the slowest rank, the error of
the forecast, its largest parts. The last line is a summary. The machine has to be quiet, and calibrated:
`unisono calibrate`, `unisono calibrate --compute`.
"""

import logging
import statistics
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

import unisono.parallel as up
import unisono.torch  # noqa: F401  (registers the backend)
from inside_parallel import cut_rows
from memory_census import Row, of_sweep, of_zoo, tensors

WARM, STEPS, MOST_STEPS, SECONDS = 3, 8, 60, 0.2
"""Steps of a run that do not count; at least so many that do, and as many as fill the time."""


class Forecasts:
    """Of rank 0, for all: predictors are kept while the model stays the same."""

    def __init__(self) -> None:
        self._key, self._predictor = "", None

    def of(self, row: Row) -> tuple[float, dict[str, float]]:
        """The seconds of a step, and by cause.

        Raises:
            ValueError: the plan is not priced.
        """
        told: list[Any] = [None, ""]
        if dist.get_rank() == 0:
            try:
                found = self._made(row).forecast(row.plan)
                told[0] = found.total, dict(found.seconds)
            except (ValueError, TypeError) as error:
                told[1] = str(error).splitlines()[0][:150]
        dist.broadcast_object_list(told, src=0)
        if told[1]:
            raise ValueError(told[1])
        return told[0]

    def _made(self, row: Row) -> up.StepPredictor:
        key = row.name.partition(":")[0]
        if key != self._key:
            torch.manual_seed(0)
            self._predictor = up.StepPredictor(
                row.make(), row.batch, loss=row.loss, optimizer=row.optimizer, trial=True
            )
            self._key = key
        return self._predictor


def measured(row: Row, expected: float) -> float:
    """The median step of the slowest rank."""
    torch.manual_seed(0)
    plan, rows = row.plan, next(iter(tensors(row.batch))).shape[0]
    micro = cut_rows(row.batch, 0, max(1, rows // plan.data // plan.micro_batches))
    inputs = micro if row.loss is None else micro[0]
    cut = plan.tensor > 1 or plan.pipeline > 1
    run = up.parallelize(
        row.make(), plan, optimizer=row.optimizer, loss=row.loss, sample=inputs if cut else None, check=False
    )
    (given,) = run.shard([row.batch])
    given = tree_map_only(torch.Tensor, torch.clone, given)
    for _ in range(WARM):
        run.step(given)
    taken = []
    for _ in range(max(STEPS, min(MOST_STEPS, round(SECONDS / expected)))):
        dist.barrier()
        began = time.perf_counter()
        run.step(given)
        taken.append(time.perf_counter() - began)
    slowest = torch.tensor([statistics.median(taken)])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def main(kind: str, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("unisono")
    ranks, forecasts, found = dist.get_world_size(), Forecasts(), list[float]()
    for row in of_zoo(names, ranks) if kind == "zoo" else of_sweep(names, ranks):
        try:
            said, parts = forecasts.of(row)
            seen = measured(row, said)
            found.append(said / seen - 1)
            largest = sorted(parts, key=lambda cause: -parts[cause])[:4]
            causes = ", ".join(f"{cause} {parts[cause] * 1e3:.2f}" for cause in largest)
            text = f"{seen * 1e3:>8.2f} ms {found[-1]:>+7.1%}  {row.name}  ({causes})"
        except (ValueError, TypeError, RuntimeError) as wrong:
            text = f"refused  {row.name}: {str(wrong).splitlines()[0][:150]}"
        if dist.get_rank() == 0:
            print(text, flush=True)
    if dist.get_rank() == 0 and found:
        absolute = sorted(map(abs, found))
        middle, signed = statistics.median(absolute), statistics.median(found)
        most = absolute[int(0.95 * len(found))]
        print(f"{len(found)} steps: error median {middle:.1%} ({signed:+.1%}), 95 of 100 within {most:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
