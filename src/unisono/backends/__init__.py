"""Libraries that can move a group's bytes instead of Unisono's own engine.

driver.py    what such a library has to offer: `Driver`      mpi.py       MPI, through mpi4py
fold.py      reductions that a library lacks, made exact     pytorch.py   Gloo and NCCL, through PyTorch
looking.py   what works on this machine, tried out           store.py     Unisono's store as PyTorch's
torch_work.py what PyTorch has under way
"""

from __future__ import annotations

from unisono.backends.looking import BACKENDS, is_available

__all__ = ["BACKENDS", "is_available"]
