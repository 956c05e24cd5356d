"""Programs for mpi4py, unchanged, over Unisono and over an MPI library: wall and CPU seconds, in turns.

    python benchmarks/mpi_programs.py --mpiexec PREFIX/bin/mpiexec -n 4 helloworld.py "cpi.py --size 64"

Each program is a path with its arguments. The MPI's mpi4py is that of the `python` beside `mpiexec`. A
figure is the median over rounds; CPU seconds are those of the whole job, its launcher included. See
docs/mpi4py.md.
"""

from __future__ import annotations

import argparse
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from statistics import median


def seconds(command: list[str], folder: Path) -> tuple[float, float]:
    """The wall and CPU seconds of one job."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    job = subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if job.returncode:
        sys.exit(f"{shlex.join(command)} ended with {job.returncode}: {job.stderr.decode()[-2000:]}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a row for each program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--mpiexec", type=Path, required=True)
    parser.add_argument("-n", default="4")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    mpiexec = options.mpiexec.absolute()
    ours = [str(Path(sys.executable).with_name("unisono")), "run", "--replace", "mpi4py", "-n", options.n]
    theirs = [str(mpiexec), "-n", options.n, str(mpiexec.with_name("python"))]
    print(f"{'seconds, medians':40} {'unisono':>8} {'mpi':>8} {'ratio':>6} {'CPU':>8} {'mpi':>8}")
    for program in options.programs:
        words = shlex.split(program)
        place = next(i for i, word in enumerate(words) if not word.startswith("-") and word.endswith(".py"))
        script = Path(words[place]).absolute()
        words[place] = str(script)
        rounds = [(seconds([*ours, *words], script.parent), seconds([*theirs, *words], script.parent))
                  for _ in range(options.rounds)]  # fmt: skip
        wall, cpu = (median(u[i] for u, _ in rounds) for i in (0, 1))
        their_wall, their_cpu = (median(m[i] for _, m in rounds) for i in (0, 1))
        ratio = median(u[0] / m[0] for u, m in rounds)
        name = f"{script.parent.name}/{script.name}"
        print(f"{name:40} {wall:8.2f} {their_wall:8.2f} {ratio:6.2f} {cpu:8.2f} {their_cpu:8.2f}", flush=True)


if __name__ == "__main__":
    main()
