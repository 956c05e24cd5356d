"""Several GPUs in one process: DataParallel, a model split over two devices, and two halves that share one.

unisono run -n 1 --virtual-gpus 2 examples/virtual/one_process.py
"""

import torch
from torch import nn


def data_parallel() -> str:
    torch.manual_seed(0)
    model = nn.DataParallel(nn.Linear(8, 2).cuda(), device_ids=[0, 1])
    loss = model(torch.randn(6, 8).cuda()).square().mean()
    loss.backward()
    return f"DataParallel on {torch.cuda.device_count()} devices: loss {loss.item():.3f}"


class Split(nn.Module):
    """Each half lives on its own device; the activations move."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 64), nn.ReLU()).to("cuda:0")
        self.second = nn.Linear(64, 1).to("cuda:1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.to("cuda:0")).to("cuda:1"))


def train(model: nn.Module, device: str) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True).to(device)
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Swapped(torch.autograd.Function):
    """A layer whose weights are on the GPU only while it computes, in both directions."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)  # the weight on the host
        return x @ weight.cuda(non_blocking=True).t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.cuda(non_blocking=True), (grad.t() @ x).cpu()


def swapped() -> str:
    torch.manual_seed(0)
    weights = [torch.randn(256, 256).mul_(0.05).pin_memory().requires_grad_() for _ in range(2)]
    x = torch.randn(4, 256, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = Swapped.apply(Swapped.apply(x, weights[0]).relu(), weights[1])
    y.square().mean().backward()
    peak = torch.cuda.max_memory_allocated() - before
    one = weights[0].nbytes
    assert all(w.grad is not None and w.grad.is_cpu for w in weights)
    assert peak < 2.5 * one
    return f"two layers of {one >> 10} KiB each took {peak >> 10} KiB of the GPU"


def main() -> None:
    print(data_parallel())
    torch.manual_seed(0)
    losses = train(Split(), "cuda:1")
    assert losses[-1] < losses[0]
    print(f"split over two devices: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(swapped())


if __name__ == "__main__":
    main()
