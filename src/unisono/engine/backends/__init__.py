"""Libraries that can move a group's bytes instead of Unisono's own engine.

driver.py               `LibraryDriver`, the interface of such a library
mpi.py                  MPI, through mpi4py
pytorch.py              Gloo and NCCL, through PyTorch
torch_requests.py       PyTorch's operations under way
torch_store.py          Unisono's store as PyTorch's, and PyTorch's as Unisono's
reduction_fallback.py   reductions that a library lacks, made exact
availability.py         which backends this machine has
"""

from __future__ import annotations

from unisono.engine.backends.availability import BACKENDS, is_available

__all__ = ["BACKENDS", "is_available"]
