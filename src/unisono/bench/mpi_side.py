"""A side whose ranks are started by an MPI library's own mpiexec, from an environment of its own.

Each library lives in its virtual environment (`make bench-peers`), because two of them cannot share
one. The worker runs under this interpreter with the environment's mpi4py and library in front, so
that NumPy and the measuring code are the same for every side.
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
from multiprocessing.connection import Connection
from pathlib import Path

from unisono import env
from unisono.bench.side import BenchError, Side, connection_over
from unisono.errors import message

__all__ = ["MPIS", "Mpi", "MpiSide"]

START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Mpi:
    """One MPI library.

    Attributes:
        flags: for its mpiexec: more ranks than cores are allowed, and no rank is bound to a core.
        settings: the same by way of the environment.
    """

    name: str
    what: str
    flags: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def home(self) -> Path:
        """Its virtual environment, next to the one this interpreter runs in."""
        return Path(sys.prefix).parent / f".venv-{self.name}"

    def site(self) -> Path | None:
        """The folder that mpi4py lies in, None when it is not installed."""
        found = sorted(self.home.glob("lib/python*/site-packages/mpi4py"))
        same = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        return next((path.parent for path in found if path.parts[-3] == same), None)

    def environ(self) -> dict[str, str]:
        """What mpiexec and its ranks are started with."""
        environ = env.copy()
        places = {"PYTHONPATH": str(self.site()), "LD_LIBRARY_PATH": str(self.home / "lib")}
        for name, first in places.items():
            environ[name] = os.pathsep.join(filter(None, (first, environ.get(name))))
        environ["PATH"] = f"{self.home / 'bin'}{os.pathsep}{environ.get('PATH', '')}"
        return environ | dict(self.settings)


MPIS = {
    mpi.name: mpi
    for mpi in (
        Mpi("mpich", "MPICH through mpi4py", ("-bind-to", "none")),
        Mpi(
            "openmpi",
            "Open MPI through mpi4py",
            ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
            (("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")),
        ),
        Mpi(
            "intelmpi",
            "Intel MPI through mpi4py",
            settings=(("I_MPI_PIN", "0"), ("I_MPI_FABRICS", "shm")),
        ),
    )
}


class MpiSide(Side):
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
            self.processes.append(
                subprocess.Popen(
                    [*self._launcher(mpi, folder), sys.executable, "-m", "unisono.bench.mpi_worker", address],
                    env=mpi.environ(),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # standard output is the report's
                    start_new_session=True,
                )
            )
            self._accept(listener)

    def _launcher(self, mpi: Mpi, folder: str) -> list[str]:  # noqa: ARG002  (for ranks elsewhere)
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
        self.rank_pids = [pid for pid, _ in ranks]
        self.connections = [connection for _, connection in ranks]

    def kill(self) -> None:
        """Ask mpiexec to end its ranks, then insist."""
        for process in self.processes:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5.0)
        super().kill()
