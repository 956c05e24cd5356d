"""Programs per rank that differ in one thing: nobody may get wrong data, hang, or hear a foreign error.

    mismatches.py --seed 5 --cases 10000      so many cases; the figures, and every case that fails
    mismatches.py --seed 5 --case 17          that one alone

Ranks are threads, on one host or as if on several (over TCP). Cases run in a process of their own, so that a
crash or a hang ends that one only, and is a verdict like the others.
"""

import argparse
import os
import random
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import mismatch_programs
from mismatch_calls import MESSAGE, Call, Turn, expected, same
from mismatch_programs import ENDED, EQUAL, TOLD, Case

import ranks
import unisono as un

PATIENCE_S = 600.0  # of a group: nothing here takes so long
BRIEF_S = 0.5  # ... where only the clock can tell
HANG_S = PATIENCE_S + 30.0
HUNG = 3
VERDICTS = ("silent", "wrong", "hang", "crash", "foreign", "other error")


@dataclass
class Told:
    """What came of one rank's program: the calls that returned, and what ended it."""

    returned: list[Turn] = field(default_factory=list)
    error: BaseException | None = None
    trace: str = ""


def run(case: Case) -> list[str]:
    """Run a case; what is wrong with it, each beginning with one of VERDICTS."""
    os.environ["UNISONO_RANKS_PER_HOST"] = str(case.per_host)
    groups = ranks.groups(case.size, timeout_s=PATIENCE_S, per_host=case.per_host)
    for group in groups:
        group.timeout_s = BRIEF_S if case.verdict == ENDED else PATIENCE_S
    told = [Told() for _ in groups]
    threads = [
        threading.Thread(target=_rank, args=(group, case.programs[rank], case.size, told[rank]), daemon=True)
        for rank, group in enumerate(groups)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + HANG_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        return [f"hang: ranks {[rank for rank, thread in enumerate(threads) if thread.is_alive()]}"]
    return [found for rank in range(case.size) for found in _judge(case, rank, told[rank])]


def _rank(group: un.Group, calls: tuple[Call, ...], size: int, told: Told) -> None:
    try:
        with group:
            queued: list[Turn] = []
            for call in calls:
                if call is calls[-1]:
                    _wait(queued, told)
                turn = Turn(group, call, group.rank, size)
                turn.make()
                (queued if turn.works else told.returned).append(turn)
    except BaseException as error:
        told.error, told.trace = error, traceback.format_exc()


def _wait(queued: list[Turn], told: Told) -> None:
    while queued:
        for work in queued[0].works:
            work.wait()
        told.returned.append(queued.pop(0))


def _judge(case: Case, rank: int, told: Told) -> list[str]:
    """What is wrong with what a rank was told, or was not."""
    who = f"rank {rank}"
    if told.error is not None and not isinstance(told.error, un.UnisonoError):
        return [f"foreign: {who}: {told.trace}"]
    found = []
    for turn in told.returned:
        if case.verdict != EQUAL and _could_not_return(case, rank, turn.call):
            found.append(f"wrong: {who} returned from {turn.call}")
        elif not same(turn.outputs, expected(turn.call, rank, case.size)):
            found.append(f"wrong: {who} got {turn.outputs} from {turn.call}")
    if case.verdict == EQUAL and told.error is not None:
        found.append(f"other error: {who}: {told.trace}")
    if case.verdict != EQUAL and told.error is None:
        found.append(f"silent: {who} ended well")
    if case.verdict == TOLD and told.error is not None and not isinstance(told.error, un.Mismatch):
        found.append(f"other error: {who}: {told.trace}")
    return found


def _could_not_return(case: Case, rank: int, call: Call) -> bool:
    """Whether a call needs a rank that has called something else in its place."""
    usual, other = case.programs[case.odd - 1], case.programs[case.odd]
    if call.kind == MESSAGE:
        return rank == call.peer and not (call in usual and call in other)
    if call in case.agreed or (case.ragged and call in usual and call in other):
        return False
    needed = call.needs(rank, case.size)
    return bool(needed - {case.odd}) if rank == case.odd else case.odd in needed


def nth(seed: int, number: int) -> Case:
    """A case by its seed and number."""
    return mismatch_programs.draw(random.Random(f"{seed}/{number}"))


def smaller(case: Case) -> Case:
    """The same case without the calls that it fails without, too."""
    for number in sorted({call.number for calls in case.programs for call in calls}):
        fewer = mismatch_programs.without(case, number)
        if all(fewer.programs) and len(set(fewer.programs)) > 1 and run(fewer):
            case = fewer
    return case


def shown(case: Case) -> str:
    """A case as a program to read."""
    lines = [
        f"  {case.size} ranks, {case.per_host or 'all'} per host, rank {case.odd} differs in {case.change}"
    ]
    for rank in sorted({case.odd, case.odd - 1 if case.odd else 1}):
        lines.append(f"  rank {rank}{'' if rank == case.odd else ' and the others'}:")
        lines += [f"    {call}" for call in case.programs[rank]]
    return "\n".join([*lines, f"  expected: {case.verdict}"])


def work(seed: int, first: int, cases: int) -> None:
    """Run cases in this process; a line on standard output before each, and for each that fails."""
    for number in range(first, first + cases):
        print(f"case {number}", flush=True)
        case = nth(seed, number)
        found = run(case)
        if found:
            print(f"failed {found[0].partition(':')[0]}", flush=True)
            print(
                f"case {number} of seed {seed}\n{shown(case)}",
                *found,
                sep="\n  ",
                file=sys.stderr,
                flush=True,
            )
        if found and found[0].startswith("hang"):
            os._exit(HUNG)  # its threads would not end


def survey(seed: int, cases: int, workers: int) -> Counter[str]:
    """Run cases in several processes; how often each verdict came."""
    edges = [cases * part // workers for part in range(workers + 1)]
    with ThreadPoolExecutor(workers) as pool:
        return sum(pool.map(partial(survey_part, seed), edges, edges[1:]), Counter())


def survey_part(seed: int, next_case: int, end: int) -> Counter[str]:
    """Run the cases before `end` in a process that is replaced when it dies."""
    verdicts: Counter[str] = Counter()
    while next_case < end:
        command = [
            sys.executable,
            __file__,
            "--seed",
            str(seed),
            "--work",
            str(next_case),
            str(end - next_case),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                word, _, rest = line.strip().partition(" ")
                if word == "case":
                    next_case = int(rest) + 1
                elif word == "failed":
                    verdicts[rest] += 1
        if worker.returncode == 0:
            break
        if worker.returncode != HUNG:
            verdicts["crash"] += 1
            print(
                f"case {next_case - 1} of seed {seed} ended its process with {worker.returncode}",
                file=sys.stderr,
            )
            print(shown(nth(seed, next_case - 1)), file=sys.stderr)
    return verdicts


def main() -> int:
    """Read the command line, run, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument(
        "--workers", type=int, default=4, help="processes at a time: most cases wait most of the time"
    )
    parser.add_argument("--case", type=int, help="this one alone, made smaller if it fails")
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.seed, *given.work)
        return 0
    if given.case is not None:
        case = nth(given.seed, given.case)
        print(shown(case), *(run(case) or ["as expected"]), sep="\n")
        if run(case):
            print("smaller:", shown(smaller(case)), sep="\n")
        return 0
    started = time.monotonic()
    verdicts = survey(given.seed, given.cases, given.workers)
    figures = ", ".join(f"{verdicts[name]} {name}" for name in VERDICTS)
    print(f"seed {given.seed}: {given.cases} cases in {time.monotonic() - started:.0f} s: {figures}")
    return 1 if verdicts.total() else 0


if __name__ == "__main__":
    sys.exit(main())
