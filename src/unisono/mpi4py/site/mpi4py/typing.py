"""mpi4py.typing is unisono.mpi4py.typing."""

import sys

from unisono.mpi4py import typing

sys.modules[__name__] = typing
