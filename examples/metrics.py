"""Averages over the ranks that leave what they average alone.

    unisono run -n 2 examples/metrics.py

The trap: `dist.all_reduce(loss.data); loss.data /= size` to have a number to print. all_reduce works in
place, so the live loss is another one afterwards, and so is what backward computes from it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def averaged(value: Tensor) -> Tensor:
    """The mean over the ranks, as a new tensor without a graph. `value` stays as it is."""
    copy = value.detach().clone()
    dist.all_reduce(copy, dist.ReduceOp.AVG)
    return copy


def averaged_over_samples(total: Tensor, samples: int) -> Tensor:
    """The mean over all samples, where ranks saw different numbers of them: a last batch, a validation set.

    The mean of the ranks' means would give a sample more weight on the rank that saw fewer.
    """
    sums = torch.stack([total.detach().double(), torch.tensor(float(samples), dtype=torch.float64)])
    dist.all_reduce(sums)
    return sums[0] / sums[1]


def main() -> None:
    dist.init_process_group("unisono")
    rank, size = dist.get_rank(), dist.get_world_size()

    weight = nn.Parameter(torch.tensor(2.0))
    loss = (rank + 1.0) * weight**2
    shown = averaged(loss)
    assert shown.item() == 4.0 * (size + 1) / 2
    assert loss.item() == 4.0 * (rank + 1)  # the live loss is this rank's, as before
    (loss**2).backward()  # uses the value of `loss`, which must still be this rank's
    assert weight.grad.item() == 32.0 * (rank + 1) ** 2

    correct = torch.arange(10 + 5 * rank) % 3 != 0  # another number of samples on every rank
    accuracy = averaged_over_samples(correct.sum(), len(correct))
    everywhere = torch.cat([torch.arange(10 + 5 * other) % 3 != 0 for other in range(size)])
    assert torch.isclose(accuracy, everywhere.double().mean())
    if rank == 0:
        print(f"loss {shown.item():.3f} on average, {loss.item():.3f} here; accuracy {accuracy.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
