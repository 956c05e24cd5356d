"""Test wheels of dist/ as a user installs them: `make test-wheel`.

Each is installed into a new environment of its Python, with its dependencies from PyPI only. PATH is that
environment's `bin`: no compiler, no shell. Then README's ten lines run, and every command once.

With `--torch REQUIREMENT` (torch==2.15.0) it also tests PyTorch: DDP over Unisono, and virtual GPUs, which
compile a library at their first use, with the compilers of this PATH.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from wheels import BUILD, COMPILER, NATIVE, ROOT, Interpreter, environment, found, inspect

COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "clang++", "make", "cmake", "ninja")
ROUNDS = 5  # of an import; the shortest counts
MOST_IMPORT_S = 0.08  # CPU time of `import unisono`, beyond that of an empty program
MOST_READY_S = 0.40  # until `init_process_group` can be called: NumPy, msgspec and the engine are loaded
LIMIT_S = 300.0  # for one command

READY = "import unisono; unisono.init_process_group"
COMMANDS = (
    "unisono --version",
    "unisono doctor",
    "unisono run -n 2 sum.py",
    "unisono bench all_reduce -n 2 -b 4 -e 64K -f 128 --rounds 2 --round-ms 20",
    "unisono calibrate",
    "unisono draw all_reduce -n 4 -o rounds.svg",
    "unisono draw all_reduce -n 4 -o rounds.html",
)
WITH_TORCH = (
    "unisono run -n 2 ddp.py unisono",
    "unisono run --replace gloo -n 2 ddp.py gloo",
)
VIRTUAL = "unisono run --virtual-gpus 2 virtual.py"

DDP = """
import sys
import torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
model(torch.full((4, 8), dist.get_rank() + 1.0)).sum().backward()
print(model.module.weight.grad[0, 0].item())
assert model.module.weight.grad[0, 0].item() == 6.0
dist.destroy_process_group()
"""
ON_GPUS = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
x = torch.ones(3).cuda()
dist.all_reduce(x)
print(x)
assert x.tolist() == [2.0, 2.0, 2.0]
dist.destroy_process_group()
"""


class Tried(NamedTuple):
    """The results for a wheel on a user's machine."""

    wheel: str
    megabytes: float
    installed_megabytes: float
    import_ms: float
    ready_ms: float
    kernels: str
    faults: tuple[str, ...]


def main() -> int:
    """Test each wheel. Exit code: 1 if one has a fault."""
    arguments = parse()
    interpreters = {each.tag: each for each in (*found(), *map(inspect, arguments.python))}
    tried = []
    for wheel in arguments.wheels or sorted((ROOT / "dist").glob(f"*{NATIVE}.whl")):
        tag = wheel.name.split("-")[3]  # of the ABI: cp314, cp314t
        if tag in interpreters:
            tried.append(try_wheel(wheel.resolve(), interpreters[tag], arguments))
        else:
            print(f"not tried: {wheel.name}: no interpreter for {tag} here (--python PATH)")
    print("\nwheel | MB | installed MB | import, ms of CPU | ready, ms of CPU | kernels | faults")
    for each in tried:
        sizes = f"{each.megabytes:.2f} | {each.installed_megabytes:.1f}"
        times = f"{each.import_ms:.0f} | {each.ready_ms:.0f}"
        print(f"{each.wheel} | {sizes} | {times} | {each.kernels} | {'; '.join(each.faults) or 'none'}")
    return int(not tried or any(each.faults for each in tried))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("wheels", nargs="*", type=Path, metavar="WHEEL", help="default: those of dist/ for this machine")
    add("--python", action="append", default=[], metavar="PATH", help="an interpreter; may be repeated")
    add("--torch", metavar="REQUIREMENT", help="also with PyTorch: torch==2.15.0")
    return parser.parse_args()


