"""Check the models of the protocol with Spin: each unchanged, and with each of its seeded mistakes.

check_models.py [MODEL ...]       without arguments: all; `make model` calls it

`// ranks 2 3 4` in a model: these numbers instead of 2 and 3. `// pan 4 OPTIONS`: options of the compiler of
its checker, with four ranks; `// pan OPTIONS` with any. -DBITSTATE: a search that may miss states.

Lines `// seed NAME: what is wrong` list the mistakes of a model. Spin gets the name as a macro, and has to
find an error. `ranks 3` after the name: only with three ranks. An unchanged model must have no error. Needs
`spin` and a C compiler, and installs nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

MODELS = Path(__file__).resolve().parent.parent / "model"
SEED = re.compile(r"^// seed (\w+)(?: ranks (\d))?: (.+)$", re.MULTILINE)
COUNTS = re.compile(r"^// ranks ([\d ]+)$", re.MULTILINE)
OPTIONS = re.compile(r"^// pan (?:(\d) )?(-.+)$", re.MULTILINE)
RANKS = (2, 3)
LIMIT_S = 600
DEPTH = 1_000_000  # steps of the longest run; a longer one would be an error of its own
MEMORY_MB = 2048
FOUND = {
    r"^pan:\d+: invalid end state": "deadlock",
    r"^pan:\d+: assertion violated": "assertion",
    r"max search depth too small": "too deep",
    r"reached -DMEMLIM": "too large",
}


class Case(NamedTuple):
    """One run of Spin."""

    model: Path
    ranks: int
    seed: str  # "": the unchanged model
    meaning: str


class Outcome(NamedTuple):
    """The error that Spin found; "": none."""

    found: str
    states: int
    seconds: float


def cases(model: Path) -> list[Case]:
    """The unchanged model, then with each seed, for 2 and 3 ranks."""
    text = model.read_text(encoding="utf-8")
    seeds = SEED.findall(text)
    counts = COUNTS.search(text)
    right = [Case(model, int(ranks), "", "") for ranks in (counts[1].split() if counts else RANKS)]
    wrong = [
        Case(model, ranks, name, meaning)
        for name, only, meaning in seeds
        for ranks in RANKS
        if only in ("", str(ranks))
    ]
    return right + wrong


def command(arguments: list[str], folder: Path) -> str:
    """Run a tool; returns its output. A failure is an error; pan reports in its output only."""
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0 and arguments[0] != "./pan":
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def run(case: Case) -> Outcome:
    """Generate, compile and run the checker of one case."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in (*MODELS.glob("*.pml"), *MODELS.glob("*.h")):
            shutil.copy(path, folder)
        seed = [f"-D{case.seed}"] if case.seed else []
        command(["spin", f"-DRANKS={case.ranks}", *seed, "-a", case.model.name], folder)
        limits = ["-DSAFETY", "-DNOFAIR", f"-DMEMLIM={MEMORY_MB}"]
        given = OPTIONS.findall(case.model.read_text(encoding="utf-8"))
        options = [one for ranks, line in given if ranks in ("", str(case.ranks)) for one in line.split()]
        command(["gcc", *(options or ["-O0"]), "-w", *limits, "-o", "pan", "pan.c"], folder)
        depth = f"-m{DEPTH // 100 if '-DBITSTATE' in options else DEPTH}"
        output = command(["./pan", depth, *(["-w30", "-Q5"] if "-DBITSTATE" in options else [])], folder)
    found = next((short for text, short in FOUND.items() if re.search(text, output, re.MULTILINE)), "")
    errors, states = re.search(r"errors: (\d+)", output), re.search(r"(\d+) states, stored", output)
    if errors is None or states is None:
        raise RuntimeError(f"{case.model.name} with {case.ranks} ranks: no result:\n{output}")
    if errors[1] != "0" and not found:
        found = "error"
    return Outcome(found, int(states[1]), time.monotonic() - started)


def is_expected(case: Case, outcome: Outcome) -> bool:
    """Whether the unchanged model has no error, or the seeded mistake was found."""
    return outcome.found in ("deadlock", "assertion") if case.seed else not outcome.found


def line(case: Case, outcome: Outcome) -> str:
    """One line of the table."""
    return (
        f"{case.model.stem:8} {case.ranks:5}  {case.seed or '-':24} {'error' if case.seed else 'none':9} "
        f"{outcome.found or 'none':10} {outcome.states:9} {outcome.seconds:5.1f}"
    )


def main(names: list[str]) -> int:
    """Print a line for each case. Exit code: 1 if one has an unexpected outcome."""
    for tool, package in (("spin", "spin"), ("gcc", "gcc")):
        if shutil.which(tool) is None:
            print(f"make model needs {tool}: apt install {package}", file=sys.stderr)
            return 2
    models = sorted(MODELS.glob("*.pml"))
    chosen = [model for model in models if not names or model.stem in names]
    if unknown := set(names) - {model.stem for model in models}:
        print(f"there is no model {', '.join(sorted(unknown))} in {MODELS}", file=sys.stderr)
        return 2
    planned = [case for model in chosen for case in cases(model)]
    wrong = 0
    print(
        f"{'model':8} {'ranks':5}  {'seeded mistake':24} {'expected':9} {'found':10} {'states':>9} {'s':>5}"
    )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for case, outcome in zip(planned, pool.map(run, planned), strict=True):
            good = is_expected(case, outcome)
            wrong += not good
            print(line(case, outcome) + ("" if good else "   <-- WRONG"), flush=True)
    print(f"{wrong} of them are wrong" if wrong else "all as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
