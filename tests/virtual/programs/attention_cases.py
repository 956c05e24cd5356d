"""Attention on virtual GPUs against matrix products, with gradients. Run by test_virtual.py.

`attention_cases.py CASE`: a case is a function.
"""

import itertools
import os
import sys
import threading

import torch
import torch.distributed as dist


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Attention by matrix products in f32: [batch, heads, length, numbers]; `hidden`: keys out of sight."""
    shared = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(shared, 1) for x in (k, v))
    scores = q.float() @ k.mT / q.shape[-1] ** 0.5
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def fused() -> None:
    """Flash, efficient and cuDNN's operators with gradients: grouped heads, causal, in three types."""
    aten = torch.ops.aten
    above = torch.ones(40, 40, device="cuda", dtype=torch.bool).triu(1)
    rows = itertools.product(
        ("flash", "efficient", "cudnn"), (torch.float32, torch.float16, torch.bfloat16), (False, True), (4, 2)
    )
    for (name, dtype, causal, heads), more in (
        (row, (None, True) if row[0] != "flash" else ()) for row in rows
    ):
        torch.manual_seed(0)
        q = torch.randn(2, 4, 40, 16, device="cuda", dtype=dtype, requires_grad=True)
        k, v = (
            torch.randn(2, heads, 40, 16, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2)
        )
        out, sums = getattr(aten, f"_scaled_dot_product_{name}_attention")(q, k, v, *more, 0.0, causal)[:2]
        got = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        wanted, logarithms = reference(q, k, v, above if causal else None)
        expected = torch.autograd.grad(wanted.square().sum(), (q, k, v))
        near = 1e-4 if dtype == torch.float32 else 0.1
        assert torch.allclose(sums.reshape(2, 4, -1)[..., :40], logarithms, atol=near), (name, dtype, causal)
        for one, other in zip((out, *got), (wanted, *expected), strict=True):
            assert torch.allclose(one.float(), other.float(), atol=near, rtol=near), (
                name,
                dtype,
                causal,
                heads,
            )
    x = torch.ones(1, 1, 8, 8, device="cuda", dtype=torch.float16)
    torch.manual_seed(1)
    first = aten._scaled_dot_product_flash_attention(x, x, x, 0.5)[0]
    torch.manual_seed(1)
    assert first.equal(aten._scaled_dot_product_flash_attention(x, x, x, 0.5)[0])
    assert not first.equal(x)


def composed() -> None:
    """What no fused kernel takes: dropout, f64, a mask with a gradient, causal of two lengths."""
    torch.manual_seed(0)
    given = [torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (6, 10, 10)]
    floating = torch.randn(1, 2, 6, 10, dtype=torch.float64)
    masks = (floating, 0.0, False), (floating > 0, 0.0, False)
    rows = ((None, 0.0, False), (None, 0.0, True), (None, 1e-12, False), *masks)
    for dtype, (mask, dropout, causal) in itertools.product((torch.float64, torch.float32), rows):
        results = []
        for device in ("cpu", "cuda"):
            leaves = [x.to(device, dtype).requires_grad_() for x in given]
            if mask is floating:
                leaves.append(mask.to(device, dtype).requires_grad_())
            added = leaves[3] if mask is floating else None if mask is None else mask.to(device)
            out = torch.nn.functional.scaled_dot_product_attention(*leaves[:3], added, dropout, causal)
            results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
        near = 1e-12 if dtype == torch.float64 else 1e-5
        pairs = zip(*results, strict=True)
        assert all(torch.allclose(one, other.cpu(), atol=near) for one, other in pairs), (
            dtype,
            dropout,
            causal,
        )
    assert torch.backends.cuda.flash_sdp_enabled()


def of_sequences() -> None:
    """`varlen_attn`: sequences that lie one behind the other, with gradients; and FLASH asked for by name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    lengths = (5, 9, 2)
    ends = torch.tensor([0, 5, 14, 16], device="cuda", dtype=torch.int32)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(16, 2, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    out = varlen_attn(q, k, v, ends, ends, 9, 9, window_size=(-1, 0))
    got = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    parts = []
    for mine in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        heads = [x.transpose(0, 1)[None] for x in mine]
        above = torch.ones(len(mine[0]), len(mine[0]), device="cuda", dtype=torch.bool).triu(1)
        parts.append(reference(*heads, above)[0][0].transpose(0, 1))
    wanted = torch.cat(parts)
    expected = torch.autograd.grad(wanted.square().sum(), (q, k, v))
    for one, other in zip((out, *got), (wanted, *expected), strict=True):
        assert torch.allclose(one.float(), other.float(), atol=0.1, rtol=0.1), (one, other)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
        assert torch.nn.functional.scaled_dot_product_attention(*heads).isfinite().all()


def over_ranks() -> None:
    """Causal attention of heads on two ranks (DTensor), and of a sequence on two ranks (context_parallel)."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attention = torch.nn.functional.scaled_dot_product_attention
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = dist.device_mesh.init_device_mesh("cuda", (2,))
    for dtype, kind in (
        (torch.bfloat16, SDPBackend.FLASH_ATTENTION),
        (torch.float32, SDPBackend.EFFICIENT_ATTENTION),
    ):
        torch.manual_seed(0)
        whole = [torch.randn(1, 4, 128, 8, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
        wanted = attention(*whole, is_causal=True)
        wanted.float().square().sum().backward()
        parts = [distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_() for x in whole]
        out = attention(*parts, is_causal=True)
        out.float().square().sum().backward()
        near = 1e-5 if dtype == torch.float32 else 0.05
        pairs = [(out.full_tensor(), wanted)] + [
            (p.grad.full_tensor(), x.grad) for p, x in zip(parts, whole, strict=True)
        ]
        assert all(torch.allclose(a, b, atol=near, rtol=near) for a, b in pairs), [
            (a - b).abs().max() for a, b in pairs
        ]
        cut = [x.detach().clone() for x in whole]
        with context_parallel(mesh, buffers=cut, buffer_seq_dims=[2] * 3), sdpa_kernel(kind):
            leaves = [x.clone().requires_grad_() for x in cut]
            total = (
                torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
                .float()
                .square()
                .sum()
            )
            total.backward()
        sums = torch.stack([total.detach(), *(x.grad.float().square().sum() for x in leaves)])
        dist.all_reduce(sums)
        expected = torch.stack(
            [wanted.float().square().sum(), *(x.grad.float().square().sum() for x in whole)]
        )
        assert torch.allclose(sums, expected, rtol=2e-2), (dtype, sums, expected)
    dist.destroy_process_group()


def in_threads() -> None:
    """What the process has chosen stays, also where several threads compute without a fused kernel."""
    chosen = torch.backends.cuda
    before = chosen.flash_sdp_enabled(), chosen.mem_efficient_sdp_enabled(), chosen.cudnn_sdp_enabled()

    def work() -> None:
        q = torch.randn(4, 4, 64, 16, device="cuda")
        for _ in range(150):
            torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = chosen.flash_sdp_enabled(), chosen.mem_efficient_sdp_enabled(), chosen.cudnn_sdp_enabled()
    assert after == before, (before, after)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
