"""Random faults at random moments, in plain and in elastic groups; an oracle knows what every rank must see.

    python tests/chaos/faults.py --cases 10000 --seed 1 [--jobs 4] [--hosts] [--only CASE] [--record FILE]

Each case starts ranks, lets a fault happen to one of them (some to two) at a random moment of a phase, and
checks: every rank that lives ends in time (0 hangs), no call returns a wrong value, the right process is
named, the living ranks are in one group, and nothing is left behind. With `--hosts` (root) half of the ranks
are on a second host, in a network namespace, and links are cut. A case is drawn from its seed and number
alone: `--only` runs one again.
"""

import argparse
import collections
import contextlib
import json
import mmap
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from operations_of_ranks import SIZES  # noqa: E402
from rank_of_a_case import PHASES  # noqa: E402

import hosts  # noqa: E402
from effort import HANG_S  # noqa: E402

KINDS = ("kill", "stop", "raise", "slow", "cut")
NAMED_S = 0.25
"""Within this time 99 of 100 errors name the fault."""
FORWARD_S = 5.0
"""From a fault to the last error, shrink and call of every rank; more of it is reported as slow."""
Case = dict[str, Any]


class Agent:
    """The process that starts ranks on one host, see `agent_of_a_host`."""

    def __init__(self, host: hosts.Node | None) -> None:
        argv = [sys.executable, str(HERE / "agent_of_a_host.py")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            argv if host is None else host.command(argv),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def ask(self, **line: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def draw(seed: int, number: int, with_hosts: bool) -> Case:
    """A case, by its seed and number."""
    chance = random.Random(f"{seed} {number}")
    kind = chance.choice(KINDS if with_hosts else KINDS[:-1])
    elastic = chance.random() < 0.6
    size = chance.choice([2, 3, 4, 4, 5, 6])
    phases = ["start", *["calls"] * 5, "close", "close"]
    if elastic:
        phases += ["shrink"] * 3 + ["admit"] * 4
    phase = chance.choice(phases)
    if kind in ("raise", "slow") and phase == "shrink":
        phase = "calls"
    victims = [chance.randrange(size + (phase == "admit" and kind in ("kill", "stop")))]
    if phase == "shrink":  # the first one is killed in a call; the next one during the shrink after it
        size = max(size, 3)
        victims = chance.sample(range(size), 2)
    calls = chance.choice([6, 12, 25])
    return {
        "seed": f"{seed} {number}", "number": number, "kind": kind, "phase": phase, "size": size,
        "elastic": elastic, "victims": victims, "calls": calls, "step": chance.randrange(calls),
        "delay": chance.random() ** 2, "most": chance.choice([5000, SIZES[-1]]), "slow_s": 5.0,
        "timeout_s": 2.0 if kind == "slow" else 1.5 if kind == "stop" and not elastic else 12.0,
        "start_timeout_s": 3.0 if phase == "start" else 12.0, "shrink_timeout_s": 12.0,
        "join_timeout_s": 12.0, "patience_s": 4.0, "newcomers": int(phase == "admit"),
        "split": with_hosts, "port": 20000 + (number * 7) % 30000,
        "environment": {
            "UNISONO_PEER_TIMEOUT_S": "2", "UNISONO_CALIBRATION": "none",
            "UNISONO_RANKS_PER_HOST": "0" if with_hosts else chance.choice(["0"] * 3 + [str(-(-size // 2))]),
            "UNISONO_TOKEN": "ab" * 32,
        },
    }  # fmt: skip


DELAYS_S = {"start": 0.12, "calls": 0.15, "shrink": 0.03, "admit": 0.4, "close": 0.01}


class Run:
    """One case under way."""

    def __init__(self, case: Case, agents: list[Agent], network: hosts.Network | None) -> None:
        self.case = case
        self.agents = agents
        self.network = network
        self.folder = Path(case["folder"])
        total = case["size"] + case["newcomers"]
        (self.folder / "phases").write_bytes(bytes(max(64, total)))
        with open(self.folder / "phases", "r+b") as file:
            self.phases = mmap.mmap(file.fileno(), 0)
        half = -(-case["size"] // 2)
        self.home = {n: int(case["split"] and half <= n < case["size"]) for n in range(total)}
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.struck: dict[int, float] = {}
        self.wrong: list[str] = []

    def go(self) -> list[str]:
        """Run it; returns what went wrong."""
        case = self.case
        for place, agent in enumerate(self.agents):
            numbers = [n for n, home in self.home.items() if home == place]
            self.pids |= {int(n): pid for n, pid in agent.ask(case=case, numbers=numbers)["pids"].items()}
        try:
            self.strike()
            self.await_ends()
            facts = {n: self.facts(n) for n in self.pids}
            self.check(facts)
            self.measured = facts
        finally:
            if self.network is not None and case["kind"] == "cut":
                self.network[1].mend()
            self.phases.close()
        return self.wrong

    def facts(self, number: int) -> dict[str, Any]:
        path = self.folder / f"facts{number}"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    # ---- the fault -----------------------------------------------------------------------------------

    def strike(self) -> None:
        case = self.case
        if case["phase"] == "shrink":
            self.hit(
                case["victims"][0], "calls", "kill" if case["kind"] in ("raise", "slow") else case["kind"]
            )
            if case["kind"] != "cut":
                self.hit(case["victims"][1], "shrink", "kill")
        elif case["kind"] in ("kill", "stop", "cut"):
            self.hit(case["victims"][0], case["phase"], case["kind"])

    def hit(self, victim: int, phase: str, kind: str) -> None:
        """Wait until the victim is in the phase, and for a part of it; then strike."""
        wanted = PHASES.index(phase)
        until = time.monotonic() + HANG_S / 2
        while self.phases[victim] < wanted and time.monotonic() < until and not self.over(victim):
            time.sleep(0.0002)
        time.sleep(self.case["delay"] * DELAYS_S[phase])
        if self.over(victim):
            return
        self.struck[victim] = time.monotonic()
        if kind == "cut":
            assert self.network is not None
            self.network[1].cut()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[victim], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    def over(self, victim: int) -> bool:
        return self.phases[victim] == PHASES.index("over") or (self.folder / f"facts{victim}").exists()

    # ---- the end -------------------------------------------------------------------------------------

    def reap(self) -> int:
        left = 0
        for agent in self.agents:
            answer = agent.ask(reap=True)
            self.codes |= {int(n): code for n, code in answer["codes"].items()}
            left += answer["left"]
        return left

    def await_ends(self) -> None:
        """Wait for all ranks; those that were stopped continue when the others have ended."""
        stopped = set(self.struck) if self.case["kind"] == "stop" else set()
        stopped = {n for n in stopped if n == self.case["victims"][0]}
        until = time.monotonic() + HANG_S
        continued = False
        while self.reap() > 0:
            rest = set(self.pids) - set(self.codes)
            if not continued and rest <= stopped:
                for n in rest:
                    os.kill(self.pids[n], signal.SIGCONT)
                continued, until = True, time.monotonic() + HANG_S
            if time.monotonic() > until:
                self.hung(rest)
                return
            time.sleep(0.003)

    def hung(self, rest: set[int]) -> None:
        names = ", ".join(f"{n} in {PHASES[self.phases[n]]}" for n in sorted(rest))
        self.wrong.append(f"HANG: ranks {names}")
        for n in rest:
            os.kill(self.pids[n], signal.SIGCONT)
            os.kill(self.pids[n], signal.SIGUSR1)
        time.sleep(0.5)
        for n in rest:
            os.kill(self.pids[n], signal.SIGKILL)
        while self.reap() > 0:
            time.sleep(0.01)

    # ---- the oracle ----------------------------------------------------------------------------------

    def check(self, facts: dict[int, dict[str, Any]]) -> None:
        case = self.case
        hit = set(self.struck) | {n for n in case["victims"] if facts[n].get("struck_at")}
        if case["phase"] == "start" and case["kind"] in ("raise", "slow"):
            hit |= set(case["victims"])
        sides = self.sides(hit, facts)
        for n, mine in facts.items():
            if "wrong" in mine:
                self.wrong.append(f"WRONG VALUE on rank {n}: {mine['wrong']}")
            code = self.codes.get(n)
            if code is not None and code < 0 and code != -signal.SIGKILL:
                self.wrong.append(f"rank {n} was ended by signal {-code}")
            if n in hit or case["phase"] == "start":
                continue
            if "ended_by" in mine and not self.cannot_start(n, mine, hit):
                self.wrong.append(f"rank {n} ended by {mine['ended_by'][:400]}")
            if "evicted" in mine and n not in sides:
                self.wrong.append(f"rank {n} was evicted though it is well: {mine['evicted']}")
            if not mine and code != -signal.SIGKILL:
                self.wrong.append(f"rank {n} reported nothing, exit code {code}")
        self.check_names(facts, hit, sides)
        self.check_groups(facts, hit)

    def cannot_start(self, n: int, mine: dict[str, Any], hit: set[int]) -> bool:
        """Whether a rank has ended as it should: a newcomer that nobody took in, or one without a store."""
        if n >= self.case["size"]:
            return "RendezvousError" in mine["ended_by"]
        lost = "the store at" in mine["ended_by"] or "the store's server" in mine["ended_by"]
        return 0 in hit and not mine["groups"] and lost

    def sides(self, hit: set[int], facts: dict[int, dict[str, Any]]) -> set[int]:
        """The ranks that may be evicted: of a cut link those of either side.

        A rank that is alone on its host and stopped or late looks like a host behind a cut link. It is alone,
        too, once the others there have made all their calls and left.
        """
        case, per_host = self.case, int(self.case["environment"]["UNISONO_RANKS_PER_HOST"])
        left = {n for n, mine in facts.items() if mine.get("done") and not mine["faults"] and n not in hit}
        there = set(range(case["size"])) - left
        place = {n: n // per_host if per_host else self.home[n] for n in there}
        alone = any(list(place.values()).count(place.get(n)) <= len(hit) for n in hit if n in place)
        silent = case["kind"] in ("stop", "slow") and alone and len(set(place.values())) > 1
        cut = case["kind"] == "cut" or silent
        return set(self.pids) if cut and hit else hit

    def check_names(self, facts: dict[int, dict[str, Any]], hit: set[int], sides: set[int]) -> None:
        """The first error of each rank names a process that was hit, or one that has failed because of it."""
        pids = {self.pids[n] for n in hit | sides}
        # After an error a rank of a plain group closes it; then it has left for those that come later.
        pids |= {self.pids[n] for n, mine in facts.items() if mine.get("faults") and not self.case["elastic"]}
        if self.case["elastic"]:  # a rank that has made all its calls has left
            pids |= {self.pids[n] for n, mine in facts.items() if mine.get("done")}
        if 0 in hit:  # whoever still waits for its store has not begun
            pids |= {self.pids[n] for n in range(self.case["size"]) if not facts[n].get("groups")}
        if not hit:
            pids = set()
        for n, mine in facts.items():
            for fault in mine.get("faults", [])[:1]:
                if n in hit:
                    continue
                named = set(fault["pids"]) | {self.pids.get(each) for each in fault["missing"]}
                if not hit or (named and not named & pids):
                    self.wrong.append(f"rank {n} names {named}, hit were {sorted(pids)}: {fault['text']}")

    def check_groups(self, facts: dict[int, dict[str, Any]], hit: set[int]) -> None:
        """Ranks that ended well in one generation were in one group, each with its own number."""
        ends = collections.defaultdict(list)
        for n, mine in facts.items():
            if mine.get("done") and mine["groups"]:
                generation, size, rank = mine["groups"][-1]
                ends[generation].append((size, rank, n))
        for generation, members in ends.items():
            if len({size for size, _, _ in members}) > 1 or len({rank for _, rank, _ in members}) < len(
                members
            ):
                self.wrong.append(f"SPLIT in generation {generation}: (size, rank, process) {members}")
        if self.case["elastic"] and self.case["phase"] in ("calls", "shrink", "admit"):
            well = [n for n, mine in facts.items() if n not in hit and n < self.case["size"]]
            done = [n for n in well if facts[n].get("done")]
            if well and not done and not self.sides(hit, facts) > hit:
                self.wrong.append("no rank went on")


def naming_s(run: Run) -> list[float]:
    """Seconds from the fault to the first error of each other rank, where the kernel shows the fault."""
    case = run.case
    if case["phase"] not in ("calls", "close") or case["kind"] == "slow":
        return []
    if case["kind"] == "stop" and not case["elastic"]:
        return []
    struck = [*run.struck.values()]
    struck += [at for mine in run.measured.values() if (at := mine.get("struck_at"))]
    found = []
    for n, mine in run.measured.items():
        if n not in run.struck and n not in case["victims"] and mine.get("faults") and struck:
            found.append(max(0.0, mine["faults"][0]["at"] - min(struck)))
    return found


@contextlib.contextmanager
def agents(with_hosts: bool) -> Iterator[tuple[list[Agent], hosts.Network | None]]:
    """The agents of one host, or of two with a network between them."""
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(hosts.hosts(2)) if with_hosts else None
        places: list[hosts.Node | None] = [None] if network is None else [network[0], network[1]]
        made = [Agent(place) for place in places]
        for agent in made:
            stack.callback(agent.end)
        yield made, network


class Record:
    """What a run of many cases has shown."""

    def __init__(self) -> None:
        self.cases: collections.Counter[str] = collections.Counter()
        self.failed: list[tuple[Case, list[str]]] = []
        self.naming: dict[str, list[float]] = collections.defaultdict(list)
        self.shrinks: list[float] = []
        self.late: list[tuple[int, float]] = []
        self.slow: list[tuple[int, float]] = []

    def add(self, run: Run, wrong: list[str], took_s: float) -> None:
        case = run.case
        kind = "elastic" if case["elastic"] else "plain"
        self.cases[f"{kind} {case['phase']} {case['kind']}"] += 1
        if wrong:
            self.failed.append((case, wrong))
        facts = getattr(run, "measured", {})
        named = naming_s(run) if facts else []
        self.naming[f"{kind} {case['kind']}"] += named
        if max(named, default=0.0) > NAMED_S:
            self.late.append((case["number"], max(named)))
        self.shrinks += [mine["shrink_s"] for mine in facts.values() if "shrink_s" in mine]
        if took_s > FORWARD_S + case["timeout_s"] * (case["kind"] in ("slow", "stop")):
            self.slow.append((case["number"], took_s))

    def text(self, title: str) -> str:
        """The record, for benchmarks/results."""
        total = sum(self.cases.values())
        lines = [title, "", f"{total} cases, {len(self.failed)} with a finding"]
        for name, count in sorted(self.cases.items()):
            lines.append(f"  {name:28} {count:6}")
        lines += [
            "",
            "From the fault to the error of each other rank, ms:",
            f"  {'':16}{'of':>7}{'median':>9}{'p99':>9}{'worst':>9}",
        ]
        every = [value for values in self.naming.values() for value in values]
        for name, values in [*sorted(self.naming.items()), ("all", every)]:
            if values:
                lines.append(
                    f"  {name:16}{len(values):7}" + "".join(f"{1000 * v:9.1f}" for v in spread(values))
                )
        if self.shrinks:
            lines.append(
                f"  {'one shrink':16}{len(self.shrinks):7}"
                + "".join(f"{1000 * v:9.1f}" for v in spread(self.shrinks))
            )
        for what, cases in (
            (f"an error came later than {NAMED_S:g} s in", self.late),
            (f"longer than {FORWARD_S:g} s took", self.slow),
        ):
            worst = sorted(cases, key=lambda each: -each[1])[:10]
            listed = ", ".join(f"#{number} {seconds:.1f} s" for number, seconds in worst)
            lines += ["", f"{what} {len(cases)} cases: {listed}"] if cases else []
        for case, wrong in self.failed[:50]:
            lines += ["", f"#{case['number']} {describe(case)}", *(f"  {each}" for each in wrong)]
        return "\n".join(lines) + "\n"


def free_port() -> int:
    """A port of this host that nothing uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and worst."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]


def describe(case: Case) -> str:
    """A case in one line."""
    kind = "elastic" if case["elastic"] else "plain"
    return (
        f"{kind} {case['phase']} {case['kind']} size={case['size']} victims={case['victims']} "
        f"per_host={case['environment']['UNISONO_RANKS_PER_HOST']} step={case['step']}/{case['calls']} "
        f"delay={case['delay']:.3f}"
    )


class Series:
    """Cases one after the other, or several side by side. chosen: the command line."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen, self.began, self.record = chosen, time.monotonic(), Record()
        self.numbers = iter(range(chosen.cases) if chosen.only is None else [chosen.only])
        self.lock = threading.Lock()  # of the numbers, the record and the output
        self.done = 0

    def next_number(self) -> int | None:
        with self.lock:
            over = time.monotonic() - self.began > self.chosen.seconds
            return None if over else next(self.numbers, None)

    def play(self) -> None:
        """Run cases until there are no more."""
        with agents(self.chosen.hosts) as (made, network):
            flat: list[int] = []
            while (number := self.next_number()) is not None:
                self.play_case(draw(self.chosen.seed, number, self.chosen.hosts), made, network)
                flat.append(sum(agent.ask(reap=True)["descriptors"] for agent in made))
            if flat and flat[-1] > flat[0]:
                raise AssertionError(f"the agents had {flat[0]} descriptors, and now {flat[-1]}")

    def play_case(self, case: Case, made: list[Agent], network: hosts.Network | None) -> None:
        case["master"] = "127.0.0.1" if network is None else network[0].address
        if network is None:  # other runs, and other programs, are on this host
            case["port"] = free_port()
        case["folder"] = tempfile.mkdtemp(prefix="chaos")
        run, at = Run(case, made, network), time.monotonic()
        try:
            wrong = run.go()
        except Exception:  # of this kit: no worker ends silently
            wrong = [f"THE KIT FAILED: {traceback.format_exc()}"]
        took_s = time.monotonic() - at
        with self.lock:
            self.done += 1
            self.record.add(run, wrong, took_s)
            if wrong or self.chosen.verbose or self.chosen.only is not None:
                print(f"#{case['number']} {took_s:.2f} s {describe(case)}", *wrong, sep="\n  ")
            if wrong:
                print(f"  files: {case['folder']}")
            if self.done % 100 == 0:
                print(f"{self.done} cases, {time.monotonic() - self.began:.0f} s")
            sys.stdout.flush()
        if not wrong and self.chosen.only is None:
            shutil.rmtree(case["folder"])


def main() -> int:
    """Run the cases; 1 if one has a finding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", action="store_true", help="two hosts, in network namespaces")
    parser.add_argument(
        "--jobs", type=int, default=1, help="cases side by side: more of them, at higher load"
    )
    parser.add_argument("--only", type=int, help="run this case alone, and keep its files")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--record", help="write the record to this file")
    parser.add_argument("--verbose", action="store_true")
    chosen = parser.parse_args()
    if chosen.jobs < 1 or (chosen.hosts and chosen.jobs > 1):
        parser.error("--jobs is at least 1, and 1 with --hosts: there is one network")
    memory = set(os.listdir("/dev/shm"))
    series = Series(chosen)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for job in [pool.submit(series.play) for _ in range(chosen.jobs)]:
            job.result()
    left = {name for name in os.listdir("/dev/shm") if "unisono" in name} - memory
    where = "two hosts" if chosen.hosts else "one host"
    flags = " --hosts" if chosen.hosts else f" --jobs {chosen.jobs}" if chosen.jobs > 1 else ""
    title = (
        f"python tests/chaos/faults.py --cases {chosen.cases} --seed {chosen.seed}{flags}: "
        f"{where}, {os.cpu_count()} cores, {platform.machine()}, {time.monotonic() - series.began:.0f} s"
    )
    text = series.record.text(title)
    if left:
        text += f"\nleft in /dev/shm: {sorted(left)}\n"
    print(text, flush=True)
    if chosen.record:
        Path(chosen.record).write_text(text)
    return 1 if series.record.failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
