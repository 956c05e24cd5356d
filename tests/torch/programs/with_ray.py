"""Ray Train on a local node, its TorchTrainer with gloo. Run by test_replace.py."""

from __future__ import annotations

import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train() -> None:
    import torch
    import torch.distributed as dist
    from ray.train.torch import prepare_model

    assert type(dist.group.WORLD).__name__ == "ProcessGroupUnisono", dist.group.WORLD
    net = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = net.module.weight.detach()
    everybody = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, weight)
    assert torch.equal(everybody[0], everybody[-1])


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 1024 * 1024)
    TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=sys.argv[1]),
    ).fit()
    print("fine")


if __name__ == "__main__":
    main()
