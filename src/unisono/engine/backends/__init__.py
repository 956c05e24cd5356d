"""Libraries that can move a group's bytes instead of Unisono's own engine.

driver.py    `Driver`, the interface of such a library       mpi.py       MPI, through mpi4py
reduction_fallback.py      reductions that a library lacks, made exact     pytorch.py   Gloo and NCCL, through PyTorch
availability.py   what is available on this machine               torch_store.py     Unisono's store as PyTorch's
torch_requests.py PyTorch's operations under way
"""

from __future__ import annotations

from unisono.engine.backends.availability import BACKENDS, is_available

__all__ = ["BACKENDS", "is_available"]
