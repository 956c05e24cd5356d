"""mpi4py.util.pool is unisono.mpi4py.pool."""

import sys

import unisono.mpi4py.pool

sys.modules[__name__] = sys.modules["unisono.mpi4py.pool"]
