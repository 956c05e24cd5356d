"""How long a sequence trains in the memory of a rank: one process, and ranks that share the sequence.

    unisono run -n 4 benchmarks/long_sequences.py              # (--time 1024 --width 96 --heads 3 --layers 4)
    unisono run -n 4 --virtual-gpus 4 benchmarks/long_sequences.py

One process trains a GPT (gpt.py) on `time` positions, then n ranks train it on n times as many under
Plan(context=n), then rank 0 alone does. Prints how much more memory a process had during forward and backward
than before, the largest of all ranks, and how far the losses of the long sequence are from each other. The
kernel counts that for a process on the CPU; PyTorch's allocator on GPUs, virtual ones too.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, VOCABULARY
from torch import Tensor

import unisono.parallel as up


def peak_mb(step: Callable[[], float]) -> tuple[float, float]:
    """What a step returns, and how much more memory this process had during it than before, in MB."""
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        value = step()
        return value, (torch.cuda.max_memory_allocated() - before) / 1e6
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _kilobytes(status, "VmRSS")
    value = step()
    return value, (_kilobytes(status, "VmHWM") - before) / 1024


def _kilobytes(status: Path, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", status.read_text())
    assert found is not None
    return int(found[1])


def main() -> None:
    """Measure, and print a line for each of the three."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name, number in {"time": 1024, "width": 96, "heads": 3, "layers": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:unisono,cuda:nccl" if device == "cuda" else "unisono")
    ranks = dist.get_world_size()
    long = ranks * asked.time
    tokens = torch.randint(VOCABULARY, (1, long + 1), generator=torch.Generator().manual_seed(2))
    tokens, nothing = tokens.to(device), torch.zeros(1, device=device)

    def made() -> GPT:
        torch.manual_seed(0)
        return GPT(asked.layers, asked.width, asked.heads, context=long).to(device)

    def alone(tokens: Tensor) -> float:
        loss = made()(tokens)
        loss.backward()
        return float(loss.item())

    def told(what: str, positions: int, mb: float) -> None:
        most = torch.tensor(mb, device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"{what}: {positions} positions, {most:.0f} MB", flush=True)

    alone(tokens[:, :17])  # what is loaded once
    told("one process", asked.time, peak_mb(lambda: alone(tokens[:, : asked.time + 1]))[1])
    run = up.parallelize(
        made(),
        up.Plan(context=ranks),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=lambda loss, _targets: loss,
    )
    run.evaluate((tokens[:, : 4 * ranks + 1], nothing))
    shared, mb = peak_mb(lambda: run.step((tokens, nothing)))
    told(f"context={ranks}", long, mb)
    wanted, mb = peak_mb(lambda: alone(tokens)) if dist.get_rank() == 0 else (shared, 0.0)
    told("one process", long, mb)
    if dist.get_rank() == 0:
        print(f"the losses of {long} positions differ by {abs(shared - wanted):.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
