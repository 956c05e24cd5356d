"""What a program sees on a GPU, real or virtual: the same holds on both. Run by test_virtual.py."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

MIB = 1 << 20
CUDA = torch.device("cuda")


def whole(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=CUDA)


def halves(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float16, device=CUDA)


# What the CPU computes and a GPU refuses; the text is PyTorch's.
REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("\"addmm_cuda\" not implemented for 'Long'", lambda: whole(4, 4) @ whole(4, 4)),
    ("\"addmm_cuda\" not implemented for 'Char'", lambda: whole(4, 4, dtype=torch.int8) @ whole(4, 4).char()),
    ("\"addmm_cuda\" not implemented for 'Long'", lambda: functional.linear(whole(4, 4), whole(4, 4))),
    ("\"baddbmm_cuda\" not implemented for 'Long'", lambda: torch.bmm(whole(1, 4, 4), whole(1, 4, 4))),
    ("\"addmv_impl_cuda\" not implemented for 'Long'", lambda: whole(4, 4) @ whole(4)),
    ("\"dot\" not implemented for 'Long'", lambda: torch.dot(whole(4), whole(4))),
    (
        "\"avg_pool2d_out_cuda_frame\" not implemented for 'Long'",
        lambda: functional.avg_pool1d(whole(1, 4, 4), 2),
    ),
    (
        "\"max_pool2d_with_indices_out_cuda_frame\" not implemented for 'Long'",
        lambda: functional.max_pool1d(whole(1, 4, 4), 2),
    ),
    (
        "\"upsample_bilinear2d_out_frame\" not implemented for 'Byte'",
        lambda: functional.interpolate(whole(1, 1, 4, 4, dtype=torch.uint8), scale_factor=2, mode="bilinear"),
    ),
    ("\"fused_dropout\" not implemented for 'Long'", lambda: functional.dropout(whole(4, 4))),
    ("\"angle_cuda\" not implemented for 'Half'", lambda: halves(4).angle()),
    (
        "getCudnnDataTypeFromScalarType() not supported for Long",
        lambda: functional.conv1d(whole(1, 4, 4), whole(4, 4, 1)),
    ),
    (
        "expected scalar type Half but found Float",
        lambda: functional.layer_norm(halves(4, 4), (4,), torch.ones(4, device=CUDA)),
    ),
]


def refuses_types() -> None:
    for says, program in REFUSED:
        try:
            result = program()
        except RuntimeError as error:
            assert says in str(error), (says, str(error))
        else:
            raise AssertionError(f"{says}: got {result}")
    assert (whole(0, 4) @ whole(4, 4)).shape == (0, 4)  # nothing to multiply


def peak_of(program: Callable[[], object]) -> int:
    """Bytes that a program takes at most, beside those that are there already."""
    program()  # a GPU's libraries take their workspaces
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    program()
    return torch.cuda.max_memory_allocated() - before


def keeps_no_scores() -> None:
    """Attention takes memory for its inputs and results, not for length x length numbers of each head."""
    scores = 2 * 4 * 512 * 512 * 4
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(2, 4, 512, 32, dtype=dtype, device=CUDA, requires_grad=True) for _ in range(3))
        for named in ({}, {"is_causal": True}, {"scale": 0.5}):

            def step(named: dict = named, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
                functional.scaled_dot_product_attention(q, k, v, **named).sum().backward()
                q.grad = k.grad = v.grad = None

            assert peak_of(step) < scores / 2, (dtype, named, peak_of(step))


def drops_in_place() -> None:
    """Dropout takes its result and a mask of one byte each."""
    x = torch.ones(1 << 20, device=CUDA)
    assert peak_of(lambda: functional.dropout(x, 0.1)) == 5 * MIB


def attends_as_the_cpu() -> None:
    torch.manual_seed(0)
    long, short = (torch.randn(2, 4, 9, 16) for _ in range(2)), torch.randn(2, 4, 5, 16)
    x, y = long
    seen = torch.rand(2, 1, 9, 9) > 0.3
    seen[..., 0] = True
    cases: list[tuple[tuple[Tensor, Tensor, Tensor], dict]] = [
        ((x, y, x + 1), {}),
        ((x, y, x + 1), {"is_causal": True}),
        ((x, y, x + 1), {"attn_mask": seen}),
        ((x, y, x + 1), {"attn_mask": torch.randn(9, 9)}),
        ((x, y, x + 1), {"attn_mask": seen[:1, :, :1]}),
        ((x, short, short + 1), {"scale": 0.3}),
        ((x, short, short + 1), {"is_causal": True}),
        ((x, y[:, :2], x[:, :2]), {"enable_gqa": True}),
        ((x[0], y[0], x[0]), {"is_causal": True}),
        ((x.double(), y.double(), x.double()), {}),
    ]
    for given, named in cases:
        results = []
        for device in ("cpu", "cuda"):
            there = [t.to(device).detach().requires_grad_() for t in given]
            moved = {key: v.to(device) if isinstance(v, Tensor) else v for key, v in named.items()}
            result = functional.scaled_dot_product_attention(*there, **moved)
            result.square().sum().backward()
            results.append([t.cpu() for t in (result.detach(), *(t.grad for t in there))])
        torch.testing.assert_close(
            results[1], results[0], rtol=1e-3, atol=1e-4, msg=lambda m, named=named: f"{named}: {m}"
        )


def normalizes_one_row() -> None:
    weight = torch.ones(8, device=CUDA, requires_grad=True)
    functional.rms_norm(torch.randn(8, device=CUDA), (8,), weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == (8,)


def keeps_to_the_memory_of_its_kernels() -> None:
    """RMSNorm's backward makes its results alone, that of softmax a product of gradient and output beside."""
    x = torch.randn(64, 64, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.ones_like(x)
    for output, tensors in (
        (functional.rms_norm(x, (64,), weight), 1 if torch.version.cuda else 8),  # a CPU build composes it
        (torch.softmax(x, -1), 2),
        (torch.log_softmax(x, -1), 1),
    ):
        x.grad = weight.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output.backward(grad)
        made = torch.cuda.max_memory_allocated() - before
        assert abs(made / x.nbytes - tensors) < 0.1, (tensors, made, x.nbytes)


def nccl_refuses() -> None:
    """Layouts, types and operations that NCCL does not take."""
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    x, out = torch.ones(4, 2, device=CUDA), torch.ones(4, 2, device=CUDA)
    op = dist.ReduceOp
    for kind, says, call in (
        (ValueError, "Tensors must be contiguous", lambda: dist.all_reduce(x.t())),
        (ValueError, "Tensors must be contiguous", lambda: dist.broadcast(x[:, :1], 0)),
        (ValueError, "Tensors must be contiguous", lambda: dist.all_gather([out], x.t())),
        (ValueError, "Cannot use ReduceOp.BAND with NCCL", lambda: dist.all_reduce(x.int(), op.BAND)),
        (ValueError, "Cannot use ReduceOp.BXOR with NCCL", lambda: dist.reduce(x.int(), 0, op.BXOR)),
        (
            TypeError,
            "Input tensor data type is not supported for NCCL process group: Short",
            lambda: dist.broadcast(x.short(), 0),
        ),
    ):
        try:
            call()
        except kind as error:
            assert says in str(error), (says, str(error))
        else:
            raise AssertionError(says)
    images = torch.ones(2, 3, 4, 4, device=CUDA).contiguous(memory_format=torch.channels_last)
    dist.all_reduce(images)
    assert images.eq(1).all()
    dist.destroy_process_group()


if __name__ == "__main__":
    for each in (
        refuses_types, keeps_no_scores, drops_in_place, attends_as_the_cpu, normalizes_one_row,
        keeps_to_the_memory_of_its_kernels, nccl_refuses,
    ):  # fmt: skip
        each()
        print(each.__name__, flush=True)
    print("like a GPU")
