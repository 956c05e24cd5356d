"""`unisono run --record`: what ranks call becomes a program, which runs on other networks."""

import subprocess
from pathlib import Path

import pytest

from python_runs import ran
from unisono import networks
from unisono.simulation import Call, Compute, RecvFrom, SendTo, Wait, read_program, scaled, simulate_program

PROGRAM = Path(__file__).with_name("programs") / "recorded_program.py"


def record(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return ran("-m", "unisono", "run", *words, cwd=tmp_path)


def test_a_job_is_recorded_and_simulated_on_more_hosts(tmp_path: Path) -> None:
    done = record(tmp_path, "-n", "4", "--record", "job.json", str(PROGRAM))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["job.json"]
    program = read_program(tmp_path / "job.json")
    assert sorted(map(tuple, program.groups)) == [(), (0, 1), (2, 3)]
    for rank, items in enumerate(program.ranks):
        calls = [item for item in items if isinstance(item, Call)]
        assert [call.collective for call in calls] == ["all_reduce", "all_gather"] * 2 + ["barrier"]
        assert [call.algorithm for call in calls[:2]] == ["ring", ""]
        assert [call.nbytes for call in calls[:2]] == [4.0 * (1 << 16), 2 * 4096.0]
        assert len({program.groups[call.group] is not None for call in calls}) == 1
        assert sum(isinstance(item, Wait) for item in items) == 2
        computed = [item.seconds for item in items if isinstance(item, Compute)]
        assert 0.004 < max(computed) < 0.5  # the first one lies before the first call
        assert sum(isinstance(item, SendTo) for item in items) == (rank in (0, 3))
        assert sum(isinstance(item, RecvFrom) for item in items) == (rank in (1, 2))
    here = simulate_program(program, networks.two_hosts(ranks=2))
    assert here.seconds > 0.005
    more = scaled(program, 64, replica=4)
    assert len(more.ranks) == 64
    assert simulate_program(more, networks.star(16, ranks=4)).seconds > 0.005
    simulated = ran(
        "-m",
        "unisono",
        "simulate",
        "job.json",
        "--network",
        "fat_tree",
        "-n",
        "32",
        "--replica",
        "4",
        cwd=tmp_path,
    )
    assert simulated.returncode == 0, simulated.stderr
    assert "job on fat_tree, 32 ranks" in simulated.stdout


def test_a_rank_without_a_recording_is_named(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text("print('no group')")
    done = record(tmp_path, "-n", "2", "--record", "job.json", "nothing.py")
    assert done.returncode == 2
    assert "job.json.rank0 is missing" in done.stderr


def test_a_file_that_cannot_be_written_is_refused_before_the_job(tmp_path: Path) -> None:
    done = record(tmp_path, "-n", "2", "--record", "no/such/job.json", str(PROGRAM))
    assert done.returncode == 2
    assert "--record no/such/job.json cannot be written" in done.stderr


def test_replicas_that_do_not_fit_are_refused() -> None:
    from unisono.simulation import Program

    program = Program([[Call("barrier", "", 0.0)]] * 4, groups=[(0, 1, 2)])
    with pytest.raises(ValueError, match="neither within a replica of 2 ranks nor over all"):
        scaled(program, 8, replica=2)
    with pytest.raises(ValueError, match="no whole replicas"):
        scaled(program, 9, replica=2)
    with pytest.raises(ValueError, match="leaves the replica"):
        scaled(Program([[SendTo(3, 1.0)], [], [], []]), 8, replica=2)
