"""Accelerate with uneven batches and a seeded loader: its ranks call different things.

`join_uneven_inputs` has no effect on CPUs. The rank with fewer batches begins the next epoch, for which it
broadcasts the generator's state, while the other still averages gradients.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from client import BACKEND, net
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    if BACKEND != "gloo":
        dist.init_process_group(BACKEND)
    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    seeded = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(24, 64))
    model, loader = net(), DataLoader(samples, batch_size=8, shuffle=True, generator=seeded)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with accelerator.join_uneven_inputs([model]):
        for _ in range(2):
            for (x,) in loader:
                accelerator.backward((model(x) - 1).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
