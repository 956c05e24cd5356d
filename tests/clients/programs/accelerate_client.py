"""Hugging Face Accelerate on CPU: prepare, train, gather, reduce, gather_for_metrics.

Accelerate refuses a backend that is not in its own list, but takes the group that is there.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from client import BACKEND, Steps, data, net
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    if BACKEND != "gloo":
        dist.init_process_group(BACKEND)
    accelerator = Accelerator(cpu=True)
    model, loader = net(), DataLoader(TensorDataset(data()), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    steps = Steps()
    for (x,) in loader:
        loss = (model(x) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps.done(loss.detach())
    assert accelerator.reduce(torch.ones(1)).item() == accelerator.num_processes
    accelerator.wait_for_everyone()
    found = accelerator.gather_for_metrics([accelerator.process_index])
    assert sorted(found) == list(range(accelerator.num_processes)), found
    steps.report(accelerator.unwrap_model(model)[0].weight.detach())
    accelerator.end_training()


if __name__ == "__main__":
    main()
