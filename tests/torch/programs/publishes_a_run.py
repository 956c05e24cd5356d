"""Two jobs, started by suite.py: the first ranks publish the weights of a run, the others take them."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import unisono as un
import unisono.parallel as up

PLANS = {
    "zero": up.Plan(data=2, zero=3),
    "tensor": up.Plan(tensor=2),
    "pipeline": up.Plan(tensor=2, pipeline=2),
}


class Block(nn.Module):
    """Attention, whose projections a plan cuts as three layers, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(functional.gelu(self.up(x)))


def main(rank: int, _: int, folder: Path, one: str, other: str, port: str) -> None:
    """The taker writes what it has, the publisher compares it with its own."""
    os.environ["UNISONO_TOKEN"] = "ab" * 32
    publishing = PLANS[one].ranks
    side, plan, rank = ("publish", one, rank) if rank < publishing else ("take", other, rank - publishing)
    store = dist.FileStore(str(folder / side), PLANS[plan].ranks)
    dist.init_process_group("unisono", store=store, rank=rank, world_size=PLANS[plan].ranks)
    torch.manual_seed(side == "publish")
    model = nn.Sequential(Block(), Block(), nn.Flatten(), nn.Linear(16 * 5, 4))
    batch = torch.randn(8, 5, 16), torch.randint(4, (8,))
    run = up.parallelize(
        model, PLANS[plan], optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=functional.cross_entropy,
        sample=batch[0],
    )  # fmt: skip
    if side == "publish":
        with un.publish("policy", run, address="127.0.0.1", port=int(port)) as publication:
            run.step(batch)
            assert publication.update() == 2
            while not (folder / "taken.pt").exists():
                time.sleep(0.05)
        mine = run.state_dict()
        theirs = torch.load(folder / "taken.pt") if rank == 0 else {}
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        print("equal")
    else:
        with un.subscribe(f"127.0.0.1:{port}", "policy", into=run, timeout=60) as subscription:
            assert subscription.get(newer_than=1)[0] == 2
        taken = run.state_dict()
        if rank == 0:
            torch.save(taken, folder / "new.pt")
            (folder / "new.pt").rename(folder / "taken.pt")
    dist.destroy_process_group()
