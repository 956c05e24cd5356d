"""mpi4py.util: modules that stand for Unisono's."""
