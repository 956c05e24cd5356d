"""Ranks as processes: launchers' environments, kills, interrupts, and torchrun itself."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import ranks
import unisono as un
from effort import HANG_S, cases, crossed, judge_time, times
from python_runs import fine
from unisono.engine.bootstrap.world_names import WAITING
from unisono.engine.store import FileStore, TCPStore

PROGRAMS = Path(__file__).resolve().parent / "programs"


def rank(*arguments: str, variables: Mapping[str, object] | None = None) -> subprocess.Popen[str]:
    """A process of `meets.py` with only `variables` telling its place."""
    told = {name: str(value) for name, value in (variables or {}).items()}
    command = [sys.executable, str(PROGRAMS / "meets.py"), *arguments]
    return subprocess.Popen(
        command, env={**os.environ, **told}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def place(port: int, number: int, world_size: int) -> dict[str, object]:
    return {"RANK": number, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def opened(pid: int) -> Iterator[str]:
    """What a process has open just now."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(path)


def sockets(child: subprocess.Popen[str]) -> None:
    """Wait until it has opened one."""
    deadline = time.monotonic() + 20
    while not any(name.startswith("socket:") for name in opened(child.pid)):
        assert time.monotonic() < deadline, "it does not connect"
        time.sleep(0.02)


def finished(children: list[subprocess.Popen[str]]) -> list[str]:
    """Their output; every child must have succeeded."""
    results = [child.communicate(timeout=HANG_S) for child in children]
    assert [child.returncode for child in children] == [0] * len(children), "\n".join(
        err for _, err in results
    )
    return [out.strip() for out, _ in results]


def failed(child: subprocess.Popen[str]) -> str:
    """The last line of a failed child's traceback."""
    _, text = child.communicate(timeout=HANG_S)
    assert child.returncode == 1
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_repeated_runs_with_kills_in_between(scheme: str, port: int, tmp_path: Path) -> None:
    """A run that is killed leaves nothing that would keep the next from coming together, at once."""
    method = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else f"file://{tmp_path}/meet"
    for turn in range(times(usual=2, long=6)):
        doomed = [
            rank("sleeps", f"{method}?rank={number}&world_size=3") for number in range(3 if turn else 2)
        ]
        if turn:
            for child in doomed:
                assert line(child)
        else:
            time.sleep(0.5)  # killed while they wait for the third
        for child in doomed:
            child.kill()
        for child in doomed:
            child.communicate()
        ranks = [rank("closes", f"{method}?rank={number}&world_size=3") for number in range(3)]
        assert len(finished(ranks)) == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("numbers", [(0, 1, 1), (0, 0, 1)], ids=str)
def test_the_same_rank_in_two_processes_names_both(numbers: tuple[int, ...], port: int) -> None:
    ranks = [rank("closes", variables=place(port, number, 3)) for number in numbers]
    twice = max(numbers, key=numbers.count)
    for text in [failed(child) for child in ranks]:
        assert f"RendezvousError: rank {twice} was taken twice" in text
        assert all(str(ranks[at].pid) in text for at, number in enumerate(numbers) if number == twice)


def test_different_names_are_told_at_once(port: int) -> None:
    start = time.monotonic()
    names = ("actor", "critic", "actor")
    ranks = [rank("closes", "env://", name, variables=place(port, i, 3)) for i, name in enumerate(names)]
    for text in [failed(child) for child in ranks]:
        assert "RendezvousError: ranks wait for groups of different names" in text
        assert "for 'actor'" in text
        assert "for 'critic'" in text
    judge_time(time.monotonic() - start, 20)  # of 300 s


