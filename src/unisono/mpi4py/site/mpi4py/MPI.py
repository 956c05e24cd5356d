"""mpi4py.MPI is unisono.MPI."""

import sys

from unisono import MPI

sys.modules[__name__] = MPI
