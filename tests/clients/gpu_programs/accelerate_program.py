"""Accelerate in float16 with accumulated gradients; the loader is cut over the ranks."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from report import report


def main(gpus: int) -> None:
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    data = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=16 // gpus)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = (model(batch) - 1).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    report(losses)
    accelerator.end_training()


if __name__ == "__main__":
    main(int(sys.argv[1]))
