"""`python benchmarks/virtual_gpus.py`: what virtual GPUs cost, against the same on the CPU.

Prints the median extra time of 20 common operations on 10 elements; a training step of a transformer of 10
million parameters; the same under DDP on two ranks. Rounds alternate between the two; each figure is a median
of several. Time is the CPU's: of the thread or the process. DDP's is also the clock's, which needs a quiet
machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from unisono import virtual

RANKED = "RANK" in os.environ  # the part that `unisono run` starts
if not RANKED:
    virtual.enable(1)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def operations(device: str) -> dict[str, Callable[[], object]]:
    """Make 20 operations on tensors of 10 elements."""
    x, y = torch.rand(10, device=device), torch.rand(10, device=device)
    i = torch.arange(10, device=device)
    m = torch.rand(2, 5, device=device)
    return {
        "add": lambda: x + y,
        "add_": lambda: x.add_(0),
        "mul": lambda: x * y,
        "mul number": lambda: x * 2,
        "sum": x.sum,
        "mean": x.mean,
        "relu": x.relu,
        "exp": x.exp,
        "matmul": lambda: m @ m.T,
        "view": lambda: x.view(2, 5),
        "transpose": m.t,
        "index": lambda: x[2:5],
        "gather": lambda: x[i],
        "cat": lambda: torch.cat((x, y)),
        "softmax": lambda: m.softmax(1),
        "compare": lambda: x > 0.5,
        "where": lambda: torch.where(x > 0.5, x, y),
        "empty": lambda: torch.empty(10, device=device),
        "zeros": lambda: torch.zeros(10, device=device),
        "clone": x.clone,
    }


def microseconds(call: Callable[[], object], repeats: int = 2000) -> float:
    """Return the thread's time: other processes do not count."""
    began = time.thread_time()
    for _ in range(repeats):
        call()
    return 1e6 * (time.thread_time() - began) / repeats


def seconds(call: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Return the process's time: the backward pass runs in threads of its own."""
    began = clock()
    call()
    return clock() - began


def step(device: str) -> Callable[[], object]:
    """Make a training step of a transformer of 10 million parameters; under DDP if there are ranks."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    model: nn.Module = nn.Sequential(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)).to(device)
    if RANKED:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.rand(4, 64, 384).to(device)

    def train() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def medians(pairs: list[list[float]]) -> tuple[float, float]:
    cpu, gpu = (statistics.median(column) for column in zip(*pairs, strict=True))
    return cpu, gpu


def compare(what: str, pairs: list[list[float]]) -> None:
    """Print the medians of (CPU, virtual GPU) seconds, and the median ratio of neighbours."""
    cpu, gpu = medians(pairs)
    ratio = statistics.median(y / x for x, y in pairs)
    print(f"{what}: {1e3 * cpu:.1f} ms on the CPU, {1e3 * gpu:.1f} ms, {ratio:.3f} times")


def small(rounds: int) -> None:
    on = {device: operations(device) for device in ("cpu", "cuda")}
    extra = {}
    for name in on["cpu"]:
        cpu, gpu = medians([[microseconds(on[d][name]) for d in on] for _ in range(rounds)])
        extra[name] = gpu - cpu
        print(f"{name:12} {cpu:6.2f} us on the CPU, {gpu:6.2f} us on the virtual GPU")
    print(f"median of {len(extra)} operations: {statistics.median(extra.values()):.2f} us more")


def training(rounds: int) -> None:
    steps = {device: step(device) for device in ("cpu", "cuda")}
    for each in steps.values():
        each()
    compare("training step", [[seconds(call) for call in steps.values()] for _ in range(2 * rounds)])


def training_of_ranks(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("unisono")  # for both devices
    steps = [step("cpu"), step(f"cuda:{dist.get_rank()}")]
    found: dict[str, list[list[float]]] = {"CPU": [], "clock": []}
    for _ in range(2 * rounds + 1):
        pairs: list[tuple[float, float]] = []
        for call in steps:
            dist.barrier()
            began = time.process_time()
            took = seconds(call, time.perf_counter)
            pairs.append((time.process_time() - began, took))
        for column, name in enumerate(found):
            found[name].append([pair[column] for pair in pairs])
    if dist.get_rank() == 0:
        for name, each in found.items():
            compare(f"DDP step on {dist.get_world_size()} ranks, by the {name}", each[1:])
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    if RANKED:
        training_of_ranks(rounds)
        return
    small(rounds)
    training(rounds)
    flags = ["run", "--virtual-gpus", "2"]
    subprocess.run([sys.executable, "-m", "unisono", *flags, __file__, "--rounds", str(rounds)], check=True)


if __name__ == "__main__":
    main()
