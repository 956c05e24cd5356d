"""The census of the zoo as a table: what came of each model under each plan. `make test-zoo` runs it.

Cells that the same sources have made are taken from .cache/zoo. Exits with 1 if a cell is WRONG or RAW, or if
fewer than 90 % of the cells that apply trained.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "torch")]

import unisono.parallel as up  # noqa: E402
from suite import Forks  # noqa: E402
from zoo.animals import ANIMALS  # noqa: E402
from zoo.cells import ROOT, TRAINED, Cell, CellFile  # noqa: E402
from zoo.census_plans import GPU_PLANS, PLANS, not_applicable  # noqa: E402

SHARE = 0.9
GPUS = 4
LIMIT_S = 1800
NOT_RUN = "not run"
SIGNS = {"same": "=", "lossy": "~", "refused": "-", "WRONG": "W", "RAW": "R", NOT_RUN: "?", "": "."}


def on_cpus(forks: Forks, animal: str, titles: list[str]) -> Iterator[str]:
    """Train an animal by plans on processes; yield what rank 0 prints."""
    for size in sorted({PLANS[title].ranks for title in titles}):
        wanted = ",".join(title for title in titles if PLANS[title].ranks == size)
        with tempfile.TemporaryDirectory() as folder:
            printed = forks.run(Path(folder), {"job": ("zoo.census", size, [animal, wanted])}, LIMIT_S)
        yield from printed["job"][0].splitlines()


def on_gpus(animal: str, titles: list[str]) -> Iterator[str]:
    """Likewise on virtual GPUs."""
    launcher = [sys.executable, "-m", "unisono", "run", "--virtual-gpus", str(GPUS)]
    program = [str(Path(__file__).with_name("census.py")), animal, ",".join(titles)]
    ended = subprocess.run(
        [*launcher, *program], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    yield from ended.stdout.splitlines()
    if ended.returncode:
        print(ended.stdout[-2000:], ended.stderr[-2000:], file=sys.stderr)


def row(
    animal: str, plans: dict[str, up.Plan], gpu: bool, forks: Forks | None, file: CellFile
) -> dict[str, Cell | None]:
    """The cells of a model; None where a plan does not apply. forks: None: run nothing."""
    where = "gpu" if gpu else "cpu"
    applying = [title for title, plan in plans.items() if not not_applicable(animal, plan)]
    missing = [title for title in applying if file.get(animal, title, where) is None]
    if missing and forks is not None:
        lines = on_gpus(animal, missing) if gpu else on_cpus(forks, animal, missing)
        made = [cell for line in lines if (cell := Cell.of(line)) is not None]
        file.add(made)
        lost = {*missing} - {cell.plan for cell in made}
        file.add(
            Cell(animal, title, "RAW", "the job ended", 0.0, where) for title in missing if title in lost
        )
    left = {title: Cell(animal, title, NOT_RUN, "", 0.0, where) for title in applying}
    return {title: file.get(animal, title, where) or left.get(title) for title in plans}


def heads(plans: dict[str, up.Plan]) -> str:
    """The plan of each column, and the numbers of columns."""
    legend = [f"{number:2} {title}: {plan}" for number, (title, plan) in enumerate(plans.items(), 1)]
    numbers = "".join(f"{number:3}" for number in range(1, len(plans) + 1))
    return "\n".join([*legend, f"{'':18}{numbers}  cut by tensor"])


def text_of(animal: str, cells: dict[str, Cell | None]) -> str:
    signs = "".join(f"{SIGNS[cell.word if cell else '']:>3}" for cell in cells.values())
    shares = [cell.text.partition(", cut ")[2] for cell in cells.values() if cell]
    return f"{animal:18}{signs}  {next(filter(None, shares), '')}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("animals", nargs="*", help="models; all without this argument")
    parser.add_argument("--plans", help="names of plans, with commas between")
    parser.add_argument("--virtual-gpus", action="store_true", help="on 4 virtual GPUs, by plans of 4 ranks")
    parser.add_argument("--older", action="store_true", help="take cells that trained by other sources, too")
    parser.add_argument("--kept", action="store_true", help="run nothing: the newest cells of any sources")
    given = parser.parse_args()
    every = GPU_PLANS if given.virtual_gpus else PLANS
    plans = {title: every[title] for title in given.plans.split(",")} if given.plans else every
    words, failed, forks = Counter[str](), list[Cell](), None if given.kept else Forks()
    file = CellFile(ROOT / ".cache" / "zoo" / "cells.jsonl", older=given.older, every=given.kept)
    print(heads(plans), flush=True)
    for animal in given.animals or ANIMALS:
        cells = row(animal, plans, given.virtual_gpus, forks, file)
        words.update(cell.word if cell else "" for cell in cells.values())
        failed += [cell for cell in cells.values() if cell and cell.word not in (*TRAINED, NOT_RUN)]
        print(text_of(animal, cells), flush=True)
    if forks is not None:
        forks.close()
    print("= same, ~ within the precision, - refused, . does not apply, ? not run")
    print("W wrong, R another library's error")
    for cell in failed:
        print(f"{cell.word}: {cell.animal}, {cell.plan}: {cell.text}".replace("\n", " "))
    for reason, count in Counter(
        reason for animal in given.animals or ANIMALS for plan in plans.values()
        if (reason := not_applicable(animal, plan))
    ).items():  # fmt: skip
        print(f"{count} cells do not apply: the model {reason}")
    applying, trained = words.total() - words[""] - words[NOT_RUN], sum(words[word] for word in TRAINED)
    counts = ", ".join(f"{words[word]} {word}" for word in SIGNS if word and words[word])
    share = f"{trained} trained, {trained / max(applying, 1):.0%}"
    print(f"{words.total()} cells, {applying + words[NOT_RUN]} apply: {counts}; {share}")
    return int(words["WRONG"] + words["RAW"] > 0 or trained < SHARE * applying)


if __name__ == "__main__":
    sys.exit(main())
