"""2 x 2 GPUs: each of two pipeline stages is split over two GPUs by tensor parallelism.

unisono run --virtual-gpus 4 examples/virtual/tensor_pipeline.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    torch.manual_seed(0)
    stages = [Stage().to(device), Stage().to(device)]
    number = mesh["pipeline"].get_local_rank()
    part = parallelize_module(
        stages[number], mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    stage = PipelineStage(part, number, 2, device, group=mesh.get_group("pipeline"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.05)
    torch.manual_seed(1)
    x = torch.randn(8, 16).to(device)
    losses: list[float] = []
    for _ in range(10):
        optimizer.zero_grad()
        if number == 0:
            schedule.step(x)
        else:
            each: list[torch.Tensor] = []
            schedule.step(target=x.flip(1), losses=each)
            losses.append(torch.stack(each).mean().item())
        optimizer.step()
    if losses and mesh["tensor"].get_local_rank() == 0:
        assert losses[-1] < losses[0]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
