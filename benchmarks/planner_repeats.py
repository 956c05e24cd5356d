"""How well this machine repeats itself: the same steps in two records of `planner.py machine`.

    python benchmarks/planner_repeats.py FIRST SECOND

For each layout: how far the same plan of the same model is from itself, as a median; and how many models
would have a plan within 5 % of the best, if the first record chose by its measurements and the second one
judged. No forecast can do better than that.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

from planner_machine import recorded

Steps = dict[tuple[str, str], dict[str, float]]
"""(layout, model) -> plan -> seconds of a step."""


def steps(record: Path) -> Steps:
    """All measured steps of a record."""
    found: Steps = defaultdict(dict)
    for job, rows in recorded(record).items():
        for row in rows if job.what == "seconds" else ():
            if not row.problem:
                found[row.layout, row.model][row.plan] = row.measured
    return found


def compare(first: Steps, second: Steps) -> None:
    """A line for each layout."""
    for layout in dict.fromkeys(layout for layout, _ in first):
        away, lost = [], []
        for key in (key for key in first if key[0] == layout and key in second):
            before, after = first[key], second[key]
            both = [plan for plan in before if plan in after]
            if not both:
                continue
            away += [abs(before[plan] / after[plan] - 1) for plan in both]
            chosen = min(both, key=lambda plan: before[plan])
            lost.append(after[chosen] / min(after.values()) - 1)
        if lost:
            within = sum(each <= 0.05 for each in lost)
            print(f"{layout:4} {len(away)} steps, median {statistics.median(away):.1%} from themselves")
            print(f"     chosen by the first: {within} of {len(lost)} within 5 %, worst {max(lost):.1%}")


if __name__ == "__main__":
    files = [Path(word) for word in sys.argv[1:]]
    if len(files) != 2 or not all(file.is_file() for file in files):
        sys.exit("usage: python benchmarks/planner_repeats.py FIRST SECOND: two records that exist")
    compare(*map(steps, files))
