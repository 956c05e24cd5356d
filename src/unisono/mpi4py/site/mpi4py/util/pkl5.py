"""mpi4py.util.pkl5 is unisono.mpi4py.pkl5."""

import sys

import unisono.mpi4py.pkl5

sys.modules[__name__] = sys.modules["unisono.mpi4py.pkl5"]
