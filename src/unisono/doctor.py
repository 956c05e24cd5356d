"""`unisono doctor`: what this machine is, what was found on it, and what Unisono can do here."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from unisono import __version__, _native, env
from unisono.buffers import DTYPES
from unisono.plans import ALGORITHMS
from unisono.reduction import PremulSum, ReduceOp

__all__ = ["add_arguments", "main"]

GIB = 1 << 30
PACKAGES = ("numpy", "msgspec", "torch", "mpi4py", "ray", "matplotlib", "ml_dtypes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def main(args: argparse.Namespace) -> int:  # noqa: ARG001
    """Print the report. Exit code: 0, or 1 when an environment variable is malformed."""
    for title, lines in (
        ("machine", _machine()),
        ("software", _software()),
        ("backends", _backends()),
        ("collectives of the native backend, on CPU memory", _collectives()),
        ("reductions", _reductions()),
    ):
        _section(title, lines)
    try:
        settings = env.read()
    except ValueError as error:
        _section("settings", [str(error)])
        return 1
    shown = [f"{name:18} {value:22} {origin}" for name, value, origin in env.listing(settings) if value]
    _section("settings (value, where it comes from)", shown)
    return 0


def _section(title: str, lines: Iterator[str] | list[str]) -> None:
    print(f"{title}")
    for line in lines:
        print(f"  {line}")
    print()


def _machine() -> Iterator[str]:
    yield f"{platform.system()} {platform.release()}, {platform.machine()}, host {socket.gethostname()}"
    usable = len(os.sched_getaffinity(0))
    yield f"{usable} usable cores of {os.cpu_count()}; reductions use the {_native.isa()} kernels"
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    yield f"memory {pages * page / GIB:.1f} GiB, {free / GIB:.1f} GiB free"
    yield "interfaces " + ", ".join(name for _, name in socket.if_nameindex())
    gpus = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    yield "GPUs " + (", ".join(gpus) if gpus else "none")


def _software() -> Iterator[str]:
    yield f"unisono {__version__}, Python {platform.python_version()} ({sys.executable})"
    for name in PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} not installed"
    yield f"mpiexec {shutil.which('mpiexec') or 'not found'}"


def _backends() -> Iterator[str]:
    yield "native      shared memory, ranks of one machine, CPU memory"
    torch = importlib.util.find_spec("torch") is not None
    state = "import unisono.torch registers it" if torch else "pip install torch==2.13.0"
    yield f'torch       torch.distributed backend "unisono", CPU tensors: {state}'
    yield "mpi, gloo, nccl  not selectable yet"


def _collectives() -> Iterator[str]:
    for collective, algorithms in ALGORITHMS.items():
        yield f"{collective:16} {', '.join(algorithms)}"
    yield f"{'send, recv':16} byte ring per pair of ranks"


def _reductions() -> Iterator[str]:
    ops = [(op.name, op.value) for op in ReduceOp] + [(PremulSum(1.0).name, PremulSum(1.0).value)]
    yield f"{'':12}" + " ".join(f"{name:>7}" for name, _ in ops)
    for code, dtype in enumerate(DTYPES):
        marks = ("yes" if _native.reducible(code, value) else "-" for _, value in ops)
        widths = (max(7, len(name)) for name, _ in ops)
        yield f"{dtype:12}" + " ".join(f"{mark:>{width}}" for mark, width in zip(marks, widths, strict=True))
