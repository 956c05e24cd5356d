"""`python benchmarks/virtual_gpus.py`: what an operation costs on a virtual GPU, against the same on the CPU.

Prints the median extra time of 20 common operations on 10 elements, and a training step of a transformer of
10 million parameters. Rounds alternate between the two devices; each figure is a median of several.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from unisono import virtual

virtual.enable(1)

import torch  # noqa: E402
from torch import nn  # noqa: E402


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


def seconds(call: Callable[[], object]) -> float:
    """Return the process's time: the backward pass runs in threads of its own."""
    began = time.process_time()
    call()
    return time.process_time() - began


def step(device: str) -> Callable[[], object]:
    """Make a training step of a transformer of 10 million parameters."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.rand(4, 64, 384).to(device)

    def train() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    on = {device: operations(device) for device in ("cpu", "cuda")}
    extra = {}
    for name in on["cpu"]:
        pairs = [[microseconds(on[d][name]) for d in ("cpu", "cuda")] for _ in range(rounds)]
        cpu, gpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        extra[name] = gpu - cpu
        print(f"{name:12} {cpu:6.2f} us on the CPU, {gpu:6.2f} us on the virtual GPU")
    print(f"median of {len(extra)} operations: {statistics.median(extra.values()):.2f} us more")
    steps = {device: step(device) for device in on}
    for each in steps.values():
        each()
    pairs = [[1e6 * seconds(steps[d]) for d in steps] for _ in range(rounds)]
    cpu, gpu = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"training step: {cpu / 1e3:.1f} ms on the CPU, {gpu / 1e3:.1f} ms, {gpu / cpu:.2f} times")


if __name__ == "__main__":
    main()
