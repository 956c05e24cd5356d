"""`make test-backends`: the conformance suite over every backend that is not the engine; prints the counts.

`lane.py [--ranks 4] [--part quick] [--only NAME] [mpich openmpi intelmpi gloo nccl]`. The three MPI
libraries lie in environments of their own (`make bench-peers`). NCCL runs on virtual GPUs. Of each backend
the table of docs/backends.md is compared with what `unisono doctor --backends` finds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import pages
from unisono.commands.bench.libraries import MPIS
from unisono.commands.doctor.trial import AS_ROOT, try_backend

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "backends.md"
NAMES = (*MPIS, "gloo", "nccl")
LIMIT_S = 1500.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="which; default all")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--part", default="", help="quick: some modules")
    parser.add_argument("--only", default="", help="tests whose name contains this")
    args = parser.parse_args()
    failed = False
    for name in args.names or NAMES:
        began = time.monotonic()
        told = run(name, args.ranks, args.part, args.only)
        wrong = [] if told is None else [*told["failed"], *differences(name), *example(name)]
        if name in MPIS and not args.only:
            wrong += [*trains(name), *suite(name)]
        failed |= told is None or bool(wrong)
        print(f"{name:9} {counts(told)}, {time.monotonic() - began:.0f} s", flush=True)
        for what in ("refused", "left out"):
            for reason, number in (told or {}).get(what, {}).items():
                print(f"          {what}, {number} times: {reason}")
        for text in wrong:
            print(f"          FAILED: {text}")
    return int(failed)


def counts(told: dict[str, Any] | None) -> str:
    if told is None:
        return "did not come to its end"
    shown = []
    for what in ("tests", "checks"):
        one = told[what]
        shown.append(f"{what}: {one.get('passed', 0)} passed, {one.get('refused', 0)} refused")
    left_out = sum(told["left out"].values())
    return f"{told['ranks']} ranks; {'; '.join(shown)}; {left_out} left out, {len(told['failed'])} failed"


def launcher(name: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """What starts the ranks of a program, and their environment."""
    environ = {**os.environ, **AS_ROOT, "OMP_NUM_THREADS": "1"}
    if name in MPIS:
        mpi = MPIS[name]
        command = [str(mpi.home / "bin" / "mpiexec"), *mpi.flags, "-n", str(ranks), sys.executable]
        return command, {**environ, **mpi.environ()}
    command = [sys.executable, "-m", "unisono", "run", "-n", str(ranks)]
    return [*command, *(["--virtual-gpus", str(ranks)] if name == "nccl" else [])], environ


def run(name: str, ranks: int, part: str, only: str) -> dict[str, Any] | None:
    """The report of the suite's rank 0; None: there was none, and what it printed is shown."""
    command, environ = launcher(name, ranks)
    rooms = [str(ROOT / "tests" / room) for room in ("support", "conformance", "backends")]
    environ["PYTHONPATH"] = os.pathsep.join([*rooms, environ.get("PYTHONPATH", "")])
    backend = "mpi" if name in MPIS else name
    program = [*command, str(HERE / "program.py"), backend, part, only]
    try:
        ended = subprocess.run(
            program, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
        )
        printed = ended.stdout
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"").decode() + f"\nnot done after {LIMIT_S:.0f} s"
    _, found, told = printed.partition("REPORT ")
    if found:
        return json.loads(told.partition("\n")[0])
    print(printed[-4000:], file=sys.stderr)
    return None


def differences(name: str) -> list[str]:
    """Where docs/backends.md says something else than two ranks do."""
    command, environ = launcher(name, 2)
    backend = "mpi" if name in MPIS else name
    written = table()[backend]
    found = try_backend(backend, command, environ)
    return [
        f"docs/backends.md says {written.get(operation)!r} of {operation}, tried: {told}"
        for operation, told in found.items()
        if (told == "yes") != (written.get(operation) == "yes")
    ]


def example(name: str) -> list[str]:
    """What went wrong with the page's program for this backend, on four ranks."""
    backend = "mpi" if name in MPIS else name
    shown = [block.text for block in pages.blocks(PAGE.read_text()) if block.language in ("py", "python")]
    text = next(text for text in shown if f'init_process_group("{backend}")' in text)
    command, environ = launcher(name, 2 if name == "nccl" else 4)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(text)
        ended = subprocess.run(
            [*command, str(program)], env=environ, capture_output=True, text=True, timeout=120
        )
    return (
        [] if ended.returncode == 0 else [f"the page's program: {ended.stdout[-500:]}{ended.stderr[-1500:]}"]
    )


def trains(name: str) -> list[str]:
    """Where torch.distributed over a library of MPI has other losses than over Gloo."""
    losses = {}
    for way, backend in ((name, "unisono-mpi"), ("gloo", "gloo")):
        command, environ = launcher(way, 4)
        ended = subprocess.run(
            [*command, str(HERE / "trains_over_mpi.py"), backend],
            env=environ, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        _, found, told = ended.stdout.partition("LOSSES ")
        if not found:
            return [f"trains_over_mpi.py {backend}: {ended.stderr[-1500:]}"]
        losses[backend] = json.loads(told.partition("\n")[0])
    return [
        f"torch.distributed, {way}: losses {mine}, over Gloo {losses['gloo'][way]}"
        for way, mine in losses["unisono-mpi"].items()
        if any(abs(a - b) > 2e-6 for a, b in zip(mine, losses["gloo"][way], strict=True))
    ]


def suite(name: str) -> list[str]:
    """Which tests of PyTorch's own suite fail over a library of MPI; prints the counts."""
    command = [sys.executable, str(HERE / "suite_over_mpi.py"), name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    print(f"          PyTorch's suite over {ended.stdout.partition(chr(10))[0]}")
    return [] if ended.returncode == 0 else [ended.stdout + ended.stderr[-500:]]


def table() -> dict[str, dict[str, str]]:
    """The table of docs/backends.md: by backend, then by operation."""
    lines = PAGE.read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    start = next(number for number, row in enumerate(rows) if row[1:2] == ["native"])
    names = rows[start][1:]
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for row in rows[start + 2 :]:
        for name, cell in zip(names, row[1:], strict=False):
            found[name][row[0].replace("`", "")] = cell
    return found


if __name__ == "__main__":
    sys.exit(main())
