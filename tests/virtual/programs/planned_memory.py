"""A dry run's peak beside that of the allocator, for the plans of the arguments."""

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "torch"))
import unisono.parallel as up
from planned_models import MODELS, adamw
from unisono.parallel import sharded_parameters
from unisono.parallel.costs.task import TrainingTask
from unisono.parallel.planning.dry_run import DryRun

sharded_parameters.SMALL_MODEL_BYTES = 0  # these have units, as large models have
BATCH = 16
MOST = 0.005 if torch.__version__ >= "2.15" else 0.03  # of the peak

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:unisono,cuda:nccl")
torch.set_default_device("cuda")
for name in MODELS:
    make, loss, batch = MODELS[name]
    for text in sys.argv[1:]:
        plan = eval(f"up.Plan({text})")
        with torch.device("cpu"):
            sample = batch(BATCH // plan.data)
        with torch.device("meta"):
            model = make()
        gc.collect()
        before = torch.cuda.memory_allocated()
        stage = dist.get_rank() // (plan.ranks // plan.pipeline)
        said = DryRun(TrainingTask(model, sample, BATCH, adamw, loss), plan).peak_of(stage)
        run = up.parallelize(model, plan, optimizer=adamw, loss=loss, seed=0)
        given = tuple(each.cuda() for each in sample)
        run.step(given)
        torch.cuda.reset_peak_memory_stats()
        run.step(given)
        seen = torch.cuda.max_memory_allocated() - before
        assert abs(said.nbytes / seen - 1) < MOST, (name, str(plan), said, seen)
        assert sum(said.parts.values()) == said.nbytes, said
        del run, model, given
        print(f"{name} {plan}: {seen} bytes, {said.nbytes - seen:+}")
dist.destroy_process_group()
