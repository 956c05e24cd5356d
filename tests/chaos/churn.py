"""An elastic job under faults: every few seconds a rank dies, stops, raises or is slow, and is replaced.

    python tests/chaos/churn.py --minutes 60 [--every 10] [--ranks 8] [--hosts] [--record FILE]

The job runs under `unisono run --elastic --respawn`. Each call has a known result. At the end: the job was
not without a step for long, no call had a wrong value, memory and descriptors did not grow. With `--hosts`
half of the ranks are on a second host, and links are cut and mended, too.
"""

import argparse
import contextlib
import itertools
import mmap
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from churned_program import RAISE, SLOW  # noqa: E402

import hosts  # noqa: E402

KINDS = ("kill", "stop", "raise", "slow")
CUT_S = 4.0
STILL_S = 5.0
"""The longest time without a step that is no finding."""


class Launched:
    """A launcher, and what it prints."""

    def __init__(self, argv: list[str], host: hosts.Node | None) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        environment["UNISONO_CALIBRATION"] = "none"
        self.process = subprocess.Popen(
            argv if host is None else host.command(argv), env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def wait(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code


class Churn:
    """One job, its faults, and what it has shown."""

    def __init__(self, folder: Path, ranks: int, seed: int, network: hosts.Network | None) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.network = network
        (folder / "faults").write_bytes(bytes(65))
        with open(folder / "faults", "r+b") as file:
            self.faults = mmap.mmap(file.fileno(), 0)
        self.struck: list[tuple[float, str]] = []
        run = [sys.executable, "-m", "unisono", "run", "--elastic", f"1:{ranks}", "--respawn", "10000"]
        program = [str(HERE / "churned_program.py"), str(folder), "5000"]
        self.jobs = []
        if network is None:
            self.jobs.append(Launched([*run, *program], None))
            return
        for node, host in enumerate(network):
            where = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", network[0].address]
            where += ["-n", str(ranks // 2), "--token-file", str(folder / "token")]
            self.jobs.append(Launched([*run, *where, *program], host))
            hosts.wait_until((folder / "token").exists)

    def living(self) -> dict[int, int]:
        """RANK of each living rank, by pid."""
        found = {}
        for path in self.folder.glob("log*"):
            pid = int(path.name[3:])
            with contextlib.suppress(OSError, StopIteration):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found[pid] = int(next(word[5:] for word in words if word.startswith(b"RANK=")))
        return found

    def has_ended(self) -> bool:
        """Whether a launcher has ended by itself."""
        return any(job.process.poll() is not None for job in self.jobs)

    def strike(self) -> None:
        """One fault."""
        living = self.living()
        if not living:
            return
        kind = self.chance.choice(KINDS if self.network is None else (*KINDS, "cut"))
        pid, slot = self.chance.choice(sorted(living.items()))
        self.struck.append((time.monotonic(), kind))
        if kind == "cut":
            assert self.network is not None
            self.network[1].cut()
            time.sleep(CUT_S)
            self.network[1].mend()
        elif kind in ("kill", "stop"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        else:
            self.faults[slot] = RAISE if kind == "raise" else SLOW

    def end(self) -> list[str]:
        """End the job; returns what is wrong."""
        self.faults[64] = 1
        wrong = []
        for job in self.jobs:
            try:
                code = job.wait(30)
            except subprocess.TimeoutExpired:
                wrong.append("the job does not end")
                job.process.kill()
                code = job.wait(10)
            text = "".join(job.lines)
            if code:
                wrong.append(f"exit code {code}: {text[-2000:]}")
            if "WrongValue" in text:
                wrong.append("a wrong value: " + text[text.index("WrongValue") :][:400])
        return wrong + self.gaps() + self.growth()

    def logs(self) -> dict[int, list[list[float]]]:
        """The lines of each process."""
        found = {}
        for path in self.folder.glob("log*"):
            rows = [[float(word) for word in line.split()] for line in path.read_text().splitlines()]
            found[int(path.name[3:])] = [row for row in rows if len(row) == 6]
        return found

    def gaps(self) -> list[str]:
        """The longest time in which no rank of the job made a step."""
        moments = sorted(row[0] for rows in self.logs().values() for row in rows)
        self.memory, self.descriptors = (0.0, 0.0), (0, 0)
        self.longest_s = max((b - a for a, b in itertools.pairwise(moments)), default=0.0)
        return [f"no step for {self.longest_s:.1f} s"] if self.longest_s > STILL_S else []

    def growth(self) -> list[str]:
        """Descriptors and memory of the process that lived longest, from its first tenth to its last."""
        rows = max(self.logs().values(), key=len, default=[])
        if not rows:
            return ["no rank has made a step"]
        early, late = rows[len(rows) // 10], rows[-1]
        self.memory = early[4], late[4]
        self.descriptors = int(early[5]), int(late[5])
        wrong = []
        if late[5] > early[5] + 24:
            wrong.append(f"descriptors grew from {early[5]:.0f} to {late[5]:.0f}")
        if late[4] > 1.3 * early[4] + (20 << 20):
            wrong.append(f"memory grew from {early[4] / 2**20:.0f} to {late[4] / 2**20:.0f} MiB")
        return wrong

    def lost(self) -> tuple[float, dict[str, float]]:
        """(seconds of all generations, seconds in which nothing was done, by the fault before).

        A generation that makes steps for 2 s shows how fast so many ranks are. What the others did is in
        seconds at the median of these rates.
        """
        rows = sorted(row for each in self.logs().values() for row in each)
        begins: dict[float, list[float]] = {}
        ends: dict[float, list[float]] = {}
        for row in rows:
            begins.setdefault(row[2], row)
            ends[row[2]] = row
        rates: dict[float, list[float]] = {}
        for generation, first in begins.items():
            last = ends[generation]
            if last[0] > first[0] + 2:
                rates.setdefault(first[3], []).append((last[1] - first[1]) / (last[0] - first[0]))
        whole, lost = 0.0, dict.fromkeys(("none", *KINDS, "cut"), 0.0)
        for now, then in itertools.pairwise(sorted(begins.values())):
            if now[3] not in rates:
                continue
            took = then[0] - now[0]
            before = [kind for at, kind in self.struck if at < then[0]]
            whole += took
            lost[before[-1] if before else "none"] += took - (then[1] - now[1]) / statistics.median(
                rates[now[3]]
            )
        return whole, lost

    def text(self, title: str, seconds: float, wrong: list[str]) -> str:
        """The record."""
        logs = self.logs()
        steps = max((row[1] for rows in logs.values() for row in rows), default=0)
        generations = max((row[2] for rows in logs.values() for row in rows), default=0)
        kinds = {kind: sum(each == kind for _, each in self.struck) for kind in (*KINDS, "cut")}
        struck = ", ".join(f"{n} {kind}" for kind, n in kinds.items() if n)
        memory = " -> ".join(f"{each / 2**20:.1f}" for each in self.memory)
        descriptors = " -> ".join(map(str, self.descriptors))
        rate = f"{steps:.0f} steps, {steps / seconds:.1f} per second"
        whole, lost = self.lost()
        work = 1 - sum(lost.values()) / whole if whole else 0.0
        timely = 1 - (sum(lost.values()) - lost["slow"]) / whole if whole else 0.0
        each = ", ".join(f"{kind} {lost[kind] / n:.2f} s" for kind, n in kinds.items() if n)
        lines = [
            title,
            "",
            f"{len(self.struck)} faults in {seconds:.0f} s: {struck}",
            f"{len(logs)} processes, {generations:.0f} generations, {rate}",
            f"throughput: {work:.1%} of what the living can give, {timely:.1%} but for waits for a late rank",
            f"lost by one fault and its replacement: {each}",
            f"longest time without a step: {self.longest_s:.2f} s",
            f"of the process that lived longest: {memory} MiB, {descriptors} descriptors",
            "nothing wrong" if not wrong else "WRONG:",
        ]
        return "\n".join(lines + wrong) + "\n"


def main() -> int:
    """Run the job; 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--every", type=float, default=10.0, metavar="S", help="seconds between two faults")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--record")
    parser.add_argument("--keep", action="store_true", help="print what the launchers said")
    chosen = parser.parse_args()
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(hosts.hosts(2)) if chosen.hosts else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="churn")))
        churn = Churn(folder, chosen.ranks, chosen.seed, network)
        began = time.monotonic()
        hosts.wait_until(lambda: len(churn.living()) >= chosen.ranks or churn.has_ended(), 120)
        while time.monotonic() < began + 60 * chosen.minutes and not churn.has_ended():
            time.sleep(chosen.every)
            churn.strike()
        time.sleep(3)
        if churn.has_ended():
            print("".join(line for job in churn.jobs for line in job.lines))
        wrong = churn.end()
        words = re.sub(r" --record \S+", "", " ".join(sys.argv[1:]))
        text = churn.text(
            f"python tests/chaos/churn.py {words}: {os.cpu_count()} cores", time.monotonic() - began, wrong
        )
        if chosen.keep:
            print("".join(line for job in churn.jobs for line in job.lines))
    print(text)
    if chosen.record:
        Path(chosen.record).write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
