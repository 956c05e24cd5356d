"""Sparse all-reduce, and DDP with sparse gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def of(rank: int, dtype=torch.float32) -> torch.Tensor:
    """Entries of `rank`: one twice, one that every rank has, none at all on rank 1."""
    if rank == 1:
        return torch.zeros(4, 5, dtype=dtype).to_sparse()
    indices = torch.tensor([[0, 2, 2, 3], [rank, 4, 4, 1]])
    return torch.sparse_coo_tensor(indices, torch.tensor([1, 2, 3, rank + 1], dtype=dtype), (4, 5))


def check_sparse_all_reduce(rank, size):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        want = sum(of(r, dtype).to_dense() for r in range(size))
        x = of(rank, dtype)
        dist.all_reduce(x)
        assert x.is_sparse
        assert torch.equal(x.to_dense(), want)
        work = dist.all_reduce(y := of(rank, dtype), async_op=True)
        assert work.wait()
        assert torch.equal(y.to_dense(), want)
        assert torch.equal(work.result()[0].to_dense(), want)
        future = dist.all_reduce(z := of(rank, dtype), async_op=True).get_future()
        assert torch.equal(future.wait()[0].to_dense(), want)
        assert torch.equal(z.to_dense(), want)


def check_sparse_rows(rank, size):
    x = torch.sparse_coo_tensor(torch.tensor([[rank, 3]]), torch.full((2, 2), 1.0 + rank), (4, 2))
    dist.all_reduce(x)
    want = torch.zeros(4, 2)
    for r in range(size):
        want[r] += 1 + r
        want[3] += 1 + r
    assert torch.equal(x.to_dense(), want)


def check_sparse_is_refused(rank, size):
    with pytest.raises(ValueError, match="expected SUM"):
        dist.all_reduce(of(rank), dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="different shapes: rank"):
        dist.all_reduce(torch.eye(3 + rank).to_sparse())
    dist.barrier()  # the group is as it was


def check_ddp_with_a_sparse_embedding(rank, size):
    def model(sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.EmbeddingBag(20, 4, mode="sum", sparse=sparse), nn.Linear(4, 1))

    whole, net = model(False), model(True)
    ddp = DistributedDataParallel(net)
    words = torch.arange(size * 6).reshape(size * 2, 3) % 20
    for one, batch, parts in ((whole, words, 1), (ddp, words[2 * rank : 2 * rank + 2], size)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (one(batch).sum() * parts / (2 * size)).backward()
            optimizer.step()
    assert net[0].weight.grad.is_sparse
    for a, b in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
