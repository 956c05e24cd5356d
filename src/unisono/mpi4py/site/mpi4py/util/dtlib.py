"""mpi4py.util.dtlib is unisono.mpi4py.dtlib."""

import sys

import unisono.mpi4py.dtlib

sys.modules[__name__] = sys.modules["unisono.mpi4py.dtlib"]
