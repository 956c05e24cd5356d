"""Context parallelism: every rank has a part of the sequence, and attention looks at all of it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import experimental
from torch.distributed.tensor.experimental import _attention as ring
from torch.distributed.tensor.experimental._context_parallel import _attention as inner
from torch.nn.attention import SDPBackend, sdpa_kernel

aten = torch.ops.aten
SEQUENCE = 2  # the dimension that is cut: [batch, heads, sequence, width]


def sequences(count: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1, 2, 4 * size, 8, generator=generator) for _ in range(count)]


def attention(projection: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(*projection(x).chunk(3, -1))


def check_context_parallel(rank, size):
    # MATH, and no causal mask: PyTorch has no sharding for the kernel that it takes on CPUs otherwise.
    mesh, (x,) = init_device_mesh("cpu", (size,)), sequences(1, size)
    torch.manual_seed(6)
    projection = nn.Linear(8, 24)
    want = attention(projection, x)
    want.square().sum().backward()
    gradient, projection.weight.grad = projection.weight.grad, None
    with (
        sdpa_kernel(SDPBackend.MATH),
        experimental.context_parallel(mesh, buffers=[x], buffer_seq_dims=[SEQUENCE]),
    ):
        assert x.shape[SEQUENCE] == 4
        out = attention(projection, x)
        out.square().sum().backward()
        (whole,) = ring.context_parallel_unshard(mesh, [out.detach()], [SEQUENCE])
    dist.all_reduce(projection.weight.grad)
    assert x.shape[SEQUENCE] == 4 * size
    assert torch.allclose(whole, want, atol=1e-5)
    assert torch.allclose(projection.weight.grad, gradient, atol=1e-4)


def check_ring_attention(rank, size):
    """PyTorch's ring, both ways to turn it, with a causal mask, over the kernel of the CPU."""
    mesh = init_device_mesh("cpu", (size,))
    q, k, v, gradient = sequences(4, size)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    want.backward(gradient)
    for method in ("alltoall", "allgather"):
        ring.set_rotate_method(method)
        buffers = [q, k, v, gradient]
        with experimental.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[SEQUENCE] * 4):
            found = around(mesh.get_group(), *buffers)
            found = ring.context_parallel_unshard(mesh, found, [SEQUENCE] * 4)
        for a, b in zip(found, [want, *(leaf.grad for leaf in leaves)], strict=True):
            assert torch.allclose(a, b, atol=1e-5)


def around(group, q, k, v, gradient) -> list[torch.Tensor]:
    """Return what comes out on this rank, and the gradients of its part of q, k and v."""
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, logsumexp = inner._templated_ring_attention(group, SEQUENCE, forward, q, k, v, is_causal=True)
    gradients = inner._templated_ring_attention_backward(
        group,
        SEQUENCE,
        backward,
        gradient,
        "grad_out",
        q,
        k,
        v,
        out,
        logsumexp,
        is_causal=True,
        dropout_p=0.0,
    )
    return [out, *gradients]
