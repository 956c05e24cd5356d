"""Fixtures of every scope live in the ranks, as long as pytest lets them. They write to the file LOG."""

import os
from pathlib import Path

import pytest


def log(what, rank):
    with open(os.environ["LOG"], "a") as file:
        file.write(f"{what} {rank}\n")


@pytest.fixture(scope="session")
def of_session():
    log("session up", os.getpid())
    yield
    log("session down", os.getpid())


@pytest.fixture(scope="module", autouse=True)
def of_module(of_session):
    log("module up", os.getpid())
    yield
    log("module down", os.getpid())


@pytest.mark.ranks(2)
class TestOnRanks:
    def test_folder_is_shared(self, group, tmp_path):
        (tmp_path / str(group.rank)).touch()
        group.barrier()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]

    def test_capture_and_environment(self, rank, capsys, monkeypatch):
        print("rank", rank)
        assert capsys.readouterr().out == f"rank {rank}\n"
        assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == [
            str(rank),
            "2",
            str(rank),
        ]
        monkeypatch.setenv("LOCAL_RANK", "9")

    def test_files_are_private(self, group, tmp_path_factory):
        assert len({*group.all_gather_object(str(tmp_path_factory.mktemp("own")))}) == 2


def test_here():
    assert "RANK" not in os.environ
    log("here", os.getpid())


@pytest.mark.ranks(1)
def test_of_one_rank(group):
    assert group.size == 1
    assert Path(os.environ["LOG"]).read_text().count("here") == 1
