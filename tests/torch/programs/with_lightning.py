"""Lightning with DDP on CPU, which asks for gloo. Run by test_replace.py."""

from __future__ import annotations

import os
import sys

import lightning
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        assert type(dist.group.WORLD).__name__ == "ProcessGroupUnisono", dist.group.WORLD
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        every = self.all_gather(self.layer.weight.detach())
        assert torch.equal(every[0], every[-1])


def main(folder: str) -> None:
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Net(), DataLoader(torch.randn(32, 4), batch_size=4))
    print("fine")


if __name__ == "__main__":
    main(sys.argv[1])
