"""A pipeline over the GPUs of one process, written for PyTorch's Pipe: beside the plain model on the CPU."""

import copy
import os

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unisono.parallel import Pipe  # from torch.distributed.pipeline.sync import Pipe


def of_the_text() -> None:
    """With `init_rpc`, which PyTorch's Pipe needed."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    rpc.init_rpc("worker", rank=0, world_size=1)
    fc1, fc2 = nn.Linear(16, 8).cuda(0), nn.Linear(8, 4).cuda(1)
    model = nn.Sequential(fc1, nn.ReLU(), fc2)
    plain = copy.deepcopy(model).cpu()
    model = Pipe(model, chunks=8)
    x = torch.rand(16, 16).cuda(0)
    output = model(x).local_value()
    assert output.device == torch.device("cuda", 1)
    output.sum().backward()
    plain(x.cpu()).sum().backward()
    torch.testing.assert_close(output.cpu(), plain(x.cpu()))
    compare(model, plain)
    for move in (model.cpu, model.cuda):
        try:
            move()
        except ValueError as error:
            assert "Pipe: its children are on cuda:0, cuda:1" in str(error)
        else:
            raise AssertionError("the stages were moved")
    rpc.shutdown()


def compare(model: nn.Module, plain: nn.Module) -> None:
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad)
        assert one.grad.device == one.device
        one.grad = other.grad = None


def with_everything() -> None:
    """Four stages on two GPUs, one of which comes back; draws; every order; in autograd's thread of a GPU."""
    layers = [nn.Linear(8, 8).cuda(place) for place in (0, 1, 0, 1)]
    results = []
    for mode in ("never", "except_last", "always"):
        for schedule in ("gpipe", "1f1b"):
            model = nn.Sequential(*layers[:2], nn.Dropout(0.3), *layers[2:])
            pipe = Pipe(model, 4, mode, schedule=schedule)
            torch.manual_seed(0)
            x = torch.randn(8, 8, device="cuda:0", requires_grad=True)
            pipe(x, target=torch.zeros(8, 8), loss=functional.mse_loss).local_value().backward()
            results.append([x.grad, *(layer.weight.grad for layer in layers)])
            pipe.zero_grad()
    for one in results:
        torch.testing.assert_close(one, results[0])
    plain = nn.Sequential(*copy.deepcopy(layers)).cpu()
    pipe = Pipe(nn.Sequential(*layers), 4, "always")
    x = torch.randn(8, 8, device="cuda:1", requires_grad=True)
    # the sanitizer counts a copy for a stream of its target; CUDA runs it on one of its source
    stream = None if "TORCH_CUDA_SANITIZER" in os.environ else torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):
        checkpoint(lambda rows: pipe(rows).local_value(), x, use_reentrant=True).sum().backward()
    plain(x.detach().cpu()).sum().backward()
    compare(pipe, plain)


def memory(mode: str) -> int:
    """The peak of a GPU in a step."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    model[:4].cuda(0)
    model[4:].cuda(1)
    pipe, x = Pipe(model, 8, mode), torch.randn(4096, 64, device="cuda:0")
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    pipe(x).local_value().mean().backward()
    return torch.cuda.max_memory_allocated(0) - before


of_the_text()
with_everything()
kept, again = memory("never"), memory("always")
assert again < 0.6 * kept, (again, kept)
print("as the plain model; peaks", kept >> 10, again >> 10)
