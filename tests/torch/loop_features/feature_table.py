"""The table of docs/features.md: what came of each feature under each plan, beside one process.

    python tests/torch/loop_features/feature_table.py > docs/features.md     # ten minutes
    python tests/torch/loop_features/feature_table.py zero3,tensor --features resuming,averages
    python tests/torch/loop_features/feature_table.py --kept cells.txt   # the page of printed cells

With names of plans it prints cells. Exits with 1 if a cell is WRONG or RAW.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(TESTS / "support"), str(TESTS / "torch")]

import suite  # noqa: E402
from loop_features.feature_cells import PLANS, Cell  # noqa: E402
from loop_features.features import FEATURES  # noqa: E402

PAGE = TESTS.parent / "docs" / "features.md"
SIGNS = {"same": "=", "lossy": "~"}
FAILED = ("WRONG", "RAW")
NOT_RUN = "?"
LIMIT_S = 3000
HEAD = """# Features under plans

Each feature of a training loop, written once with the words of [parallel.md](parallel.md) and once in
plain PyTorch for one process, and tried under each plan. `make test-parallel` compares every cell
(`tests/torch/test_parallel_loops.py`);
`python tests/torch/loop_features/feature_table.py > docs/features.md` writes this page.

- `=`: losses, norms, weights, outputs are those of one process, to 1e-5.
- `~`: likewise, to 5e-2: low precision rounds.
- a number: an error of Unisono's, before the step, on all ranks: [below](#what-is-refused).
- `?`: not run when this page was written.
"""


def cells(forks: suite.Forks, title: str, features: Iterable[str] = ()) -> list[Cell]:
    """Try features under a plan; all without names."""
    with tempfile.TemporaryDirectory() as folder:
        job = ("loop_features.feature_cells", PLANS[title].ranks, [title, ",".join(features)])
        printed = forks.run(Path(folder), {"job": job}, LIMIT_S)["job"]
    found = cells_in(printed[0])
    lost = {*(features or FEATURES)} - {cell.feature for cell in found}
    return found + [Cell(name, title, "RAW", f"the job ended: {printed}", 0.0) for name in sorted(lost)]


def cells_in(text: str) -> list[Cell]:
    """The cells that a rank printed, among other lines."""
    return [Cell(*json.loads(line)) for line in text.splitlines() if line.startswith('["')]


def note(cell: Cell) -> str:
    """The first sentence of an error, without its kind and its numbers."""
    text = re.sub(r"^\w+: (Plan: )?", "", cell.text).split("\n")[0]
    return re.split(r"[.;] ", text)[0].rstrip(".").replace("|", "\\|")


def page(found: list[Cell]) -> str:
    """The page of all cells."""
    by_place = {(cell.feature, cell.plan): cell for cell in found}
    notes: dict[str, int] = {}
    rows = []
    for name, feature in FEATURES.items():
        signs = [sign(by_place.get((name, title)), notes) for title in PLANS]
        rows.append(f"| {feature.__doc__} | {' | '.join(signs)} |")
    legend = [f"- {title}: `{str(plan)[5:-1]}`" for title, plan in PLANS.items()]
    heads = f"| feature | {' | '.join(PLANS)} |\n|---|{'---|' * len(PLANS)}"
    refused = [f"{number}. {text}" for text, number in notes.items()]
    return "\n".join(
        [HEAD, "The plans:\n", *legend, "", heads, *rows, "\n## What is refused\n", *refused, ""]
    )


def sign(cell: Cell | None, notes: dict[str, int]) -> str:
    if cell is None:
        return NOT_RUN
    if cell.word == "refused":
        return str(notes.setdefault(note(cell), len(notes) + 1))
    return SIGNS.get(cell.word, cell.word)


def written() -> dict[tuple[str, str], str]:
    """(feature, plan) -> its sign on the page, or the note that it refers to."""
    text = PAGE.read_text()
    notes = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    rows = {row[0]: row[1:] for line in text.splitlines() if (row := line.strip("| ").split(" | "))[1:]}
    return {
        (name, title): notes.get(one, one)
        for name, feature in FEATURES.items()
        for title, one in zip(PLANS, rows.get(feature.__doc__ or "", ()), strict=False)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plans", nargs="?", default="", help="names of plans, with commas between")
    parser.add_argument("--features", default="", help="names of features, with commas between")
    parser.add_argument("--kept", type=Path, help="run nothing: a file of cells")
    given = parser.parse_args()
    if given.kept is not None:
        print(page(cells_in(given.kept.read_text())), end="")
        return 0
    forks, found = suite.Forks(), []
    for title in given.plans.split(",") if given.plans else PLANS:
        new = cells(forks, title, given.features.split(",") if given.features else ())
        found += new
        for cell in new if given.plans else [cell for cell in new if cell.word in FAILED]:
            print(json.dumps(cell), file=sys.stdout if given.plans else sys.stderr, flush=True)
    forks.close()
    if not given.plans:
        print(page(found), end="")
    return int(any(cell.word in FAILED for cell in found))


if __name__ == "__main__":
    sys.exit(main())
