"""Collectives that gradients flow through, and the functional ones in place and by PyTorch's other names."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


def check_all_reduce_and_its_gradient(rank, size):
    x = ones(3)
    (with_gradients.all_reduce(x) * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [size * (size + 1) / 2] * 3


def check_broadcast_and_reduce(rank, size):
    x = torch.full((2,), float(rank), requires_grad=True)
    out = with_gradients.broadcast(x, src=1)
    assert out.tolist() == [1.0, 1.0]
    out.sum().backward()
    assert x.grad.tolist() == [float(size) if rank == 1 else 0.0] * 2
    y = ones(2)
    total = with_gradients.reduce(y, dst=0)
    assert rank or total.tolist() == [float(size)] * 2
    total.sum().backward()
    assert y.grad.tolist() == [1.0, 1.0]


def check_gather_and_scatter(rank, size):
    x = torch.full((2,), float(rank), requires_grad=True)
    out = with_gradients.gather(x, dst=0)
    if rank == 0:
        assert [part[0].item() for part in out] == list(range(size))
    sum((index + 1) * part.sum() for index, part in enumerate(out)).backward()
    assert x.grad.tolist() == [rank + 1.0] * 2
    parts = [torch.full((2,), float(index), requires_grad=True) for index in range(size)]
    mine = with_gradients.scatter(parts, src=0)
    assert mine.tolist() == [float(rank)] * 2
    mine.sum().backward()
    assert rank or all(part.grad.tolist() == [1.0, 1.0] for part in parts)


def check_all_gather_and_reduce_scatter(rank, size):
    x = torch.full((2,), float(rank), requires_grad=True)
    out = with_gradients.all_gather(x)
    assert [part[0].item() for part in out] == list(range(size))
    sum(part.sum() for part in out).backward()
    assert x.grad.tolist() == [float(size)] * 2
    parts = [torch.full((2,), float(index), requires_grad=True) for index in range(size)]
    mine = with_gradients.reduce_scatter(torch.empty(2), parts)
    assert mine.tolist() == [float(rank * size)] * 2
    mine.sum().backward()
    assert all(part.grad.tolist() == [1.0, 1.0] for part in parts)


def check_all_to_all(rank, size):
    parts = [torch.full((1,), 10.0 * rank + index, requires_grad=True) for index in range(size)]
    out = with_gradients.all_to_all([torch.empty(1) for _ in range(size)], parts)
    assert [part.item() for part in out] == [10.0 * index + rank for index in range(size)]
    sum(part.sum() * (rank + 1) for part in out).backward()
    assert [part.grad.item() for part in parts] == [index + 1.0 for index in range(size)]
    x = ones(size)
    swapped = with_gradients.all_to_all_single(torch.empty(size), x)
    (swapped * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [index + 1.0 for index in range(size)]


def there(*names):
    """The functions of these names that this PyTorch has; 2.12 has none of the first ones."""
    found = [getattr(functional, name, None) for name in names]
    assert found[-1]
    return filter(None, found)


def check_functional_collectives_with_gradients(rank, size):
    group = dist.group.WORLD
    for gather in there("all_gather_single_autograd", "all_gather_tensor_autograd"):
        x = ones(2)
        (gather(x, 0, group) * (rank + 1)).sum().backward()
        assert x.grad.tolist() == [size * (size + 1) / 2] * 2
    for scatter in there("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd"):
        y = ones(2 * size)
        (scatter(y, "sum", 0, group) * (rank + 1)).sum().backward()
        assert y.grad.tolist() == [float(1 + index // 2) for index in range(2 * size)]
    z = ones(size)
    out = functional.all_to_all_single_autograd(z, [1] * size, [1] * size, group)
    (out * (rank + 1)).sum().backward()
    assert z.grad.tolist() == [index + 1.0 for index in range(size)]


def check_functional_collectives_by_their_other_names(rank, size):
    group, ranks = dist.group.WORLD, [float(r) for r in range(size)]
    x = torch.full((1,), float(rank))
    assert functional.all_gather_tensor(x, 0, group).tolist() == ranks
    assert functional.reduce_scatter_tensor(torch.ones(size), "sum", 0, group).tolist() == [float(size)]
    for gather in there("all_gather_single_coalesced", "all_gather_into_tensor_coalesced"):
        assert [out.tolist() for out in gather([x, -x], group)] == [ranks, [-r for r in ranks]]
    for scatter in there("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
        outs = scatter([torch.ones(size), torch.ones(2 * size)], "sum", [0, 0], group)
        assert [out.tolist() for out in outs] == [[float(size)], [float(size)] * 2]


def check_functional_collectives_in_place(rank, size):
    """What torch.compile puts in the place of dist.* calls, called directly."""
    ranks, mine = [float(r) for r in range(size)], torch.full((1,), float(rank))
    rows = torch.empty(size)
    functional.all_gather_tensor_inplace(rows, mine)
    assert rows.tolist() == ranks
    functional.reduce_scatter_tensor_inplace(part := torch.empty(1), rows, "sum")
    assert part.item() == rank * size
    functional.all_reduce_inplace(part, "max")
    assert part.item() == (size - 1) * size
    functional.all_to_all_inplace(swapped := torch.empty(size), mine.repeat(size))
    assert swapped.tolist() == ranks
    parts = [torch.empty(1) for _ in range(size)]
    functional.all_gather_inplace(parts, mine)
    assert [part.item() for part in parts] == ranks


def check_functional_messages(rank, size):
    right, left, group = (rank + 1) % size, (rank - 1) % size, dist.group.WORLD.group_name
    mine, got = torch.full((2,), float(rank)), torch.empty(2)
    received = functional.irecv_inplace(got, left)
    sent = functional.isend_inplace(mine, right)
    assert functional.wait_tensor(received).tolist() == [float(left)] * 2
    functional.wait_tensor(sent)
    with pytest.raises(RuntimeError, match="No backend type"):  # it wants a backend made in C++
        functional.batch_p2p_ops_inplace(["isend"], [right], [0], [mine], group)


def check_a_lazy_result_into_a_compiled_graph(rank, size):
    with functional.allow_inflight_collective_as_graph_input_ctx():
        lazy = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        assert torch.compile(lambda x: x * 2, backend="aot_eager")(lazy).tolist() == [2.0 * size] * 2


def check_compiled_collectives_of_torch_distributed(rank, size):
    """What torch.compile puts in the place of dist.* calls."""

    @torch.compile(backend="aot_eager")
    def step(x):
        rows = torch.empty(size * x.numel())
        dist.all_gather_into_tensor(rows, x + rank)
        part = torch.empty(x.numel())
        dist.reduce_scatter_tensor(part, rows)
        swapped = torch.empty(size)
        dist.all_to_all_single(swapped, rows[:size].contiguous())
        dist.all_reduce(part)
        return rows, part, swapped

    rows, part, _ = step(torch.zeros(size))
    assert rows.reshape(size, size)[:, 0].tolist() == [float(r) for r in range(size)]
    assert part.tolist() == [float(sum(size * r for r in range(size)))] * size


def check_premultiplied_sum(rank, size):
    x = torch.ones(2)
    dist.all_reduce(x, dist._make_nccl_premul_sum(3.0))
    assert x.tolist() == [3.0 * size] * 2
