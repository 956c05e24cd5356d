"""Limits of the process: each error says which one was met, and how to raise it."""

import errno
import itertools
import socket
from pathlib import Path

import pytest

import ranks
from loops import of_two
from unisono.engine.base.limits import limit_text

PROGRAMS = Path(__file__).resolve().parent / "programs"
PROGRAM = PROGRAMS / "meets_limits.py"
RAISE = "Raise it before the start: `ulimit -n "


@of_two
@pytest.mark.parametrize("more", [1, 6, 11])
def test_descriptors_run_out_while_a_group_is_made(more: int) -> None:
    both = ranks.processes(2, PROGRAM, "files_of_a_subgroup", str(more))
    if "made" in both[1]:
        return
    for text in both:
        assert text.startswith("RendezvousError"), text
        assert "RLIMIT_NOFILE" in text, text
        assert RAISE in text, text
        assert "firewalls" not in text, text


@pytest.mark.parametrize("more", [0, 2, 5])
def test_descriptors_run_out_in_a_store(more: int) -> None:
    [text] = ranks.processes(1, PROGRAM, "files_of_a_store", str(more))
    assert text == "made\n" or ("RLIMIT_NOFILE" in text and RAISE in text), text


def test_descriptors_run_out_in_the_store_where_ranks_meet() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    texts = ranks.processes(6, PROGRAM, "files_of_a_meeting", str(port))
    assert "too many open files" in texts[0], texts
    assert RAISE in texts[0] or "administrator" in texts[0], texts[0]
    told = "not all ranks can connect to the store: too many open files"
    if told in texts[0]:  # else others took the descriptors before rank 0 reached its own store
        assert sum(told in text for text in texts) >= 2, texts


def test_no_memory_for_a_group() -> None:
    texts = ranks.processes(2, PROGRAM, "memory_of_a_group", "256M")
    first = [text for text in texts if "the limit RLIMIT_AS is" in text]
    assert first and all("`ulimit -v " in text for text in first), texts
    assert all("ended while the group was being made" in text for text in texts if text not in first), texts


def test_no_thread_for_a_message() -> None:
    texts = ranks.processes(2, PROGRAM, "thread_of_a_message", "")
    for line in texts[0].splitlines()[:2]:
        assert line.startswith("UnisonoError the call cannot begin: no more threads can be started"), texts
        assert "the limit RLIMIT_AS is" in line and "Raise them (`ulimit -u`, `ulimit -v`)" in line, texts
    assert len(texts[0].splitlines()) == 2 and texts[1] == "1.0\n", texts


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    [text] = ranks.processes(1, PROGRAM, "size_of_a_file", str(tmp_path / "store"))
    assert "cannot write to the store's file" in text
    assert "the limit RLIMIT_FSIZE is 4096" in text
    assert text.endswith("v\n"), "what was half written is written over"


def test_a_full_disk() -> None:
    text = limit_text(OSError(errno.ENOSPC, "No space left on device", "/dev/full"))
    assert text.startswith("no space left on device: '/dev/full'. Free some space there")


@of_two
def test_a_buffer_whose_file_was_cut_is_named_at_once_on_all_ranks() -> None:
    uses = [
        f"{use} {call} {nbytes}"
        for nbytes in (8_000_000, 300_000)  # copied by the kernel, and through a ring
        for use, call in itertools.product(("write", "read"), ("broadcast", "message"))
    ]
    uses.append("write all_reduce 300000")
    assert ranks.processes(2, PROGRAMS / "loses_its_memory.py", *uses) == ["fine\n"] * 2


@pytest.mark.parametrize("what", ["write", "read"])
def test_a_sandbox_that_refuses_one_direction_of_copies(what: str) -> None:
    assert ranks.processes(2, PROGRAMS / "loses_its_memory.py", f"refused {what}") == ["fine\n"] * 2
