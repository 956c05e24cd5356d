"""mpi4py.util.sync is unisono.mpi4py.sync."""

import sys

import unisono.mpi4py.sync

sys.modules[__name__] = sys.modules["unisono.mpi4py.sync"]
