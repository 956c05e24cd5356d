"""DeepSpeed's ZeRO stages on CPU, over gloo by name. Run by test_replace.py."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist


def train(stage: int) -> torch.Tensor:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(4):
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
    with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=stage == 3):
        return torch.cat([p.detach().flatten().clone() for p in net.parameters()])


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    assert type(dist.group.WORLD).__name__ == "ProcessGroupUnisono", dist.group.WORLD
    plain = train(0)
    for stage in (1, 2, 3):
        torch.testing.assert_close(train(stage), plain, rtol=1e-5, atol=1e-5)
    everybody = [torch.empty_like(plain) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, plain)
    assert torch.equal(everybody[0], everybody[-1])
    deepspeed.comm.destroy_process_group()
    print("fine")


if __name__ == "__main__":
    main()