def test_worlds_of_other_processes_meet_in_one_store(tmp_path: Path) -> None:
    """Their ranks have numbers that the callers chose: each process comes to one of the worlds only."""
    program, file = PROGRAMS / "meets_in_a_file.py", tmp_path / "store"

    def come(*worlds: tuple[str, int]) -> list[subprocess.Popen[str]]:
        return [
            subprocess.Popen(
                [sys.executable, str(program), str(file), name, str(number)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, number in worlds
        ]

    early = come(("actors", 0), ("learners", 1))
    with FileStore(str(file)) as store:
        while not all(name in (store.peek(WAITING) or b"") for name in (b"actors", b"learners")):
            assert [child.poll() for child in early] == [None, None]
            time.sleep(0.05)
    assert finished([*early, *come(("actors", 1), ("learners", 0))]) == ["2.0"] * 4


def test_worlds_of_other_names_follow_each_other(port: int) -> None:
    """Rank 1 comes to the next one while rank 0 still serves the last one's store."""
    for name in ("actor", "critic", "actor"):
        finished([rank("closes", "env://", name, variables=place(port, number, 2)) for number in (1, 0)])


def test_a_killed_rank_0_is_told(port: int) -> None:
    zero, one = (rank("closes", variables=place(port, number, 3)) for number in (0, 1))
    with TCPStore("localhost", port, timeout_s=HANG_S) as store:
        store.wait(["unisono/meet/world/0/rank/1"])  # it has said who it is
    zero.kill()
    zero.communicate()
    start = time.monotonic()
    text = failed(one)
    judge_time(time.monotonic() - start, 25)
    assert f"process {zero.pid}" in text
    assert f"localhost:{port}" in text


@pytest.mark.parametrize(("scheme", "number"), crossed(["tcp", "file"], [0, 1]))
def test_an_interrupt_while_waiting_for_the_others(
    scheme: str, number: int, port: int, tmp_path: Path
) -> None:
    method = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else f"file://{tmp_path}/meet"
    child = rank("says", f"{method}?rank={number}&world_size=2")
    assert line(child) == "waiting"
    time.sleep(0.4)
    child.send_signal(signal.SIGINT)
    start = time.monotonic()
    child.communicate(timeout=HANG_S)
    judge_time(time.monotonic() - start, 25)
    assert child.returncode == -signal.SIGINT
    assert not list(tmp_path.iterdir())


def test_exit_without_close_neither_hangs_nor_complains(port: int) -> None:
    ranks = [rank("ends", variables=place(port, number, 2)) for number in range(2)]
    finished(ranks)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_torchrun_itself(port: int) -> None:
    for options in cases([["--standalone"]], long=[["--master-port", str(port)]]):
        words = ("--nproc-per-node", "2", *options, PROGRAMS / "meets.py", "closes")
        # buffered: a rank's line in one piece
        printed = fine("-m", "torch.distributed.run", *words, PYTHONUNBUFFERED="")
        assert sorted(text.split()[0] for text in printed.splitlines()) == ["0", "1"]


@pytest.mark.parametrize(
    ("dies", "moment"),
    [(0, "before"), (1, "before"), (1, "behind")],
    ids=["who offers it", "a guest", "a guest who has it"],
)
def test_a_rank_that_ends_while_memory_is_handed_out_is_named_at_once(dies: int, moment: str) -> None:
    outputs = ranks.processes(3, PROGRAMS / "ends_while_memory_is_handed_out.py", str(dies), moment)
    told = [said for rank, said in enumerate(outputs) if rank != dies]
    for said in told:
        assert said.startswith("at once"), said
        assert f"rank {dies} (pid " in said
        assert "ended while the group was being made" in said


def test_variables_that_are_not_used_are_not_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other programs leave MASTER_PORT=0 and LOCAL_RANK=-1 behind."""
    for name, value in (("MASTER_PORT", "0"), ("LOCAL_RANK", "-1"), ("RANK", "x"), ("WORLD_SIZE", "-1")):
        monkeypatch.setenv(name, value)
    with un.HashStore() as store, un.init_process_group(store=store, rank=0, world_size=1) as group:
        group.barrier()
    with un.init_process_group(init_method=f"file://{tmp_path}/meeting?rank=0&world_size=1") as group:
        group.barrier()
    with pytest.raises(ValueError, match="WORLD_SIZE is malformed: got '-1'"):
        un.init_process_group(rank=0)
