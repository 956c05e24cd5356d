"""`unisono doctor`: this machine, the software on it, and what Unisono can do with them."""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from unisono import __version__, _native
from unisono.commands.doctor.trial import OPERATIONS, try_backend
from unisono.engine.backends import BACKENDS
from unisono.engine.backends.availability import REMEDIES, why_not
from unisono.engine.costs import forecasts
from unisono.engine.environment import env
from unisono.engine.memory.buffers import DTYPES, REDUCIBLE
from unisono.engine.operations.reduction import PremulSum, ReduceOp
from unisono.errors import UnisonoError
from unisono.plans import ALGORITHMS

__all__ = ["add_arguments", "main"]

GIB = 1 << 30
OTHERS = {  # operations without a plan, or made of others
    "send, recv": ("byte ring per pair of ranks",),
    "objects": ("encoded, then as bytes",),
    "coalesced": ("small buffers copied together, then as above",),
}
PACKAGES = ("numpy", "msgspec", "torch", "mpi4py", "ray", "matplotlib", "ml_dtypes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flag."""
    parser.add_argument(
        "--backends",
        action="store_true",
        help="try every operation of every backend on two ranks (up to two minutes each)",
    )


def main(args: argparse.Namespace) -> int:
    """Print the report. Exit code: 0, or 1 when an environment variable is malformed."""
    if args.backends:
        _section("backends, as tried on this machine", _operation_table())
        if importlib.util.find_spec("torch") is not None:
            _section("backends of torch.distributed, as tried on this machine", _torch_table())
        return 0
    for title, lines in (
        ("machine", _machine()),
        ("software", _software()),
        ("backends", _backends()),
        ("operations of the native backend, and their algorithms", _operations()),
        ("reductions of the native backend", _reductions()),
    ):
        _section(title, lines)
    try:
        settings = env.read()
    except ValueError as error:
        _section("settings", [str(error)])
        return 1
    _section("predictions, in the last run of unisono bench", _forecasts(settings))
    _section("settings", _settings(settings))
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
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (os.sysconf(name) * page / GIB for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    yield f"memory {total:.1f} GiB, {free:.1f} GiB free"
    yield "interfaces " + ", ".join(_interface(name) for _, name in socket.if_nameindex())
    gpus = [_gpu(path) for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    yield "GPUs " + (", ".join(gpus) if gpus else "none")


def _interface(name: str) -> str:
    """A network interface by the kernel's description: "eth0 (up, 10000 Mbit/s)"."""
    state = _first_line(Path("/sys/class/net", name, "operstate")) or "unknown"
    speed = _first_line(Path("/sys/class/net", name, "speed"))
    known = speed.isdecimal() and int(speed) > 0
    return f"{name} ({state}, {speed} Mbit/s)" if known else f"{name} ({state})"


def _gpu(information: Path) -> str:
    lines = information.read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return models[0] if models else information.parent.name


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0]
    except OSError:  # an interface that is down has no speed
        return ""


def _software() -> Iterator[str]:
    yield f"unisono {__version__}, Python {platform.python_version()} ({sys.executable})"
    for name in PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} not installed"
    library, command = ctypes.util.find_library("mpi"), shutil.which("mpiexec")
    yield f"MPI library {library or 'not found'}, mpiexec {command or 'not found'}"


def _backends() -> Iterator[str]:
    for name, device in BACKENDS.items():
        missing = why_not(name)
        state = f"not available here: {missing}. {REMEDIES[name]}" if missing else "available"
        yield f"{name:11} {device:4} memory: {state}"
    if importlib.util.find_spec("torch") is None:
        yield 'torch       torch.distributed backend "unisono", CPU tensors: pip install torch'
    else:
        yield from _pytorch()
    yield "what each can do: unisono doctor --backends tries it"


def _pytorch() -> Iterator[str]:
    """Whether this PyTorch has all that the backend needs of it."""
    try:
        from unisono.torch_internals import catalog
    except (ImportError, OSError, RuntimeError) as error:  # a broken installation
        yield f"torch       import torch fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return
    yield 'torch       torch.distributed backend "unisono", CPU tensors: there after `import torch`'
    for name in catalog.missing():
        yield f"            {name.said()}"


def _operation_table() -> Iterator[str]:
    """The table of operations and backends, then the reasons why some are missing."""
    found: dict[str, dict[str, str]] = {}
    reasons: list[str] = []
    columns = {name: f"{name} {device}" for name, device in BACKENDS.items()}
    for name in BACKENDS:
        try:
            found[name] = try_backend(name)
            if name == "nccl" and why_not(name):
                reasons.append("nccl: tried on virtual GPUs: " + why_not(name))
        except UnisonoError as error:
            reasons.append(f"{name}: {error}")
    yield from _table(OPERATIONS, columns, found, reasons)


def _torch_table() -> Iterator[str]:
    """The same of PyTorch's functions and backends, for tensors of the CPU and of CUDA."""
    from unisono.commands.doctor import torch_trial

    found: dict[str, dict[str, str]] = {}
    reasons = [] if torch_trial.has_gpus() else ["cuda: tried on virtual GPUs, whose memory is the host's"]
    columns = [f"{name} {device}" for name in torch_trial.BACKENDS for device in torch_trial.DEVICES]
    for column in columns:
        try:
            found[column] = torch_trial.try_torch(*column.split())
        except UnisonoError as error:
            reasons.append(f"{column}: {error}")
    yield from _table(torch_trial.FUNCTIONS, {column: column for column in columns}, found, reasons)


def _table(
    rows: Iterable[str],
    columns: Mapping[str, str],
    found: Mapping[str, Mapping[str, str]],
    reasons: list[str],
) -> Iterator[str]:
    """Rows and columns with a cell each, then the reasons. columns: their titles."""
    yield f"{'':22}" + "".join(f"{title:14}" for title in columns.values())
    for row in rows:
        cells = [_cell(found.get(column, {}).get(row)) for column in columns]
        yield f"{row:22}" + "".join(f"{cell:14}" for cell in cells)
    yield ""
    yield from reasons
    for column, told in found.items():
        yield from (f"{column}: {row}: {why}" for row, why in told.items() if why != "yes")


def _cell(told: str | None) -> str:
    return "not tried" if told is None else "yes" if told == "yes" else "no"


def _operations() -> Iterator[str]:
    for operation, algorithms in [*ALGORITHMS.items(), *OTHERS.items()]:
        yield f"{operation:16} {', '.join(algorithms)}"


def _settings(settings: env.Settings) -> Iterator[str]:
    """The variables that a user may set, and those that a launcher has set."""
    names = {variable.setting: variable.name for variable in reversed(env.VARIABLES)}
    for setting, value, origin in env.listing(settings):
        name = names.get(setting, setting) if origin == "default" else origin
        if value and (origin != "default" or name.startswith("UNISONO_")):
            yield f"{name:24} {value:22} {'default' if origin == 'default' else 'environment'}"


def _forecasts(settings: env.Settings) -> Iterator[str]:
    errors = forecasts.kept(settings)
    yield "none yet" if errors is None else f"{errors.date}: {forecasts.text(errors)}"


def _reductions() -> Iterator[str]:
    ops = [(op.name, op.value) for op in ReduceOp] + [(PremulSum(1.0).name, PremulSum(1.0).value)]
    yield f"{'':12}" + " ".join(f"{name:>7}" for name, _ in ops)
    for code, dtype in enumerate(REDUCIBLE):
        marks = ("yes" if _native.reducible(code, value) else "-" for _, value in ops)
        widths = (max(7, len(name)) for name, _ in ops)
        yield f"{dtype:12}" + " ".join(f"{mark:>{width}}" for mark, width in zip(marks, widths, strict=True))
    yield f"moved only: {', '.join(name for name in DTYPES if name not in REDUCIBLE)}"
