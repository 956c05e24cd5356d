"""One process with several virtual GPUs. `devices.py NAME`, under `unisono run -n 1 --virtual-gpus 2`."""

import sys

import torch
from told import refusal, say
from torch import nn
from trained import alone, same

import unisono.parallel as up


def steps(model: nn.Module, x: torch.Tensor, y: torch.Tensor, count: int = 3) -> list[float]:
    """The losses of some steps of SGD."""
    return alone(model, [(x, y)] * count, lambda params: torch.optim.SGD(params, 0.1))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 16), torch.randn(12, 4)


def places() -> None:
    model, (x, y) = net().cuda(1), rows()
    say(refusal(lambda: model(x), RuntimeError))
    say(refusal(lambda: x.cuda(0) + y.cuda(1)[:, :1], RuntimeError))
    say({str(parameter.device) for parameter in model.parameters()}, model(x.cuda(1)).device)


def replicas() -> None:
    """nn.DataParallel: threads; outputs, gathered gradients and the optimizer are on the first device."""
    x, y = rows()
    big = nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 4)).cuda()
    found = steps(nn.DataParallel(net().cuda()), x.cuda(), y.cuda())
    same(found, steps(net(), x, y))
    for device in range(2):
        torch.cuda.reset_peak_memory_stats(device)
    steps(nn.DataParallel(big), x.cuda(), y.cuda(), 1)
    first, second = (torch.cuda.max_memory_allocated(device) for device in range(2))
    assert first > 1.5 * second > 0
    say("the losses of one device; the first device holds the most")


class Halves(nn.Module):
    """A model over two devices: the activation moves."""

    def __init__(self) -> None:
        super().__init__()
        one, relu, two = net()
        self.front, self.back = nn.Sequential(one, relu).to("cuda:0"), two.to("cuda:1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(self.front(x.to("cuda:0")).to("cuda:1"))


def halves() -> None:
    model, (x, y) = Halves(), rows()
    same(steps(model, x, y.to("cuda:1")), steps(net(), x, y))
    say(sorted({str(parameter.grad.device) for parameter in model.parameters()}))


def pipe() -> None:
    """A pipeline over the devices of one process."""
    one, relu, two = net()
    piped = up.Pipe(nn.Sequential(nn.Sequential(one, relu).to("cuda:0"), two.to("cuda:1")), chunks=4)
    x, y = rows()
    optimizer, found, parts = torch.optim.SGD(piped.parameters(), 0.1), [], []
    two.register_forward_hook(lambda _, given, __: parts.append(len(given[0])))
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(piped(x.to("cuda:0")).local_value(), y.to("cuda:1"))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    same(found, steps(net(), x, y))
    assert parts == [3] * 3 * (4 + 3)  # four micro-batches of 3 rows, three of them once more in backward
    say("the losses of one device")


def moved_away() -> None:
    """A layer that is moved to the host after its forward: autograd keeps its weight on the GPU."""
    x, layer = torch.ones(4, 64, device="cuda", requires_grad=True), nn.Linear(64, 64, bias=False)
    before = torch.cuda.memory_allocated()
    y = layer.cuda()(x).sum()
    layer.cpu()
    kept = torch.cuda.memory_allocated() - before
    assert kept >= layer.weight.nbytes
    layer.cuda()
    y.backward()
    say("autograd keeps", layer.weight.nbytes, "bytes on the GPU")


def swapped() -> None:
    """Weights on the host but for the layer that computes: the losses of plain AdamW."""
    x, y = (t.cuda() for t in rows())
    plain, kept = net().cuda(), net().cuda()
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-2)
    with up.Swapped(kept, optimizer=lambda params: torch.optim.AdamW(params, 1e-2), store=up.Host(),
                    loss=nn.functional.mse_loss) as run:  # fmt: skip
        for _ in range(3):
            loss = nn.functional.mse_loss(plain(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert run.step((x, y)) == loss.item()
        del loss
        assert all(parameter.untyped_storage().size() == 0 for parameter in kept.parameters())
    say("the losses of AdamW, bit for bit; no weight stays on the GPU")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