def try_wheel(wheel: Path, interpreter: Interpreter, arguments: argparse.Namespace) -> Tried:
    """Install a wheel into a temporary folder and run all tests."""
    print(f"==> {wheel.name}, {interpreter.path}", flush=True)
    with tempfile.TemporaryDirectory(prefix="unisono-wheel-") as name:
        folder = Path(name)
        (folder / "home").mkdir()
        (folder / "sum.py").write_text(ten_lines())
        (folder / "ddp.py").write_text(DDP)
        (folder / "virtual.py").write_text(ON_GPUS)
        subprocess.run([interpreter.path, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        install(folder, str(wheel))
        faults = list(run_all(folder, COMMANDS))
        used = kernels(folder)
        if used != widest():
            faults.append(f"reductions use the {used} kernels, this processor has {widest()}")
        empty, imported, ready = (cpu_s(folder, code) for code in ("", "import unisono", READY))
        if imported - empty > MOST_IMPORT_S:
            faults.append(f"import unisono: {imported - empty:.3f} s, {MOST_IMPORT_S} at most")
        if ready - empty > MOST_READY_S:
            faults.append(f"{READY}: {ready - empty:.3f} s, {MOST_READY_S} at most")
        nbytes = sum(path.stat().st_size for path in packages(folder).glob("unisono/**/*") if path.is_file())
        if arguments.torch:
            faults += with_torch(folder, arguments.torch)
    milliseconds = [1000 * (cpu - empty) for cpu in (imported, ready)]
    return Tried(wheel.name, wheel.stat().st_size / 1e6, nbytes / 1e6, *milliseconds, used, tuple(faults))


def ten_lines() -> str:
    """Return README's first example."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return next(block for block in blocks if "sum.py" in block or "all_reduce" in block)


def install(folder: Path, *requirements: str) -> None:
    """Install into the folder's environment."""
    tools = environment(BUILD / "tools", sys.executable, COMPILER)
    pip = [tools / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    target = ["--python", folder / "venv" / "bin" / "python"]
    subprocess.run([*pip, *target, "install", "-q", "--only-binary", ":all:", *requirements], check=True)


def packages(folder: Path) -> Path:
    """Return the environment's site-packages."""
    (found_there,) = (folder / "venv" / "lib").glob("python*/site-packages")
    return found_there


def variables(folder: Path, path: str = "") -> dict[str, str]:
    """Return the whole environment of a command."""
    own = f"{folder / 'venv' / 'bin'}"
    return {"HOME": str(folder / "home"), "TMPDIR": str(folder), "PATH": f"{own}:{path}" if path else own}


def run_all(folder: Path, commands: tuple[str, ...], path: str = "") -> Iterator[str]:
    """Run commands; yield those that fail, after their output."""
    env = variables(folder, path)
    if not path and (there := [name for name in COMPILERS if shutil.which(name, path=env["PATH"])]):
        yield f"the environment has {' '.join(there)}"
    for command in commands:
        program, *words = command.split()
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        options = {"cwd": folder, "env": env, "timeout": LIMIT_S, "text": True, **pipes}
        started = time.monotonic()
        try:
            ran = subprocess.run([folder / "venv" / "bin" / program, *words], check=False, **options)
        except subprocess.TimeoutExpired:
            yield f"{command}: not done after {LIMIT_S:.0f} s"
            continue
        print(f"    {command}: {ran.returncode} after {time.monotonic() - started:.0f} s", flush=True)
        if ran.returncode:
            print(ran.stdout)
            yield f"{command}: exit code {ran.returncode}"


def kernels(folder: Path) -> str:
    """Return the kernels that the engine uses: base, v3 or v4; "" when it does not load."""
    return python(folder, "from unisono import _native; print(_native.isa())").stdout.strip()


def widest() -> str:
    """Return the kernels with the widest vectors that this processor has."""
    with open("/proc/cpuinfo") as file:
        flags = set(re.findall(r"\w+", next((line for line in file if line.startswith("flags")), "")))
    return "v4" if "avx512bw" in flags else "v3" if "avx2" in flags else "base"


def python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the folder's environment."""
    command = [folder / "venv" / "bin" / "python", "-c", code]
    return subprocess.run(
        command, env=variables(folder), capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


def cpu_s(folder: Path, code: str) -> float:
    """Return the CPU time of a program, the shortest of several runs: others use the machine, too."""
    times = []
    for _ in range(ROUNDS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([folder / "venv" / "bin" / "python", "-c", code], env=variables(folder), check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def with_torch(folder: Path, requirement: str) -> Iterator[str]:
    """Yield the failures with PyTorch."""
    install(folder, requirement)
    yield from run_all(folder, WITH_TORCH)
    yield from run_all(folder, (VIRTUAL,), os.environ["PATH"])
    if not list((folder / "home").glob(".cache/unisono/**/virtual-*.so")):
        yield "virtual GPUs were not compiled into the user's cache"


if __name__ == "__main__":
    sys.exit(main())
