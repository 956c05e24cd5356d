"""`right_training.py KIND`: a training that is right on any number of ranks, with unusual rounding."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

KIND = sys.argv[1]
dist.init_process_group("unisono")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
rows = torch.randn(32, 6, 8)[rank::size]


def parallel(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model) if size > 1 else model


if KIND == "two optimizers":  # a model gets what the other one returns, and is called three times
    makes = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    judge = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    g, d = parallel(makes), parallel(judge)
    step_g, step_d = (torch.optim.Adam(model.parameters(), 1e-3) for model in (g, d))
    for _ in range(6):
        fake = g(rows[:, 0])
        step_d.zero_grad()
        d(torch.cat([fake.detach(), rows[:, 1]])).square().mean().backward()
        step_d.step()
        step_g.zero_grad()
        judge(fake).square().mean().backward()
        step_g.step()
elif KIND == "lbfgs":  # which makes much of a difference of rounding, and reaches a loss of 0
    model = parallel(nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
    labels = rows[:, 0] @ torch.ones(8, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(rows[:, 0]), labels)
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
else:  # the bias of keys has a gradient of rounding only, of which Adam makes whole steps

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))

    model = parallel(Attention())
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=KIND == "bf16"):
            loss = model(rows).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
dist.destroy_process_group()
