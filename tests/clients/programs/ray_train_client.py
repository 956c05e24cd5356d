"""Ray Train on a local node: its TorchTrainer starts the ranks and makes the group."""

import tempfile
from pathlib import Path

import ray
from client import BACKEND, data, net
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

HERE = str(Path(__file__).resolve().parent)


def train() -> None:
    import sys

    sys.path.append(HERE)
    import torch
    import torch.distributed as dist
    from client import Steps
    from ray.train.torch import prepare_model

    model = prepare_model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = Steps()
    for x in data()[dist.get_rank() :: dist.get_world_size()].split(8):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        steps.done(loss.detach())
    steps.report(model.module[0].weight.detach())


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 1024 * 1024)
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            train,
            scaling_config=ScalingConfig(num_workers=2),
            torch_config=TorchConfig(backend=BACKEND),
            run_config=RunConfig(storage_path=folder),
        ).fit()


if __name__ == "__main__":
    main()
