"""Lightning with DDP on CPU: fit with synchronised logs, all_gather, validation, prepare_data."""

import os
import tempfile

import lightning
import torch
import torch.distributed as dist
from client import BACKEND, Steps, data, net
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.steps = Steps()

    def prepare_data(self) -> None:
        """Lightning lets local rank 0 come here first, behind a barrier of 10,000 days."""

    def training_step(self, batch, index):
        loss = (self.net(batch) - 1).square().mean()
        self.log("loss", loss, sync_dist=True)
        self.log("count", torch.tensor(index), sync_dist=True)  # an integer, averaged over the ranks
        self.last = loss.detach()
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        self.steps.done(self.last)

    def validation_step(self, batch, index):
        self.log("validated", self.net(batch).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        every = self.all_gather(self.net[0].weight.detach())
        assert torch.equal(every[0], every[-1])
        self.steps.report(self.net[0].weight.detach())


def main() -> None:
    lightning.seed_everything(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy=DDPStrategy(process_group_backend=BACKEND),
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Net(), DataLoader(data(), batch_size=8), DataLoader(data(2), batch_size=8))
        dist.barrier()


if __name__ == "__main__":
    main()
