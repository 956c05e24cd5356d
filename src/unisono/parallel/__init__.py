"""Parallel training: say how to split, and everything else follows. Needs PyTorch.

    plan = up.Plan(data=2, tensor=2, pipeline=2, zero=1, micro_batches=8)
    run = up.parallelize(model, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
    loss=loss_fn)
    for batch in run.shard(loader):
        loss = run.step(batch)

It speaks `torch.distributed`, so it runs over whatever backend that was given. docs/parallel.md is the guide.
"""

from unisono.planner.planner import NoPlanFitsError

from .adam import CompressedAdam
from .compression.comm_hooks import Compressed, PowerSGD
from .compression.reducer import Compression
from .costs.collectives import Link
from .costs.forecast import ForecastWarning, StepForecast
from .costs.predictor import StepPredictor
from .elastic.handover import Change
from .elastic.run import ElasticRun
from .graph.capture import CaptureError, capture
from .graph.cut import Cut
from .graph.program import Graph
from .layouts.redistribute import Record, record
from .layouts.shard import Sharded, shard, whole
from .materialize import materialize
from .metrics import EMA, Average, Progress
from .optimizers import Parameters
from .parallelize import parallelize
from .pipeline.devices import Pipe
from .plan import OuterSGD, Plan
from .planning.choice import ModelChoice
from .planning.machine import JobHost
from .planning.planner import plan
from .run import Run
from .spill import Disk, Host
from .swap import Swapped

__all__ = [
    "EMA",
    "Average",
    "CaptureError",
    "Change",
    "Compressed",
    "CompressedAdam",
    "Compression",
    "Cut",
    "Disk",
    "ElasticRun",
    "ForecastWarning",
    "Graph",
    "Host",
    "JobHost",
    "Link",
    "ModelChoice",
    "NoPlanFitsError",
    "OuterSGD",
    "Parameters",
    "Pipe",
    "Plan",
    "PowerSGD",
    "Progress",
    "Record",
    "Run",
    "Sharded",
    "StepForecast",
    "StepPredictor",
    "Swapped",
    "capture",
    "materialize",
    "parallelize",
    "plan",
    "record",
    "shard",
    "whole",
]
