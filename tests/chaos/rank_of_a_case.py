"""One rank of one case: makes the calls of the case, follows its group, and reports what it has seen.

Phases, which the controller reads from a shared file, one byte for each process: see PHASES.
"""

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from operations_of_ranks import WrongValue, call

import unisono as un

PHASES = ("nothing", "start", "calls", "shrink", "admit", "close", "over")
AFTER = 6  # calls in each group that follows
MOST_SHRINKS = 8
TELLS = (un.PeerLost, un.Timeout, un.Aborted)


class Rank:
    """One process of a case. number: of the process; newcomers have the last ones."""

    def __init__(self, case: dict[str, Any], number: int) -> None:
        self.case = case
        self.number = number
        self.folder = Path(case["folder"])
        self.has_admitted = False
        self.victim = number in case["victims"]
        self.facts: dict[str, Any] = {"number": number, "faults": [], "groups": []}
        with open(self.folder / "phases", "r+b") as file:
            self.phases = mmap.mmap(file.fileno(), 0)

    def enter(self, phase: str) -> None:
        self.phases[self.number] = PHASES.index(phase)

    def run(self) -> None:
        """The whole life of the process."""
        code = 1
        try:
            self.live()
            code = 0
        except WrongValue as error:
            self.facts["wrong"] = str(error)
        except BaseException as error:
            self.facts["ended_by"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        self.facts["ended_at"] = time.monotonic()
        path = self.folder / f"facts{self.number}"
        path.with_suffix(".new").write_text(json.dumps(self.facts))
        path.with_suffix(".new").rename(path)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def live(self) -> None:
        case = self.case
        self.enter("start")
        if self.number >= case["size"]:
            place = self.folder / "address"
            while not place.exists():
                time.sleep(0.002)
            self.enter("admit")
            group = un.join(place.read_text().split(","), timeout=case["join_timeout_s"])
            self.has_admitted = True
            self.enter("calls")
            self.calls_until_the_end(group, AFTER)
            return
        if self.victim and case["kind"] == "raise" and case["phase"] == "start":
            raise ValueError("bad loss")
        if self.victim and case["kind"] == "slow" and case["phase"] == "start":
            time.sleep(case["slow_s"])
        group = un.init_process_group(
            rank=self.number, world_size=case["size"], timeout=case["start_timeout_s"],
            init_method=f"tcp://{case['master']}:{case['port']}",
        )  # fmt: skip
        group.timeout_s = case["timeout_s"]
        group.elastic = case["elastic"]
        if case["phase"] == "admit":
            self.listen(group)
        self.enter("calls")
        self.calls_until_the_end(group, case["calls"])

    def listen(self, group: un.Group) -> None:
        addresses = group.listen()
        if group.rank == 0:
            path = self.folder / "address"
            path.with_suffix(".new").write_text(",".join(addresses))
            path.with_suffix(".new").rename(path)

    def calls_until_the_end(self, group: un.Group, count: int) -> None:
        """Calls, and after each fault those of the next group."""
        shrinks = 0
        while True:
            try:
                with self.closing_by_an_error(group):
                    self.in_group(group, count)
                    following = self.admitted(group) if self.case["phase"] == "admit" else group
                    if following is not group:
                        group, count = following, AFTER
                        continue
                    self.enter("close")
                    self.before("close")
                    group.close()
                self.enter("over")
                self.facts["done"] = True
                return
            except un.Evicted as error:
                self.facts["evicted"] = error.why
                return
            except TELLS as error:
                self.note(error)
                if not self.case["elastic"]:
                    with contextlib.suppress(un.GroupError):
                        group.close()
                    return
            shrinks += 1
            if shrinks > MOST_SHRINKS:
                raise RuntimeError("too many shrinks")
            try:
                group = self.shrunk(group)
            except un.Evicted as error:
                self.facts["evicted"] = error.why
                return
            count = AFTER

    @contextlib.contextmanager
    def closing_by_an_error(self, group: un.Group) -> Any:
        """As `with group:` does for an exception of the program."""
        try:
            yield
        except ValueError:
            with group:
                raise

    def in_group(self, group: un.Group, count: int) -> None:
        self.facts["groups"].append([group.generation, group.size, group.rank])
        seed = f"{self.case['seed']} {group.generation}"
        for number in range(count):
            if number == self.case["step"] and group.generation == 0:
                self.before("calls")
            call(group, seed, number, self.case["most"])

    def before(self, phase: str) -> None:
        """The faults that a rank does to itself."""
        if not self.victim or self.case["phase"] != phase:
            return
        if self.case["kind"] == "raise":
            self.facts["struck_at"] = time.monotonic()
            raise ValueError("bad loss")
        if self.case["kind"] == "slow":
            self.facts["struck_at"] = time.monotonic()
            time.sleep(self.case["slow_s"])

    def admitted(self, group: un.Group) -> un.Group:
        """The group with the newcomer, when it has come; the same group, once it has or all have given up."""
        if any(group.all_gather_object(self.has_admitted)):
            return group
        self.enter("admit")
        self.before("admit")
        until = time.monotonic() + self.case["patience_s"]
        while True:
            try:
                following = group.admit(maximum=self.case["size"] + 1)
            except un.RendezvousError as error:
                following = group
                self.facts.setdefault("refused", []).append(str(error)[:300])
            if following is not group:
                self.has_admitted = True
                return following
            if group.all_reduce(float(time.monotonic() > until), un.MAX):  # all give up together
                return group
            time.sleep(0.002)

    def shrunk(self, group: un.Group) -> un.Group:
        self.enter("shrink")
        if self.victim and self.case["kind"] in ("raise", "slow"):
            self.before("shrink")
        began = time.monotonic()
        following = group.shrink(timeout=self.case["shrink_timeout_s"])
        self.facts["shrink_s"] = max(self.facts.get("shrink_s", 0.0), time.monotonic() - began)
        self.facts.setdefault("left", []).extend([[one.rank, one.pid, one.why] for one in following.left])
        return following

    def note(self, error: Exception) -> None:
        """What a fault has told."""
        named = [error.pid] if isinstance(error, un.PeerLost) else []
        missing = list(error.missing) if isinstance(error, un.Timeout) else []
        self.facts["faults"].append(
            {
                "kind": type(error).__name__,
                "at": time.monotonic(),
                "pids": named,
                "missing": missing,
                "text": str(error)[:300],
            }
        )


def begin(case: dict[str, Any], number: int) -> None:
    """In the forked process: run the rank; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    out = os.open(Path(case["folder"]) / f"output{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd in (1, 2):
        os.dup2(out, fd)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for name, value in case["environment"].items():
        os.environ[name] = value
    Rank(case, number).run()
