"""CUDA graphs: a training loop with one ends with the numbers of the loop without. `graph_cases.py CASE`."""

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS, EAGER = 6, 3


def losses(wrap: Callable[[nn.Module], nn.Module], graphed: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Train a small net on other numbers in each step; return the losses, and its parameters and buffers."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)
    ]
    model = wrap(nn.Sequential(*blocks, nn.Linear(16, 1)).cuda())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, capturable=True)
    x, found = torch.zeros(8, 16, device="cuda"), []
    data = torch.randn(STEPS, 8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    graph = torch.cuda.CUDAGraph()

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for i in range(STEPS):
        x.copy_(data[i])
        if graphed and i == EAGER:
            old = [each.clone() for each in model.state_dict().values()]
            with torch.cuda.graph(graph):
                assert torch.cuda.is_current_stream_capturing()
                loss = step()
            assert all(map(same, old, model.state_dict().values())), "a capture changed something"
        if graphed and i >= EAGER:
            graph.replay()
        else:
            loss = step()
        found.append(loss.item())
    return found, [each.clone() for each in model.state_dict().values()]


def same(one: Any, other: Any) -> bool:
    one, other = (getattr(x, "_local_tensor", x) for x in (one, other))
    return torch.equal(one, other)


def trains(how: str) -> None:
    """how: alone, ddp, fsdp or compiled (fsdp)."""

    def wrap(model: nn.Module) -> nn.Module:
        if how == "ddp":
            return DistributedDataParallel(model)
        if how == "compiled":
            model.compile()
        for block in [*model, model] if how != "alone" else []:
            fully_shard(block)
        return model

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    expected, ended = losses(wrap, graphed=False), losses(wrap, graphed=True)
    assert expected[0] == ended[0], (expected[0], ended[0])
    assert all(map(same, expected[1], ended[1]))
    dist.destroy_process_group()
    print("the same")


def memory() -> None:
    """Between replays a graph has the memory of what the program sees; after its end none."""
    x, graph = torch.ones(1 << 20, device="cuda"), torch.cuda.CUDAGraph()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        result = ((x + 1) * 2 - 3).sum()
    assert torch.cuda.memory_allocated() - before == 512, torch.cuda.memory_allocated() - before
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert result.item() == (2 * value - 1) * x.numel()
    assert torch.cuda.memory_allocated() - before == 512
    del graph, result
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    print("freed")


def communicates() -> None:
    """All collectives and a message to the neighbour, in the order of the capture."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    x, theirs = torch.zeros(2, device="cuda"), torch.zeros(2, device="cuda")
    gathered, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()

    halves = dist.new_group([0, 1])
    large = torch.zeros(2, 1 << 20, device="cuda")  # beyond what a send leaves with the other rank

    def run() -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, async_op=True).wait()
        dist.all_reduce(total, group=halves)
        large[0] = x[0]
        for work in [dist.isend(large[0], 1 - rank), dist.irecv(large[1], 1 - rank)]:
            work.wait()
        dist.all_gather_into_tensor(gathered, x)
        for work in [dist.isend(x, 1 - rank), dist.irecv(theirs, 1 - rank)]:
            work.wait()
        return total * 10 + theirs + gathered.sum() + large[1, -1] * 1000

    run()
    with torch.cuda.graph(graph):
        result = run()
    assert gathered.tolist() == [0.0] * 4
    for step in (1, 2):
        x.fill_(rank + step)
        graph.replay()
        total, other = 2 * step + 1, 1 - rank + step
        assert result.tolist() == [20.0 * total + 1001 * other + 2 * total] * 2, result
    dist.destroy_process_group()
    print("the same")


def pieces() -> None:
    """make_graphed_callables, and what would wait for the GPU."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 4).cuda()
    sample = torch.ones(2, 4, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(nn.Linear(4, 4).cuda(), (sample,))
    graphed.load_state_dict(plain.state_dict())
    inputs = [torch.full((2, 4), 3.0, device="cuda", requires_grad=True) for _ in range(2)]
    for model, x in zip((plain, graphed), inputs, strict=True):
        model(x).square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert torch.equal(plain.weight.grad, graphed.weight.grad)
    rows, graph = torch.tensor([1, 0], device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # numbers of rows, not a mask: its shape is known
        swapped = sample[rows]
    graph.replay()
    assert torch.equal(swapped, sample.flip(0))
    for wrong in (lambda: sample.sum().item(), lambda: sample.cpu(), lambda: sample[sample > 0]):
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                wrong()
        except torch.AcceleratorError as error:
            assert "operation not permitted when stream is capturing" in str(error)
        else:
            raise AssertionError("nothing was raised")
        assert not torch.cuda.is_current_stream_capturing()
    print("refused")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
