"""Settings of `rc` that mean nothing are warned of, and count as the default; "no" is one that does."""

import sys
import warnings

import mpi4py

name, value = sys.argv[1], eval(sys.argv[2])
setattr(mpi4py.rc, name, value)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from mpi4py import MPI

told = [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
print(told, MPI.Is_initialized(), getattr(mpi4py.rc, name) == value, flush=True)
