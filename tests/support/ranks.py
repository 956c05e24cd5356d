"""Ranks as threads of this process, with one mapping of the shared memory, or as if on several hosts: this is
quick, and TSan sees all of them.

Also ranks as processes: one Python program, started once per rank, meeting over a file.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import system
from effort import HANG_S
from unisono import _native
from unisono.engine.bootstrap.engine import EngineSettings, open_engine
from unisono.engine.bootstrap.forming import Identity
from unisono.engine.costs.machine import DEFAULTS
from unisono.engine.group import Group
from unisono.engine.group.native import NativeGroup
from unisono.engine.store import HashStore

HERE = Path(__file__).resolve().parent
STAGING_BYTES = 1 << 20


def groups(
    size: int,
    *,
    timeout_s: float = HANG_S,
    staging_bytes: int = STAGING_BYTES,
    per_host: int | None = None,
    socket_bytes: int = 0,
    peer_timeout_s: float = 10.0,
    zero_copy: bool = True,
    cores: int = 0,
    segment_bytes: int = DEFAULTS.segment_bytes,
) -> list[Group]:
    """The groups of `size` ranks, all in this process.

    per_host: the number of successive ranks that share memory; others have connections; None: by the
    environment (see the fixture `spread`), else all ranks.
    socket_bytes: of the kernel's buffers, 0 for its own choice.
    zero copy: large messages are not staged; most collectives do so if there are enough `cores` (0: the
    machine's).
    """
    store = HashStore(timeout_s)
    per_host = int(os.environ.get("UNISONO_RANKS_PER_HOST", "0")) if per_host is None else per_host
    if per_host:
        settings = EngineSettings(staging_bytes, -1.0, -1, per_host, peer_timeout_s, None, socket_bytes)

        def opened(rank: int) -> Group:
            opened = open_engine(store, rank, size, timeout_s=timeout_s, settings=settings)
            identity = Identity(opened.membership, settings)
            hosts = opened.hosts
            return NativeGroup(
                opened.engine, rank, size, "test", timeout_s, store, hosts=hosts, identity=identity
            )

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(opened, range(size)))
    region = _native.Region(-1, size, staging_bytes, True)
    if zero_copy and not system.why_not("other processes"):
        region.enable_zero_copy()
    cores = cores or len(os.sched_getaffinity(0))
    engines = [
        _native.Engine(region, rank, [-1] * size, -1, cores, -1, segment_bytes) for rank in range(size)
    ]
    return [NativeGroup(engine, rank, size, "test", timeout_s, store) for rank, engine in enumerate(engines)]


def threads(size: int, work: Callable[[Group], Any], **options: Any) -> list[Any]:
    """Run `work(group)` on every rank; the results by rank, or the first error by time."""
    worlds = groups(size, **options)
    failures: list[BaseException] = []
    lock = threading.Lock()

    def guarded(group: Group) -> Any:
        try:
            return work(group)
        except BaseException as error:
            with lock:
                failures.append(error)
            if not group.closed:
                group.abort()
            return None

    try:
        with ThreadPoolExecutor(size) as pool:
            results = list(pool.map(guarded, worlds))
    finally:
        for world in worlds:
            world.close()
    if failures:
        raise failures[0]
    return results


def processes(
    size: int, program: Path, *arguments: str, timeout_s: float = HANG_S, environ: Mapping[str, str] = {}
) -> list[str]:
    """Run a program as `size` ranks; returns the output of each. Fails when one does.

    It finds its rank and the number of ranks in its environment, and a place to meet:
    `un.init_process_group(init_method=os.environ["MEETING"])` makes their group.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **environ, "WORLD_SIZE": str(size)}
        environment |= {
            "MEETING": f"file://{folder}/meeting",
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        }
        running = [
            subprocess.Popen(
                [sys.executable, str(program), *arguments],
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        return _collect(running, time.monotonic() + timeout_s)


def _collect(running: list[subprocess.Popen[str]], deadline: float) -> list[str]:
    outputs = []
    try:
        for process in running:
            outputs.append(process.communicate(timeout=max(deadline - time.monotonic(), 0.1))[0])
    finally:
        for process in running:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    codes = [process.returncode for process in running]
    for rank, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        assert code == 0, f"rank {rank} ended with {code} (all: {codes}):\n{output}"
    return outputs
