"""mpi4py.util.pool is unisono.mpi4py.pool."""

import sys

from unisono.mpi4py import pool

sys.modules[__name__] = pool
