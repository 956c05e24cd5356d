"""The census of the zoo as a table: what came of each model under each plan. `make test-zoo` runs it.

Exits with 1 if a cell is WRONG or RAW, or if fewer than 90 % of the cells trained.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "torch")]

from suite import Forks  # noqa: E402
from zoo.animals import ANIMALS, WITH_EXPERTS  # noqa: E402
from zoo.census import PLANS  # noqa: E402

SHARE = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("animals", nargs="*", help="models; all without this argument")
    parser.add_argument("--plans", help="names of plans, with commas between")
    given = parser.parse_args()
    wanted = given.plans.split(",") if given.plans else list(PLANS)
    forks, words, failed = Forks(), Counter[str](), []
    print(f"{'':14}" + " ".join(f"{plan[:16]:>16}" for plan in wanted), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for animal in given.animals or ANIMALS:
            plans = [plan for plan in wanted if PLANS[plan].expert == 1 or animal in WITH_EXPERTS]
            if not plans:
                continue
            job = {animal: ("zoo.census", 2, [animal, ",".join(plans)])}
            printed = forks.run(Path(folder), job, limit_s=1200)[animal]
            cells = {
                line.split("\t")[1]: line.split("\t") for line in printed[0].splitlines() if "\t" in line
            }
            found = [cells.get(plan, [animal, plan, "RAW", "", "the job ended"]) for plan in plans]
            words.update(cell[2] for cell in found)
            failed += [cell for cell in found if cell[2] in ("refused", "WRONG", "RAW")]
            shares = [cell[4].partition(", cut ")[2] for cell in found]
            texts = [f"{cell[2]} {share}".strip() for cell, share in zip(found, shares, strict=True)]
            print(f"{animal:14}" + " ".join(f"{text:>16}" for text in texts), flush=True)
    forks.close()
    for cell in failed:
        print(f"{cell[2]}: {cell[0]}, {cell[1]}: {cell[4]}")
    trained = words["same"] + words["lossy"]
    print(f"{words.total()} cells: {dict(words)}; {trained / words.total():.0%} trained")
    return int(words["WRONG"] + words["RAW"] > 0 or trained < SHARE * words.total())


if __name__ == "__main__":
    sys.exit(main())
