"""Tries the functions of `torch.distributed` over a backend on two ranks, with tensors of the CPU or of CUDA.

python -m unisono run -n 2 -m unisono.commands.doctor.torch_trial gloo cpu
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from unisono.commands.doctor.trial import MARK, RANKS, ran, run_command
from unisono.errors import UnisonoError

BACKENDS = ("unisono", "gloo", "mpi", "nccl")
DEVICES = ("cpu", "cuda")
FUNCTION_S = 20.0
"""How long a function may take, and the meeting of the ranks."""

Try = Callable[[Any, Callable[..., Any]], Any]


def _pair(dist: Any, make: Callable[..., Any]) -> None:
    if dist.get_rank() == 0:
        dist.send(make(3), 1)
    else:
        dist.recv(make(3), 0)


FUNCTIONS: dict[str, Try] = {
    "send, recv": _pair,
    "broadcast": lambda dist, make: dist.broadcast(make(3), 0),
    "all_reduce": lambda dist, make: dist.all_reduce(make(3)),
    "reduce": lambda dist, make: dist.reduce(make(3), 0),
    "all_gather": lambda dist, make: dist.all_gather([make(3), make(3)], make(3)),
    "gather": lambda dist, make: dist.gather(make(3), _both(dist, make), 0),
    "scatter": lambda dist, make: dist.scatter(make(3), _both(dist, make), 0),
    "reduce_scatter": lambda dist, make: dist.reduce_scatter(make(3), [make(3), make(3)]),
    "all_to_all": lambda dist, make: dist.all_to_all([make(3), make(3)], [make(3), make(3)]),
    "barrier": lambda dist, make: dist.barrier(),  # noqa: ARG005
}
"""The rows of PyTorch's own table."""


def _both(dist: Any, make: Callable[..., Any]) -> Any:
    return [make(3), make(3)] if dist.get_rank() == 0 else None


def try_torch(backend: str, device: str) -> dict[str, str]:
    """Try every function. Returns for each "yes", or the first words of its error.

    Raises:
        UnisonoError: PyTorch has no such backend here, its ranks failed, or they took too long.
    """
    import torch.distributed as dist

    if backend != "unisono" and not dist.is_backend_available(backend):
        raise UnisonoError(f"this PyTorch was built without {backend}")
    needs_gpus = device == "cuda" or backend == "nccl"
    return ran([*run_command(needs_gpus and not has_gpus()), "-m", __name__, backend, device])


def has_gpus() -> bool:
    """Whether each rank has a GPU; otherwise virtual ones are tried."""
    import torch

    return torch.cuda.device_count() >= RANKS


def main(backend: str, device: str) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(dist.get_node_local_rank(0)) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=FUNCTION_S))
    told = {}
    for name, function in FUNCTIONS.items():
        try:
            function(dist, lambda *shape: torch.ones(shape, device=device))
            if device == "cuda":
                torch.cuda.synchronize()
            told[name] = "yes"
        except Exception as error:  # noqa: BLE001  (each library has its own)
            told[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
    if dist.get_rank() == 0:
        print(MARK + json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
