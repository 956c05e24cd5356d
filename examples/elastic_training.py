"""Training that goes on when ranks die, and takes their replacements in.

    unisono run --elastic 1:4 --respawn 3 examples/elastic_training.py

Rank 1 kills itself in step 30, in the middle of backward. The others do that step again, with the same
samples. The launcher starts a new process, which gets parameters, moments, the scheduler and its place in the
epoch from the others, and goes on with them. `kill -9` any rank, too.
"""

import os
import signal
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import unisono.parallel as up

NEW = "UNISONO_JOIN" in os.environ
STEP_S = float(os.environ.get("STEP_S", "0.1"))  # a small model computes too fast to look at


def main() -> None:
    """Fit a small network to labels that a random matrix gives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8))
    x, teacher = torch.randn(1024, 32), torch.randn(32, 8)
    data = TensorDataset(x, (x @ teacher).argmax(1))
    with up.parallelize(
        model,
        up.Plan(data=4, elastic=True),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        loss=functional.cross_entropy,
        on_change=lambda change: run.mesh.row == 0 and print(change, flush=True),
    ) as run:
        if os.environ["RANK"] == "1" and not NEW:
            weight = model[0].weight
            weight.register_hook(lambda _: (run.steps == 29 and os.kill(os.getpid(), signal.SIGKILL)) or None)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 200)
        run.attach(scheduler=scheduler)
        batches = run.shard(DataLoader(data, batch_size=64, shuffle=True))
        for epoch in run.epochs(14):
            for batch in batches:
                loss = run.step(batch)
                scheduler.step()
                time.sleep(STEP_S)
            if run.mesh.row == 0:
                print(f"epoch {epoch}: {run.plan.data} ranks, loss {loss:.4f}", flush=True)
        assert loss < 0.8, loss


if __name__ == "__main__":
    main()
