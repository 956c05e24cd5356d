"""Hugging Face Accelerate on CPU, which asks for gloo. Run by test_replace.py.

With the argument "named" the program asks for Unisono itself. Accelerate refuses a name that it does not
know, but takes the group that is there.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    if "named" in sys.argv:
        dist.init_process_group("unisono")
    accelerator = Accelerator(cpu=True)
    assert type(dist.group.WORLD).__name__ == "ProcessGroupUnisono", dist.group.WORLD
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    for (x,) in loader:
        loss = net(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    everybody = accelerator.gather(accelerator.unwrap_model(net).weight.detach())
    assert torch.equal(everybody[0], everybody[-1])
    assert accelerator.reduce(torch.ones(1)).item() == accelerator.num_processes
    accelerator.wait_for_everyone()
    assert accelerator.gather_for_metrics([accelerator.process_index]) is not None
    accelerator.end_training()
    print("fine")


if __name__ == "__main__":
    main()
