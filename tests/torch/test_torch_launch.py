"""How ranks are started: torchrun, multiprocessing.spawn."""

from pathlib import Path

import pytest

import suite
from effort import LONG, cases, times
from ports import reserved
from python_runs import fine, ran

EXAMPLE = suite.HERE.parents[1] / "examples" / "ddp.py"
PROGRAMS = suite.HERE / "programs"


def test_a_new_port(forks: suite.Forks, tmp_path: Path):
    with reserved(2) as port:
        printed = forks.run(tmp_path, {"ports": ("programs.two_ports", 2, [str(port)])})["ports"]
    assert all("fine" in text for text in printed), printed


@pytest.mark.skipif(not LONG, reason="takes long; make test-long runs it")
def test_the_example_under_torchrun(tmp_path):
    arguments = ["--standalone", "--nproc-per-node", "2", str(EXAMPLE), "--epochs", "2"]
    out = fine("-m", "torch.distributed.run", *arguments, "--save", str(tmp_path / "net.pt"))
    assert "epoch 1: loss" in out
    assert (tmp_path / "net.pt").exists()


@pytest.mark.parametrize(
    ("start", "jobs"), cases([("fork", ["2:4"])], long=[("spawn", ["2:1", "4:1"]), ("fork", ["2:8", "4:3"])])
)
def test_the_parent_shows_the_error_of_the_rank_that_failed(tmp_path, start, jobs):
    """Not the error of those that were waiting for it, whose processes must not end first."""
    program = str(PROGRAMS / "one_spawned_rank_fails.py")
    assert "fine" in fine(program, str(tmp_path), start, *jobs)


def test_the_launcher_shows_our_error_where_pytorch_keeps_its_text_alone():
    """DDP raises a RuntimeError for what a future failed with that a hook of the user's has asked for."""
    program = str(PROGRAMS / "own_hook_fails.py")
    command = ["-m", "unisono", "run", "-n", "2", "--grace", "100", program]
    done = ran(*command)
    said = done.stderr
    assert "\n  unisono.errors.PeerLost: all_reduce failed: rank 1 (pid " in said, said
    assert "has closed the group because of ValueError: bad loss" in said, said
    assert "Got the following error" not in said, said
    first, last = said.splitlines()[-2:]
    assert first == "  ValueError: bad loss", said
    assert last == "unisono run: then rank 0 failed because rank 1 was gone (exit code 1)", said


def test_a_callback_that_raises_at_the_end_ends_no_process():
    for _ in range(times(usual=1, long=20)):
        fine(str(PROGRAMS / "raises_at_the_end.py"))


def test_leaving_with_works_under_way_ends_no_process(tmp_path):
    """Their futures fail while the interpreter ends; PyTorch's C++ must not meet that on its own."""
    program = str(PROGRAMS / "leaves_with_works.py")
    assert "fine" in fine(program, str(tmp_path), str(times(usual=2, long=6)))


def test_the_first_rank_may_leave_before_the_others_have_tidied_its_store(forks, tmp_path):
    """PyTorch's TCPStore prints a trace of C++ for each call that its server does not answer any more."""
    printed = forks.run_program(tmp_path, 2, PROGRAMS / "first_leaves.py")
    assert printed == ["fine 0\n", "fine 1\n"]
