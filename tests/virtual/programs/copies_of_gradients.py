"""What FSDP2's copy of gradients into one buffer takes on a virtual GPU, and what a dry run says of it."""

import torch
import torch.distributed.fsdp
from torch import Tensor

from unisono.parallel.planning.memory_account import CachingAllocator, copy_in

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SEVERAL = getattr(torch.ops.fsdp, "chunk_cat_mixed_dtype", None)  # which PyTorch 2.15 has
COPY = SEVERAL or torch.ops.fsdp.chunk_cat


def grad(dtype: torch.dtype, rows: int = 1024, *, turned: bool = False) -> Tensor:
    made = torch.ones(64, rows) if turned else torch.ones(rows, 64)
    made = made.to("cuda", dtype)
    return made.t() if turned else made


def taken(grads: list[Tensor], parts: int) -> int:
    columns = sum(-(-each.shape[0] // parts) * 64 for each in grads)
    buffer = torch.empty(parts, columns, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    COPY(grads, dim=0, num_chunks=parts, out=buffer)
    return torch.cuda.max_memory_allocated() - before


CASES = [
    ([grad(BF16), grad(BF16)], 0),
    ([grad(BF16, turned=True), grad(BF16)], 1 << 17),
    ([grad(F32, 1023), grad(F32, 1)], (1 << 18) + 512),
    ([grad(BF16), grad(F32)], 1 << 18),
    ([grad(FP16, 1023), grad(F32)], 1 << 19),
]
for grads, known in CASES:
    if len({each.dtype for each in grads}) > 1 and SEVERAL is None:
        continue
    said = sum(CachingAllocator.rounded(nbytes) for nbytes in copy_in(grads, 2, F32, fused=False))
    assert taken(grads, 2) == said == known, (grads, said)
    fused = sum(copy_in(grads, 2, F32, fused=True))
    turned = any(not each.is_contiguous() for each in grads)
    half = any(each.dtype == FP16 for each in grads)
    assert bool(fused) == (turned or half)
print("as said")
