"""A model on the meta device whose sequence is cut, in bf16: its norms name a device in the recording."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "torch"))
import unisono.parallel as up
from planned_models import KINDS, adamw

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:unisono,cuda:nccl")
torch.set_default_device("cuda")
make, loss, batch = KINDS["llama"]
sample = tuple(each.cuda() for each in batch(4))
losses = []
for axis in ("data", "context"):
    with torch.device("meta"):
        model = make()
    plan = up.Plan(**{axis: 2}, zero=2, precision="bf16")
    run = up.parallelize(model, plan, optimizer=adamw, loss=loss, seed=0, sample=sample[0][:2])
    losses.append([run.step(given) for given in run.shard([sample] * 2)])
assert all(abs(a - b) < 0.02 for a, b in zip(*losses, strict=True)), losses
print("the losses agree")
dist.destroy_process_group()
