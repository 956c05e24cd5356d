"""Two steps of training by a plan, on four ranks: data x tensor, or a pipeline."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import unisono.parallel as up
import unisono.torch  # noqa: F401

PLANS = {
    "tensor": {"tensor": 2, "data": 2},
    "pipeline": {"pipeline": 2, "data": 2, "micro_batches": 2},
}


def main() -> None:
    dist.init_process_group("unisono")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    batches = [(torch.randn(16, 16), torch.randint(4, (16,))) for _ in range(2)]
    run = up.parallelize(
        model,
        up.Plan(**PLANS[sys.argv[1]]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        loss=functional.cross_entropy,
    )
    for batch in run.shard(batches):
        run.step(batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
