"""`python benchmarks/virtual_gpus.py`: the extra time of an operation on a virtual GPU, against the CPU.

Prints the medians of 20 common operations on 10 elements, in turns; the time is that of the thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from unisono import virtual

virtual.enable(1)

import torch  # noqa: E402


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    on = {device: operations(device) for device in ("cpu", "cuda")}
    extra = {}
    for name in on["cpu"]:
        pairs = [[microseconds(on[device][name]) for device in on] for _ in range(rounds)]
        cpu, gpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        extra[name] = gpu - cpu
        print(f"{name:12} {cpu:6.2f} us on the CPU, {gpu:6.2f} us on the virtual GPU")
    print(f"median of {len(extra)} operations: {statistics.median(extra.values()):.2f} us more")


if __name__ == "__main__":
    main()
