"""How often a step, and an update of a loop of the caller's, wait for the device; after the first steps.

Args: the backend.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
FIRST = 4  # steps in which parameters are compared
waits = 0


def counted(read: Callable[..., Any]) -> Callable[..., Any]:
    def counting(value: Tensor, *args: Any, **named: Any) -> Any:
        global waits
        waits += value.is_cuda
        return read(value, *args, **named)

    return counting


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).cuda()


def main() -> None:
    global waits
    dist.init_process_group(sys.argv[1])
    torch.cuda.set_device(dist.get_rank())
    for name in READS:
        setattr(Tensor, name, counted(getattr(Tensor, name)))
    x, y = torch.randn(4, 16).cuda(), torch.randint(4, (4,)).cuda()
    for settings in ({}, {"zero": 1}, {"zero": 3}, {"clip": 1.0}, {"precision": "bf16"}):
        run = up.parallelize(
            net(),
            up.Plan(data=2, **settings),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            loss=functional.cross_entropy,
            weigh="rows",
        )
        for _ in range(FIRST + 2):
            waits = 0
            run.step((x, y))
        in_step = waits
        for _ in range(FIRST + 2):
            waits = 0
            run.backward(functional.cross_entropy(run.model(x), y))
            loss = run.update()
        in_loop = waits
        print(f"{run.plan}: a step {in_step}, a loop {in_loop}, loss {loss.item():.3f}", flush=True)
        assert in_step == 1
        assert in_loop == ("clip" in settings)


main()
