"""What `up.Progress` says: model FLOPs utilization, and batches that are dicts."""

import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel import models
from parallel.run_features import adamw, made


def check_model_flops_utilization(folder: Path) -> None:
    batches = models.vector_batches(4, 8)
    graph = up.capture(models.make("mlp"), batches[0][0])
    of_row = 3 * graph.flops / 8
    for plan, more in (
        (up.Plan(data=2), {"peak": 1e9}),
        (up.Plan(data=2), {"peak": "measured"}),
        (up.Plan(data=2, zero=3), {"peak": 1e9, "flops": of_row}),
        (up.Plan(pipeline=2), {"peak": 2e12, "flops": of_row}),
    ):
        run, out = made("mlp", plan), io.StringIO()
        list(up.Progress(run, every=4, out=out, **more).steps(run.shard(batches)))
        if dist.get_rank() == 0:
            found = re.search(
                r"  (\d+) rows/s  MFU ([\d.]+)% of ([\d.]+) ([GT]FLOP/s) per rank", out.getvalue()
            )
            rows, share, peak = (float(found[index]) for index in (1, 2, 3))
            unit = {"GFLOP/s": 1e9, "TFLOP/s": 1e12}[found[4]]
            assert ("(measured)" in out.getvalue()) == (more["peak"] == "measured")
            assert abs(share / 100 - rows * of_row / (peak * unit * 2)) < 0.002 + 0.1 * share / 100, (
                out.getvalue()
            )
    for plan, more, says in (
        (up.Plan(data=2), {"peak": "fast"}, "peak is 'fast', expected FLOP/s of a rank or 'measured'"),
        (up.Plan(data=2), {"peak": -1.0}, "peak is -1.0; it must be positive"),
        (up.Plan(data=2, zero=1), {"peak": 1e9}, "Before parallelize, write graph = up.capture"),
    ):
        with pytest.raises(ValueError, match=says):
            up.Progress(made("mlp", plan), **more)
    with pytest.raises(TypeError, match="peak is True, expected a number"):
        up.Progress(made("mlp", up.Plan(data=2)), peak=True)


def check_progress_of_a_model_with_its_own_loss(folder: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 8)

        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": functional.cross_entropy(self.table(ids).flatten(0, 1), labels.flatten())}

    run = up.parallelize(Own(), up.Plan(data=2), optimizer=adamw, loss=None)
    ids, out = torch.randint(8, (4, 6)), io.StringIO()
    batches = [{"ids": ids, "labels": ids}] * 4
    list(up.Progress(run, every=2, out=out, peak=1e9).steps(run.shard(batches)))
    assert out.getvalue().count("tokens/s  MFU") == (2 if dist.get_rank() == 0 else 0)
