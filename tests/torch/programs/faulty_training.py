"""`faulty_training.py FAULT ROWS [BACKEND]`: a small training with one of the known faults, or "none".

ROWS: the rows of a step on each rank.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

FAULT, BATCH = sys.argv[1], int(sys.argv[2])
ROWS, EPOCHS = 48, 2
dist.init_process_group(sys.argv[3] if len(sys.argv) > 3 else "unisono")
rank, size = dist.get_rank(), dist.get_world_size()


def is_fault(*names: str) -> bool:
    return FAULT in names


torch.manual_seed(rank if is_fault("seed") else size if is_fault("seed of size") else 0)
layers: list[nn.Module] = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)]
if is_fault("batch norm"):
    layers.insert(1, nn.BatchNorm1d(16))
if is_fault("dropout"):
    layers.insert(2, nn.Dropout(0.5))
model: nn.Module = nn.Sequential(*layers)
own_reduction = is_fault(
    "seed", "sum", "no average", "average twice", "local clip", "each backward", "bf16", "one gradient"
)
if not own_reduction:
    model = DistributedDataParallel(model)

draws = torch.Generator().manual_seed(1)
rows = TensorDataset(
    torch.randn(ROWS, 6, generator=draws), torch.randint(0, 3, (ROWS,), generator=draws),
    torch.randint(1, 9, (ROWS,), generator=draws).float(),
)  # fmt: skip
data = Subset(rows, range(rank, ROWS, size)) if is_fault("divided twice") else rows
if is_fault("no sampler"):
    loader = DataLoader(rows, BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
    sampler = None
else:
    sampler = DistributedSampler(data, size, rank, shuffle=True)
    loader = DataLoader(data, BATCH * (size if is_fault("batch of all") else 1), sampler=sampler)

if is_fault("uneven"):
    whole, first = BATCH * size, BATCH * size * 2 // 3
    own = slice(None) if size == 1 else slice(first) if rank == 0 else slice(first, None)
    loader = [[one[start : start + whole][own] for one in rows.tensors] for start in range(0, ROWS, whole)]

rate = 0.1 * (size if is_fault("rate") else 1)
optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
per_epoch = ROWS // (BATCH if is_fault("schedule") else BATCH * size)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=EPOCHS * per_epoch)


def reduce_gradients() -> None:
    for number, parameter in enumerate(model.parameters()):
        gradient = parameter.grad
        if is_fault("one gradient") and number == 3:
            continue
        if is_fault("bf16"):
            rounded = gradient.to(torch.bfloat16)
            dist.all_reduce(rounded)
            gradient.copy_(rounded)
        else:
            dist.all_reduce(gradient)
        if not is_fault("sum"):
            gradient /= size
        if is_fault("average twice"):
            gradient /= size


for epoch in range(EPOCHS):
    if sampler is not None and not (is_fault("no set_epoch") and size > 1):
        sampler.set_epoch(epoch)
    for inputs, labels, weights in loader:
        optimizer.zero_grad()
        micro = 2 if is_fault("each backward", "accumulation") else 1
        for part in range(micro):
            x, y, w = (one[part::micro] for one in (inputs, labels, weights))
            outputs = model(input=x) if is_fault("no sampler") else model(x)
            if is_fault("token weights"):
                losses = nn.functional.cross_entropy(outputs, y, reduction="none")
                loss = (losses * w).sum() / w.sum()
            else:
                loss = nn.functional.cross_entropy(outputs, y) / micro
            if is_fault("loss over size"):
                loss = loss / size
            loss.backward()
            if is_fault("each backward"):
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
        if own_reduction and not is_fault("no average", "each backward", "seed"):
            if is_fault("local clip"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            reduce_gradients()
        optimizer.step()
        if is_fault("one rank writes") and rank == 1:
            with torch.no_grad():
                next(model.parameters()).mul_(0.999)
        schedule.step()
dist.destroy_process_group()
