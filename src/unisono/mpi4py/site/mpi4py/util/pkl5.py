"""mpi4py.util.pkl5 is unisono.mpi4py.pkl5."""

import sys

from unisono.mpi4py import pkl5

sys.modules[__name__] = pkl5
