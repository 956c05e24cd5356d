"""torch.compile with its default backend on virtual GPUs: what runs compiled has the numbers of eager mode.

Two ranks. Each row of `CASES` gives a function of one GPU, compiled or not; its results must be near. Run by
test_compile.py, which looks for notices of graphs that run uncompiled.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

CASES: dict[str, Callable[..., Any]] = {}
IN_HALF = ("float16", "convolutions_in_autocast")
Compile = Callable[..., Any]


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES[function.__name__] = function
    return function


def trained(model: nn.Module, x: torch.Tensor, run: Any = None) -> list[Any]:
    y = (model if run is None else run)(x)
    y.float().square().mean().backward()
    return [y, *(p.grad for p in model.parameters() if p.grad is not None)]


def block(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    return model.to("cuda", dtype), torch.randn(6, 8, device="cuda", dtype=dtype)


@case
def trains_fullgraph(compiled: Compile) -> Any:
    model, x = block()
    return trained(model, x, compiled(model, fullgraph=True))


@case
def max_autotune(compiled: Compile) -> Any:
    model, x = block()
    return trained(model, x, compiled(model, mode="max-autotune"))


@case
def reduce_overhead(compiled: Compile) -> Any:
    model, x = block()
    return trained(model, x, compiled(model, mode="reduce-overhead"))


@case
def float16(compiled: Compile) -> Any:
    model, x = block(torch.float16)
    return trained(model, x, compiled(model))


@case
def convolutions_in_autocast(compiled: Compile) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    ).cuda()
    run = compiled(model)
    with torch.autocast("cuda", dtype=torch.float16):
        return trained(model, torch.randn(2, 3, 8, 8, device="cuda"), run)


@case
def attention(compiled: Compile) -> Any:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8, device="cuda", requires_grad=True) for _ in range(3))
    out = compiled(lambda *qkv: nn.functional.scaled_dot_product_attention(*qkv, is_causal=True))(q, k, v)
    out.square().sum().backward()
    return [out, q.grad, k.grad, v.grad]


@case
def other_lengths(compiled: Compile) -> Any:
    run = compiled(lambda x: (x.sin() * x.shape[0]).sum(0), dynamic=True)
    return [run(torch.arange(3.0 * n, device="cuda").view(n, 3)) for n in (4, 5, 9)]


@case
def writes_its_inputs(compiled: Compile) -> Any:
    x, count = torch.ones(4, device="cuda"), torch.zeros((), device="cuda", dtype=torch.int64)

    def step(x: torch.Tensor, count: torch.Tensor) -> Any:
        x[1:].mul_(3)
        count.add_(1)
        return x[:2], x.view(2, 2), count + 1

    out, square, after = compiled(step)(x, count)
    x.add_(1)  # the results are views
    return [x, count, out, square, after, x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()]


@case
def both_devices(compiled: Compile) -> Any:
    """Copies between devices are copies: what is written later into one does not show in the other."""
    here, there = torch.ones(3), torch.full((3,), 2.0, device="cuda")

    def moved(here: torch.Tensor, there: torch.Tensor) -> Any:
        both = there * 2
        return here.to("cuda"), there.cpu(), both, both.cpu(), here + 1

    made, kinds = compiled(moved)(here, there), ("cuda", "cpu", "cuda", "cpu", "cpu")
    for x in (here, there, made[2]):
        x.zero_()
    return [*made, *(x.device.type == kind for x, kind in zip(made, kinds, strict=True))]


@case
def an_optimizer(compiled: Compile) -> Any:
    model, x = block()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = compiled(optimizer.step)
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
        step()
    return list(model.parameters())


@case
def collectives_in_the_graph(compiled: Compile) -> Any:
    group = dist.group.WORLD
    rank = dist.get_rank()

    def summed(x: torch.Tensor) -> Any:
        whole = functional.all_gather_tensor(x * 2, 0, group)
        return functional.all_reduce(x + 1, "sum", group), functional.reduce_scatter_tensor(
            whole, "sum", 0, group
        )

    return list(compiled(summed)(torch.arange(4.0, device="cuda") + rank))


@case
def ddp(compiled: Compile) -> Any:
    model, x = block()
    wrapped = nn.parallel.DistributedDataParallel(model)
    return trained(model, x + dist.get_rank(), compiled(wrapped))


@case
def flex_attention(compiled: Compile) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cuda")
    q, k, v = (torch.randn(1, 2, 128, 16, device="cuda", requires_grad=True) for _ in range(3))
    out = compiled(flex_attention)(q, k, v, block_mask=mask)
    out.square().sum().backward()
    return [out, q.grad, k.grad, v.grad]


@case
def triton_kernels(compiled: Compile) -> Any:
    """A graph ends at a kernel, tuned or not."""
    if importlib.util.find_spec("triton") is None:
        return []
    from doubling_kernel import double, tuned

    def twice(x: torch.Tensor) -> torch.Tensor:
        y, z = torch.empty_like(x), torch.empty_like(x)
        double[(1,)](x + 1, y, x.numel(), BLOCK=64)
        tuned[(1,)](y, z, x.numel())
        return z - 1

    return [compiled(twice)(torch.arange(50.0, device="cuda"))]


def same(one: Any, other: Any, near: float) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    return (
        one.device == other.device
        and one.dtype == other.dtype
        and torch.allclose(one, other, atol=near, rtol=near)
    )


def draws() -> None:
    """Dropout follows the GPU's seed, leaves the CPU's alone, and differs from call to call."""
    run = torch.compile(lambda x: nn.functional.dropout(x, 0.5))
    x, before = torch.ones(64, device="cuda"), torch.get_rng_state()
    torch.cuda.manual_seed(3)
    first, second = run(x), run(x)
    torch.cuda.manual_seed(3)
    assert run(x).equal(first)
    assert not second.equal(first)
    assert torch.get_rng_state().equal(before)


def main(names: list[str]) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    for name in names or [*CASES, "draws"]:
        if name == "draws":
            draws()
            continue
        expected = CASES[name](lambda function, **_: function)
        torch._dynamo.reset()
        got = CASES[name](torch.compile)
        pairs = list(zip(got, expected, strict=True))
        near = 2e-2 if name in IN_HALF else 1e-5
        assert all(same(*pair, near) for pair in pairs), (
            name,
            [pair for pair in pairs if not same(*pair, near)],
        )
        print("compiled", name, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
