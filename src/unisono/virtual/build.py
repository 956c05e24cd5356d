"""Compiles the native library against the installed PyTorch, once; keeps it in the cache folder.

It is compiled at its first use: it needs PyTorch's headers, and works with one version of PyTorch only. There
are two translation units, because PyTorch's headers take most of the compile time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from unisono.errors import message

from . import operations

UNITS = (
    ("checks", "host_arguments", "determinism", "types", "fallback", "kernels"),
    ("memory_account", "device", "memory", "generator", "attention", "interface"),
)
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility-inlines-hidden", "-w")
COMPILERS = ("g++", "c++", "clang++")


def torch_folder() -> Path:
    """Return the folder of the installed PyTorch, without importing it.

    Raises:
        ImportError: PyTorch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        raise ImportError("virtual GPUs need PyTorch: pip install torch")
    return Path(spec.origin).parent


def sources() -> Path:
    """Return the folder of the C++ sources: beside this file in a wheel, else in the source tree."""
    here = Path(__file__).resolve().parent
    packed = here / "csrc"
    return packed if packed.is_dir() else here.parents[2] / "csrc" / "virtual"


def build(torch: Path, cache: Path, version: str, extra: tuple[str, ...] = ()) -> Path:
    """Return the library for the PyTorch in folder `torch`; compile it if it is not in `cache`.

    Other processes that need it wait meanwhile. Shows progress on stderr.

    Raises:
        RuntimeError: there is no compiler, or it failed, or the cache is not this user's; the text says what
            to do.
    """
    name = f"virtual-torch{version}-{_digest(torch, extra)}.so"
    made = cache / name
    _keep_others_out(cache)
    if not _trusted(made):
        with _locked(cache / (name + ".lock")):
            if not _trusted(made):
                _compile(torch, made, extra)
    return made


def _keep_others_out(cache: Path) -> None:
    """Make the folder, or check it: its writers decide which code this process loads."""
    cache.mkdir(parents=True, exist_ok=True, mode=0o755)
    status = cache.stat()
    open_to_others = status.st_mode & OTHERS_WRITE
    if open_to_others and status.st_uid == os.getuid():
        cache.chmod(stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)
    elif open_to_others or status.st_uid not in (os.getuid(), 0):
        raise RuntimeError(
            message(
                f"{cache} belongs to user {status.st_uid}: code from it is not loaded",
                remedy="Set XDG_CACHE_HOME to a folder of your own.",
            )
        )


def _trusted(made: Path) -> bool:
    """Whether a library is there that no other user can have written; otherwise it is built again."""
    try:
        status = made.lstat()
    except FileNotFoundError:
        return False
    except PermissionError as error:
        raise _unusable(made, error) from None
    regular, own = stat.S_ISREG(status.st_mode), status.st_uid in (os.getuid(), 0)
    return regular and own and not status.st_mode & OTHERS_WRITE


def _unusable(path: Path, error: OSError) -> RuntimeError:
    what = f"{path} cannot be used"
    return RuntimeError(
        message(what, observed=str(error), remedy="Set XDG_CACHE_HOME to a folder of your own.")
    )


def _digest(torch: Path, extra: tuple[str, ...]) -> str:
    """Hash the inputs of the build besides PyTorch's version: our sources, the folder of PyTorch."""
    hashed = hashlib.sha256(f"{torch}{FLAGS}{extra}".encode())
    for path in sorted([*sources().glob("*.?pp"), Path(operations.__file__)]):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:  # a link, which is not followed, or another user's file
        raise _unusable(path, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _compile(torch: Path, made: Path, extra: tuple[str, ...]) -> None:
    compiler = next((found for found in map(shutil.which, COMPILERS) if found), None)
    if compiler is None:
        raise RuntimeError(
            message(
                "virtual GPUs need a C++ compiler, once, to build their library against PyTorch",
                observed=f"none of {', '.join(COMPILERS)} in PATH",
                remedy="Install one (apt install g++), then run again.",
            )
        )
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        yaml = torch.parent / "torchgen" / "packaged" / "ATen" / "native" / "native_functions.yaml"
        (work / "cuda_operations.inc").write_text(operations.table(yaml.read_text()))
        paths = [torch / "include", torch / "include/torch/csrc/api/include"]
        flags = [*FLAGS, *extra, f"-I{work}", *(f"-isystem{path}" for path in paths)]
        commands = []
        for number, unit in enumerate(UNITS):
            source = work / f"{number}.cpp"
            source.write_text("".join(f'#include "{sources() / name}.cpp"\n' for name in unit))
            commands.append([compiler, *flags, "-c", str(source), "-o", str(work / f"{number}.o")])
        _run(commands, began)
        objects = [str(work / f"{number}.o") for number in range(len(UNITS))]
        libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        fresh = made.with_name(f"{made.name}.{os.getpid()}")
        _run([[compiler, "-shared", *extra, *objects, "-o", str(fresh), *libraries]], began)
        fresh.chmod(0o755)
        fresh.rename(made)
    _say(f"virtual GPUs: library built in {time.monotonic() - began:.0f} s, kept in {made.parent}")


def _run(commands: list[list[str]], began: float) -> None:
    """Run all commands at the same time; show the elapsed seconds."""
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for process in running:
            errors = None
            while errors is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    errors = process.communicate(timeout=1)[1]
                seconds = time.monotonic() - began
                _say(f"virtual GPUs: building their library for this PyTorch, once ... {seconds:.0f} s", "\r")
            if process.returncode:
                raise RuntimeError(
                    message(
                        "the library of virtual GPUs could not be compiled",
                        observed=f"{process.args!r}\n{errors[-2000:]}",
                        expected="a compiler for C++20 and PyTorch 2.12 to 2.15",
                    )
                )
    finally:
        for process in running:
            process.kill()
            process.wait()


def _say(text: str, end: str = "\n") -> None:
    if end == "\n" or sys.stderr.isatty():
        print(f"unisono: {text}", end=end, file=sys.stderr, flush=True)
