"""Lightning starts its ranks itself, or a launcher did: DDP in float16 with synchronised logs."""

from __future__ import annotations

import sys

import lightning
import torch
from report import report
from torch.utils.data import DataLoader, DistributedSampler


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch, index):
        loss = (self.net(batch) - 1).square().mean()
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self):
        """In order: Lightning's own sampler shuffles."""
        data = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
        ranks = self.trainer.world_size
        sampler = DistributedSampler(data, ranks, self.global_rank, shuffle=False)
        return DataLoader(data, batch_size=16 // ranks, sampler=sampler)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_train_end(self) -> None:
        report(self.losses)


def main(gpus: int) -> None:
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator="gpu", devices=gpus, strategy="ddp" if gpus > 1 else "auto", precision="16-mixed",
        max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Net())


if __name__ == "__main__":
    main(int(sys.argv[1]))
