"""What a program may ask of the package mpi4py."""

import importlib
import subprocess
import sys

import mpi4py
import numpy as np

assert mpi4py.__version__.startswith("4.")
assert mpi4py.get_config() == {}
assert mpi4py.__file__.startswith(mpi4py.get_include())
mpi4py.rc(finalize=None)
try:
    mpi4py.rc.nonsense = 1
except TypeError:
    pass
else:
    raise AssertionError("a setting that does not exist was taken")

MPI = importlib.import_module("mpi4py.MPI")
dtlib, pkl5 = (importlib.import_module(f"mpi4py.util.{name}") for name in ("dtlib", "pkl5"))
unisono = importlib.import_module("unisono")

assert MPI is unisono.MPI
assert sys.modules["mpi4py.MPI"] is MPI
for name in ("futures", "run", "bench", "util.pool", "util.sync"):
    importlib.import_module(f"mpi4py.{name}")
comm = MPI.COMM_WORLD

kind = dtlib.from_numpy_dtype("i4,f8")
assert dtlib.to_numpy_dtype(kind) == np.dtype("i4,f8")

five = pkl5.Intracomm(comm)
array = np.arange(200_000, dtype=float)
came = five.sendrecv({"rank": comm.rank, "x": array}, (comm.rank + 1) % comm.size)
assert came["rank"] == (comm.rank - 1) % comm.size
assert (came["x"] == array).all() and came["x"].flags.aligned and came["x"].flags.writeable
matched = five.isend(array, (comm.rank + 1) % comm.size, tag=3)
assert (five.mprobe(tag=3).recv() == array).all()
matched.wait()

for words, says in (
    (["-m", "mpi4py", "--version"], "mpi4py 4."),
    (["-m", "mpi4py", "-c", "from mpi4py import MPI; print(MPI.COMM_SELF.size)"], "1"),
    (["-m", "mpi4py.run", "--mpi-std-version"], "MPI 4."),
):
    environ = {k: v for k, v in __import__("os").environ.items() if k in ("PYTHONPATH", "PATH")}
    done = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True)
    assert done.stdout.startswith(says), done
for name in ("_addressof", "_handleof", "__pyx_capi__"):
    try:
        getattr(MPI, name)(comm)
    except AttributeError as error:
        assert "mpiexec" in str(error)
print("ok")
