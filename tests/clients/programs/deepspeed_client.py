"""DeepSpeed on CPU: ZeRO 0 to 3 (the losses of all four), a mixture of experts, a pipeline of two stages."""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from client import BACKEND, STEPS, Steps, data, net
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "steps_per_print": 10**9,
}


def of_this_rank(samples: torch.Tensor) -> list[torch.Tensor]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return list(samples[rank::size].split(8))


def train(model: torch.nn.Module, steps: Steps, **config: object) -> torch.Tensor:
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config={**CONFIG, **config}
    )
    for x in of_this_rank(data()):
        output = engine(x)
        loss = (output - 1).square().mean()
        engine.backward(loss)
        engine.step()
        steps.done(loss.detach())
    with deepspeed.zero.GatheredParameters(
        list(model.parameters()), enabled=engine.zero_optimization_stage() == 3
    ):
        return next(model.parameters()).detach().clone()


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(64, 64)
        self.moe = MoE(64, torch.nn.Linear(64, 64), num_experts=2, ep_size=2, k=1)
        self.last = torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.moe(self.first(x))[0])


def pipeline(steps: Steps) -> torch.Tensor:
    layers = list(net())
    model = PipelineModule(
        layers, num_stages=2, loss_fn=lambda output, wanted: (output - wanted).square().mean()
    )
    config = {**CONFIG, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 8}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    batches = iter([(x, torch.ones(8, 1)) for x in data().split(8)])
    for _ in range(STEPS // 2):
        steps.done(engine.train_batch(batches))
    return torch.zeros(1)


def main(part: str) -> None:
    deepspeed.init_distributed(dist_backend=BACKEND)
    steps = Steps()
    match part:
        case "moe":
            weights = train(Experts(), steps)
        case "pipeline":
            weights = pipeline(steps)
        case stage:
            weights = train(net(), steps, zero_optimization={"stage": int(stage)})
    steps.report(weights)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
