"""The launcher of an elastic job: its flags, and what it concludes from the notices of its ranks."""

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from loops import each
from unisono.commands.launch.elastic import ElasticRanks
from unisono.commands.launch.failures import RankProcess
from unisono.commands.launch.job import Assignment, Job, add_arguments, job_from, rank_environment
from unisono.engine.diagnosis.report import MembershipNotice
from unisono.errors import LaunchError


class Host:
    """The processes of one launcher, of two each."""

    def __init__(self, job: Any) -> None:
        self.ranks: dict[int, RankProcess] = {}
        self.elastic = ElasticRanks(job, self.ranks, lambda line: None)

    def start(self, *pids: int) -> None:
        for place, pid in enumerate(pids):
            self.ranks[pid] = RankProcess(place, place, pid, stderr=None)  # type: ignore[arg-type]

    def form(self, generation: int, size: int, *pids: int) -> None:
        """All ranks of this host tell of their new group."""
        for pid in pids:
            notice = MembershipNotice(pid=pid, new_rank=0, generation=generation, size=size, here=pids)
            self.elastic.take(notice)

    def end(self, *pids: int) -> None:
        for order, pid in enumerate(pids):
            self.ranks[pid].end = order, 1, False
            self.elastic.on_end(self.ranks[pid], failed=True)


def job() -> Any:
    return Job(("x",), 4, (), (), elastic=(1, 4), respawn=100)


def test_a_host_whose_ranks_are_evicted_again_and_again_replaces_them() -> None:
    host = Host(job())
    host.start(1, 2)
    host.form(0, 4, 1, 2)
    for number in range(1, 4):
        old, new = (10 * (number - 1) + 1, 10 * (number - 1) + 2), (10 * number + 1, 10 * number + 2)
        host.end(*old)  # the side with rank 0 went on without them: no notice of this host says so
        assert not host.elastic.over
        assert host.elastic.replacing
        assert all(not host.ranks[pid].survived for pid in old)
        host.start(*new)
        host.form(2 * number, 4, *new)
        assert all(host.ranks[pid].survived for pid in old)  # the job went on


def test_the_first_notice_of_a_group_does_not_end_the_job() -> None:
    host = Host(Job(("x",), 3, (), (), elastic=(2, 3)))
    host.start(1, 2, 3)
    host.elastic.take(MembershipNotice(pid=1, new_rank=0, generation=0, size=3, here=(1, 2, 3)))
    assert not host.elastic.over
    host.form(0, 3, 2, 3)
    host.end(3)
    assert not host.elastic.over
    host.end(2)
    assert host.elastic.over


def test_a_job_whose_ranks_have_all_failed_is_over() -> None:
    host = Host(job())
    host.start(1, 2)
    host.form(0, 2, 1, 2)
    host.end(1)
    assert not host.elastic.over
    host.end(2)
    host.elastic.give_up()
    assert host.elastic.over


# ---- the flags of elastic jobs: what is refused, what a job and its ranks get ----


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


def parse(*words: str, **environ: str) -> tuple[Job, list[str]]:
    parser = argparse.ArgumentParser(prog="unisono run")
    add_arguments(parser)
    return job_from(parser.parse_args(words), {"PATH": os.environ["PATH"], **environ})


@each(
    ("flags", "text"),
    [
        (("--elastic", "3"), "--elastic does not fit: got '3', expected MIN:MAX"),
        (("--elastic", "4:2"), "--elastic does not fit: got '2', expected 4..1600"),
        (("--elastic", "0:2"), "--elastic does not fit: got '0'"),
        (("--elastic", "1:99999999999999999999"), "--elastic does not fit"),
        (("--elastic", "a:b"), "--elastic does not fit: got 'a'"),
        (("--elastic", "2:4", "-n", "1"), "-n does not fit: got 1, expected 2..4"),
        (("--elastic", "2:4", "-n", "5"), "-n does not fit: got 5, expected 2..4"),
        (("--respawn", "1"), "--respawn needs --elastic"),
        (("--elastic", "1:2", "--respawn", "-1"), "--respawn does not fit"),
        (("--join-port", "1000"), "--join-port needs --elastic"),
        (("--elastic", "1:2", "--join-port", "0"), "--join-port does not fit"),
        (("--join", "host"), "--join does not fit: got 'host', expected HOST:PORT"),
        (("--join", "host:99999"), "--join does not fit"),
        (("--join", "127.0.0.1:1"), "--join needs the token"),
        (("--join", "127.0.0.1:1", "--nnodes", "2", "--master-addr", "a"), "--join and --nnodes exclude"),
        (("--max-restarts", "3"), "use --elastic MIN:MAX and --respawn N"),
    ],
)
def test_wrong_flags_are_refused(script: str, flags: tuple[str, ...], text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse(*flags, script)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_job_starts_its_maximum(script: str) -> None:
    job, remarks = parse("--elastic", "2:3", script)
    assert (job.elastic, job.world_size, job.respawn, remarks) == ((2, 3), 3, 0, [])
    assert parse("--elastic", "2:8", "-n", "4", "--respawn", "5", script)[0].world_size == 4


def test_ranks_learn_their_job(script: str) -> None:
    where = Assignment("127.0.0.1:1", 2, 0, 4)
    job, _ = parse("--elastic", "2:4", "--master-addr", "10.0.0.5", "--join-port", "29600", script)
    found = rank_environment(job, 0, {"UNISONO_JOIN": "left:1"}, assignment=where, status_fd="")
    assert (found["UNISONO_ELASTIC"], found["UNISONO_LISTEN"]) == ("2:4", "10.0.0.5:29600")
    assert "UNISONO_JOIN" not in found  # of another job
    again = rank_environment(job, 0, {}, assignment=where, status_fd="", join="10.0.0.5:29600")
    assert again["UNISONO_JOIN"] == "10.0.0.5:29600"
    job, _ = parse("--join", "a:1,b:2", script, UNISONO_TOKEN="ab" * 32)
    found = rank_environment(job, 0, {}, assignment=where, status_fd="")
    assert (found["UNISONO_JOIN"], found["UNISONO_ELASTIC"]) == ("a:1,b:2", "1:1600")
    assert "UNISONO_LISTEN" not in found
