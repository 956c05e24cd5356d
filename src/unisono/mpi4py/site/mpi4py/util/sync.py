"""mpi4py.util.sync is unisono.mpi4py.sync."""

import sys

from unisono.mpi4py import sync

sys.modules[__name__] = sync
