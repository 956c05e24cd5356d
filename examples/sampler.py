"""DistributedSampler: each epoch every sample is seen once by one rank, in an order that is new each time.

    unisono run -n 2 examples/sampler.py

Without `set_epoch` every epoch has the same order: the sampler shuffles by seed and epoch, and nobody told
it that there is a new one.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES = 24  # a multiple of the ranks; otherwise some samples come twice, or are dropped with drop_last=True


def epoch_of(loader: DataLoader) -> list[list[int]]:
    """Which samples each rank saw, in order. Every rank gets the whole list."""
    mine = torch.cat([numbers for (numbers,) in loader])
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return [seen.tolist() for seen in everybody]


def main() -> None:
    dist.init_process_group("unisono")
    data = TensorDataset(torch.arange(SAMPLES))
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=4, sampler=sampler)  # shuffle= belongs to the sampler now

    forgotten = [epoch_of(loader) for _ in range(2)]
    assert forgotten[0] == forgotten[1]  # the same order twice: this is what forgetting set_epoch does

    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append(epoch_of(loader))
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: rank 0 sees {epochs[-1][0]}", flush=True)
    for seen in epochs:
        assert sorted(chain.from_iterable(seen)) == list(range(SAMPLES))
    assert len({str(seen) for seen in epochs}) == len(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
