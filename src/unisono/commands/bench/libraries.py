"""The libraries that Unisono is compared with, what installs a missing one, and how MPI's ranks start.

Each MPI library lives in its virtual environment (`make bench-peers`), because two of them cannot share one.
Its own mpiexec starts the worker under this interpreter, with the environment's mpi4py and library in front:
NumPy and the measuring code are the same for every side.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

from unisono.commands.bench.worker_group import BenchError, WorkerGroup, connection_over
from unisono.engine.environment import env
from unisono.errors import message

__all__ = [
    "MPIS",
    "PEERS",
    "BenchLibrary",
    "MpiLibrary",
    "MpiWorkerGroup",
    "choose_libraries",
    "choose_worker_group",
]

INSTALL_TORCH = "pip install torch"
START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class BenchLibrary:
    """One peer: the module that must be importable in its workers (None: nothing to install)."""

    name: str
    what: str
    module: str | None = None
    install: str = ""

    def side(self, size: int) -> WorkerGroup:
        """Its `size` processes, not started yet."""
        return WorkerGroup(self.name, size)

    def missing(self) -> str | None:
        """A line that says what to install, None when the peer can run."""
        if self.module is None or find_spec(self.module) is not None:
            return None
        return f"the peer {self.name} needs the package {self.module}: {self.install}"


@dataclass(frozen=True)
class MpiLibrary(BenchLibrary):
    """One MPI library.

    Attributes:
        flags: for its mpiexec: more ranks than cores are allowed, and no rank is bound to a core.
        settings: the same by way of the environment.
    """

    flags: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()

    def side(self, size: int) -> WorkerGroup:
        """Its `size` processes, not started yet."""
        return MpiWorkerGroup(self.name, size)

    def missing(self) -> str | None:
        """A line that says what to install, None when the peer can run."""
        if self.site() is not None:
            return None
        return f"the peer {self.name} needs the environment {self.home.name}: make bench-peers"

    @property
    def home(self) -> Path:
        """Its virtual environment, next to the one this interpreter runs in."""
        return Path(sys.prefix).parent / f".venv-{self.name}"

    def site(self) -> Path | None:
        """The folder that mpi4py lies in, None when it is not installed."""
        same = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        return next((path.parent for path in self.home.glob(f"lib/{same}/site-packages/mpi4py")), None)

    def environ(self) -> dict[str, str]:
        """What mpiexec and its ranks are started with."""
        environ = env.copy()
        places = {"PYTHONPATH": self.site(), "LD_LIBRARY_PATH": self.home / "lib", "PATH": self.home / "bin"}
        for name, first in places.items():
            environ[name] = os.pathsep.join(filter(None, (str(first), environ.get(name))))
        return environ | dict(self.settings)


ROOT_ALLOWED = (("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"))
MPIS = {
    "mpich": MpiLibrary("mpich", "MPICH through mpi4py", flags=("-bind-to", "none")),
    "openmpi": MpiLibrary(
        "openmpi",
        "Open MPI through mpi4py",
        flags=("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
        settings=ROOT_ALLOWED,
    ),
    "intelmpi": MpiLibrary(
        "intelmpi", "Intel MPI through mpi4py", settings=(("I_MPI_PIN", "0"), ("I_MPI_FABRICS", "shm"))
    ),
}
LIMIT = "the machine's limit: the bytes that the operation has to read and write, all ranks at once"
PEERS: dict[str, BenchLibrary] = {
    "gloo": BenchLibrary("gloo", "torch.distributed over Gloo", "torch", INSTALL_TORCH),
    "memcpy": BenchLibrary("memcpy", "one memcpy of the same size per rank, all at once"),
    "limit": BenchLibrary("limit", LIMIT),
    "shared": BenchLibrary("shared", "Unisono with arrays of unisono.empty"),
    **MPIS,
}


def choose_libraries(names: str) -> list[BenchLibrary]:
    """Peers from a comma list such as "gloo,memcpy"; "" is none.

    Raises:
        ValueError: an unknown peer, or one whose package is missing.
    """
    chosen = []
    for name in dict.fromkeys(filter(None, (part.strip() for part in names.split(",")))):
        if name not in PEERS:
            raise ValueError(f"unknown peer {name!r}: choose from {', '.join(PEERS)}")
        if (missing := PEERS[name].missing()) is not None:
            raise ValueError(missing)
        chosen.append(PEERS[name])
    return chosen


def choose_worker_group(interface: str) -> str:
    """The name of Unisono's own contender for an interface.

    Raises:
        ValueError: the interface is torch, and torch is missing.
    """
    if interface == "torch" and find_spec("torch") is None:
        raise ValueError(f"--interface torch needs the package torch: {INSTALL_TORCH}")
    return "unisono-torch" if interface == "torch" else "unisono"


class MpiWorkerGroup(WorkerGroup):
    """`size` ranks of one MPI library; they connect back over a Unix socket in a private folder."""

    def _start_workers(self) -> None:
        mpi = MPIS[self.name]
        with (
            tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            address = os.path.join(folder, "ranks")
            listener.bind(address)
            listener.listen(self.size)
            listener.settimeout(0.5)
            worker = [sys.executable, "-m", "unisono.commands.bench.mpi_worker", address]
            self._start([*self._launcher(mpi, folder), *worker], mpi.environ())
            self._accept(listener)

    def _launcher(self, mpi: MpiLibrary, folder: str) -> list[str]:  # noqa: ARG002  (for ranks elsewhere)
        """The command that starts `size` ranks of what follows. `folder` lasts until the ranks have come."""
        return [str(mpi.home / "bin" / "mpiexec"), *mpi.flags, "-n", str(self.size)]

    def _accept(self, listener: socket.socket) -> None:
        """Collect the ranks' connections, in the order of their ranks."""
        joined: dict[int, tuple[int, Connection]] = {}
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(joined) < self.size:
            code = self.processes[0].poll()
            if code is not None or time.monotonic() > deadline:
                ended = f"mpiexec ended with exit code {code}" if code is not None else "mpiexec still runs"
                what = f"{self.name}: {len(joined)} of {self.size} ranks came within {START_TIMEOUT_S:.0f} s"
                raise BenchError(message(f"{what}, {ended}", remedy="What it printed is above."))
            try:
                channel, _ = listener.accept()
            except TimeoutError:
                continue
            channel.setblocking(True)
            connection = connection_over(channel)
            try:
                hello = json.loads(connection.recv_bytes())
            except (EOFError, OSError) as error:
                what = f"{self.name}: a rank came and did not say which it is"
                raise BenchError(message(what, observed=str(error) or "it ended")) from error
            joined[hello["rank"]] = (hello["pid"], connection)
        ranks = [joined[rank] for rank in range(self.size)]
        self.pids = [pid for pid, _ in ranks]
        self.connections = [connection for _, connection in ranks]

    def kill(self) -> None:
        """Ask mpiexec to end its ranks, then insist."""
        for process in self.processes:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5.0)
        super().kill()
