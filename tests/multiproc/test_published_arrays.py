"""Arrays between two jobs: NumPy is the oracle of cuts; no mixed versions; ranks that die or are stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from effort import HANG_S, cases, crossed, judge_time, times
from ports import reserved

PROGRAM = Path(__file__).resolve().parent / "programs" / "publish_ranks.py"
HOSTS = pytest.mark.parametrize("per_host", ["0", "1"])


class Jobs:
    """A job that publishes and others that take, in one folder."""

    def __init__(self, folder: Path, mode: str, per_host: str) -> None:
        self.folder, self.mode = folder, mode
        paths = os.pathsep.join([str(PROGRAM.parents[2] / "support"), *sys.path])
        self.environ = {**os.environ, "PYTHONPATH": paths, "UNISONO_RANKS_PER_HOST": per_host}
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, side: str, size: int) -> None:
        for rank in range(size):
            command = [sys.executable, str(PROGRAM), side, self.mode, str(rank), str(size), str(self.folder)]
            self.processes[f"{side}{rank}"] = subprocess.Popen(
                command, env=self.environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )

    def heard(self, name: str) -> str:
        until = time.monotonic() + HANG_S
        while not (self.folder / name).exists():
            dead = [one for one, it in self.processes.items() if (it.poll() or 0) > 0]
            assert time.monotonic() < until and not dead, (name, self.outputs() if dead else "")
            time.sleep(0.002)
        return (self.folder / name).read_text()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.processes[name].pid, number)

    def outputs(self) -> dict[str, str]:
        """What each process has printed, when all have ended."""
        try:
            return {name: it.communicate(timeout=HANG_S)[0].strip() for name, it in self.processes.items()}
        finally:
            for it in self.processes.values():
                it.kill()


@HOSTS
def test_random_cuts_on_both_sides_give_the_slices_of_numpy(tmp_path: Path, per_host: str) -> None:
    jobs = Jobs(tmp_path, "cuts", per_host)
    jobs.start("take", 2)
    jobs.start("publish", 3)
    assert set(jobs.outputs().values()) == {"equal"}


@HOSTS
def test_updates_during_transfers_mix_no_versions(tmp_path: Path, per_host: str) -> None:
    jobs = Jobs(tmp_path, "versions", per_host)
    jobs.start("publish", 2)
    jobs.start("take", 2)
    assert set(jobs.outputs().values()) == {"published", "one version each"}


@pytest.mark.parametrize(("per_host", "lost"), crossed(["0", "1"], ["publish0", "publish1"]))
def test_a_publisher_that_is_killed_is_named_at_once(tmp_path: Path, per_host: str, lost: str) -> None:
    jobs = Jobs(tmp_path, "losses", per_host)
    jobs.start("publish", 2)
    jobs.start("take", 1)
    jobs.heard("taken0")
    began = time.time()
    jobs.kill(lost)
    judge_time(float(jobs.heard("lost0")) - began, 1.0)
    found = jobs.outputs()
    assert found["take0"].startswith("lost rank")
    assert found[f"publish{1 - int(lost[-1])}"] == f"lost rank {lost[-1]}"


@HOSTS
def test_a_subscriber_that_is_killed_stops_nobody_but_its_own(tmp_path: Path, per_host: str) -> None:
    jobs = Jobs(tmp_path, "losses", per_host)
    jobs.start("publish", 2)
    jobs.start("take", 2)
    jobs.heard("taken0")
    jobs.heard("taken1")
    jobs.kill("take1")
    jobs.heard("lost0")
    later = Jobs(tmp_path / "later", "losses", per_host)  # another job takes from the same publisher
    later.folder.mkdir()
    (later.folder / "address").write_text(jobs.heard("address"))
    later.start("take", 1)
    first = int(later.heard("taken0"))
    while int(later.heard("taken0")) < first + 3:
        time.sleep(0.01)
    (later.folder / "enough").touch()
    assert later.outputs() == {"take0": "took"}
    (tmp_path / "enough").touch()
    found = jobs.outputs()
    assert found["take0"].startswith("lost rank")
    assert (found["publish0"], found["publish1"]) == ("published", "published")


@HOSTS
def test_a_stopped_subscriber_delays_no_update_for_long_and_then_gets_the_newest(
    tmp_path: Path, per_host: str
) -> None:
    jobs = Jobs(tmp_path, "losses", per_host)
    jobs.start("publish", 2)
    jobs.start("take", 1)
    other = Jobs(tmp_path / "other", "losses", per_host)
    other.folder.mkdir()
    (other.folder / "address").write_text(jobs.heard("address"))
    other.start("take", 1)
    for _ in range(times(usual=1, long=5)):
        stood = int(jobs.heard("taken0"))
        jobs.kill("take0", signal.SIGSTOP)
        while int(other.heard("taken0")) < stood + 5:  # the publisher goes on
            time.sleep(0.01)
        jobs.kill("take0", signal.SIGCONT)
        while int(jobs.heard("taken0")) < stood + 5:
            time.sleep(0.01)
    (other.folder / "enough").touch()
    assert other.outputs() == {"take0": "took"}
    (tmp_path / "enough").touch()
    found = jobs.outputs()
    assert (found["publish0"], found["publish1"]) == ("published", "published")
    assert found["take0"] in ("took", "lost rank 0", "lost rank 1")  # the publisher may end first


@pytest.mark.parametrize("tls", cases(["1"], long=[""]))
def test_the_example_of_two_jobs_of_the_launcher(tls: str) -> None:
    """One token for both; with another one a job gets an error that says so."""
    with reserved() as port:
        example = PROGRAM.parents[3] / "examples" / "publish.py"
        launch = [sys.executable, "-m", "unisono", "run", "-n", "2", str(example)]
        environ = {**os.environ, "UNISONO_TOKEN": "ab" * 32, "UNISONO_TLS": tls}
        options: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        serving = subprocess.Popen([*launch, "serve", f"127.0.0.1:{port}"], env=environ, **options)
        training = subprocess.Popen([*launch, "train", str(port)], env=environ, **options)
        stranger = {**environ, "UNISONO_TOKEN": "cd" * 32}
        refused = subprocess.run(
            [*launch, "serve", f"127.0.0.1:{port}"], env=stranger, **options, check=False
        )
        printed = serving.communicate(timeout=HANG_S)[0]
        assert training.communicate(timeout=HANG_S)[0].count("Error") == 0
    assert serving.returncode == training.returncode == 0, printed
    assert printed.count("the trainer has ended after version") == 2  # 21, if it was fast enough
    assert "AuthenticationError" in refused.stdout
