"""Random programs under random plans, beside one process: `program_fuzz.py --cases 10000 --seed 1`.

A program that trains otherwise (WRONG), or raises another library's error (RAW), is made as small as it
stays at fault, and printed as Python. At the end: how many were the same, what was refused, and how often
each operator was really cut. `--case SEED PLAN` prints and tries one.
"""

import argparse
import json
import math
import re
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import torch  # noqa: E402

import suite  # noqa: E402
from model_fuzz.programs import PLANS, Case, case_of, choices_of, program_of  # noqa: E402
from model_fuzz.random_training import training_of  # noqa: E402

CHUNK = 40
CASE_S = 120  # more than the limit of a collective
ATTEMPTS = 60


@dataclass
class Result:
    """What came of a case: a word of trials.py, or "hang"."""

    case: Case
    word: str
    text: str
    cuts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def fault(self) -> bool:
        return self.word in ("RAW", "WRONG", "hang")


class Trials:
    """Runs cases on forked ranks."""

    def __init__(self, folder: Path, forks: suite.Forks) -> None:
        self._forks, self._folder, self._jobs = forks, folder, 0

    def run(self, cases: list[Case]) -> list[Result]:
        """Run cases of one number of ranks, all of them, whatever becomes of one."""
        found: list[Result] = []
        while len(found) < len(cases):
            left = cases[len(found) :]
            found += self._some(left)
        return found

    def _some(self, cases: list[Case]) -> list[Result]:
        """Until one fails."""
        self._jobs += 1
        given = json.dumps([[case.seed, case.plan, case.dropped] for case in cases])
        name, ranks = f"trials{self._jobs}", PLANS[cases[0].plan][0]
        job = {name: ("model_fuzz.trials", ranks, [given])}
        printed = self._forks.run(self._folder, job, limit_s=CASE_S + 20 * len(cases), grace_s=5)[name]
        lines = [json.loads(line) for line in printed[0].splitlines() if line.startswith("[")]
        found = [Result(case, *line[3:]) for case, line in zip(cases, lines, strict=False)]
        if len(found) < len(cases) and not (found and found[-1].fault):
            tails = "\n".join(text[-700:] for text in printed)
            found.append(Result(cases[len(found)], "hang", tails))
        return found


def smallest(trials: Trials, result: Result) -> Result:
    """Leave out one operator after the other, the last ones first, while the program stays at fault."""
    attempts, change = 0, True
    while change and attempts < ATTEMPTS:
        change = False
        for place in reversed(range(len(choices_of(result.case.seed)))):
            dropped = result.case.dropped
            if place in dropped or attempts >= ATTEMPTS:
                continue
            case = Case(result.case.seed, result.case.plan, tuple(sorted((*dropped, place))))
            attempts += 1
            (found,) = trials.run([case])
            if found.fault:
                result, change = found, True
    return result


def shown(result: Result) -> str:
    """A case as text: what came of it, and its program."""
    program = program_of(result.case)
    case = result.case
    again = f"--case {case.seed} {case.plan!r}" + (
        f" --drop {' '.join(map(str, case.dropped))}" if case.dropped else ""
    )
    training = None if program is None else training_of(program, case.seed)
    source, said = (program and program.source) or "", "" if training is None else training.said()
    return f"{result.word}: {result.text}\n{again}\n{said}\n{source}"


def table(results: list[Result], seconds: float) -> str:
    """How many of each word, under each plan; what was refused; what was cut."""
    words = ("same", "refused", "RAW", "WRONG", "hang", "none")
    lines = [
        f"{len(results)} cases in {seconds:.0f} s",
        f"{'plan':18}" + "".join(f"{word:>9}" for word in (*words, "cut")),
    ]
    for plan in (*PLANS, "all"):
        here = [each for each in results if plan in ("all", each.case.plan)]
        counts = Counter(each.word for each in here)
        cut = sum(bool(each.cuts) for each in here)
        lines.append(f"{plan:18}" + "".join(f"{counts[word]:9}" for word in words) + f"{cut:9}")
    cuts, programs = Counter[str](), Counter[str]()
    for each in results:
        cuts.update(each.cuts)
        programs.update(dict.fromkeys(each.cuts, 1))
    lines.append("operators that were cut: times, in programs")
    lines += [f"  {name:40}{count:7}{programs[name]:7}" for name, count in cuts.most_common()]
    lines.append("refused")
    why = Counter(
        re.sub(r'"[^"]*"|<program.*|\d+', "*", each.text)[:150] for each in results if each.word == "refused"
    )
    lines += [f"  {count:5}  {text}" for text, count in why.most_common(40)]
    slow = sorted(results, key=lambda each: -each.seconds)[:5]
    lines += [
        "slowest",
        *(f"  {each.seconds:5.1f} s  --case {each.case.seed} {each.case.plan!r}" for each in slow),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="of the first case; the others follow")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--case", nargs=2, metavar=("SEED", "PLAN"))
    parser.add_argument("--drop", nargs="*", type=int, default=[])
    parser.add_argument("--jobs", type=int, default=1, help="at a time, each with ranks of its own")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after them")
    parser.add_argument("--whole", action="store_true", help="do not make failing programs smaller")
    given = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory(prefix="unisono-program-fuzz-") as name:
        if not given.case:
            return searched(given, Path(name))
        forks = suite.Forks()
        trials = Trials(Path(name), forks)
        try:
            (found,) = trials.run([Case(int(given.case[0]), given.case[1], tuple(given.drop))])
        finally:
            forks.close()
        print(shown(found))
        return int(found.fault)


def searched(given: argparse.Namespace, folder: Path) -> int:
    """Try all cases, several jobs at a time; print faults when they are found, and the table at the end."""
    start, results = time.monotonic(), list[Result]()
    plans = tuple(given.plans.split(","))
    cases = [case_of(seed, plans) for seed in range(given.seed, given.seed + given.cases)]
    chunks: list[list[Case]] = []
    for first in range(0, len(cases), 4 * CHUNK):
        for ranks in (2, 3, 4):
            mine = [case for case in cases[first : first + 4 * CHUNK] if PLANS[case.plan][0] == ranks]
            chunks += [mine[at : at + CHUNK] for at in range(0, len(mine), CHUNK)]

    def work(place: int) -> None:
        mine = folder / str(place)
        mine.mkdir()
        forks = suite.Forks()
        trials = Trials(mine, forks)
        try:
            while chunks and time.monotonic() - start < 60 * given.minutes:
                found = trials.run(chunks.pop(0))
                results.extend(found)
                for each in found:
                    if each.fault:
                        print(shown(each if given.whole else smallest(trials, each)), flush=True)
                print(f"{len(results)} cases, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        finally:
            forks.close()

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(work, range(given.jobs)))
    print(table(results, time.monotonic() - start))
    return int(any(each.fault for each in results))


if __name__ == "__main__":
    sys.exit(main())
