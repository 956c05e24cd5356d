"""mpi4py.futures is unisono.mpi4py.futures."""

from unisono.mpi4py.futures import *  # noqa: F403
from unisono.mpi4py.futures import __all__  # noqa: F401
