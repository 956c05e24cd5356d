"""A run that publishes its weights, or one that takes them: publishes_a_run.py SIDE PLAN ADDRESS FOLDER."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import unisono as un
import unisono.parallel as up

SIDE, PLAN, ADDRESS, FOLDER = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])
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


def main() -> None:
    """The taker writes what it has, the publisher compares it with its own."""
    dist.init_process_group("unisono")
    torch.manual_seed(SIDE == "publish")
    model = nn.Sequential(Block(), Block(), nn.Flatten(), nn.Linear(16 * 5, 4))
    batch = torch.randn(8, 5, 16), torch.randint(4, (8,))
    run = up.parallelize(
        model, PLANS[PLAN], optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=functional.cross_entropy,
        sample=batch[0],
    )  # fmt: skip
    if SIDE == "publish":
        host, _, port = ADDRESS.rpartition(":")
        with un.publish("policy", run, address=host, port=int(port)) as publication:
            run.step(batch)
            assert publication.update() == 2
            while not (FOLDER / "taken.pt").exists():
                time.sleep(0.05)
        mine = run.state_dict()
        theirs = torch.load(FOLDER / "taken.pt") if dist.get_rank() == 0 else {}
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        print("equal")
    else:
        with un.subscribe(ADDRESS, "policy", into=run, timeout=60) as subscription:
            assert subscription.get(newer_than=1)[0] == 2
        taken = run.state_dict()
        if dist.get_rank() == 0:
            torch.save(taken, FOLDER / "new.pt")
            (FOLDER / "new.pt").rename(FOLDER / "taken.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
