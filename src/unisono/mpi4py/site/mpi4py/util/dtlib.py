"""mpi4py.util.dtlib is unisono.mpi4py.dtlib."""

import sys

from unisono.mpi4py import dtlib

sys.modules[__name__] = dtlib
