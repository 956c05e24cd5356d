"""Arrays of `un.empty` between processes: read where they lie, and what happens where they cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ranks

CHECK = """
from pathlib import Path
import inside

def mapped():  # arenas: each as long as the machine has memory, in pieces that may be touched or not
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "unisono-arrays" in line:
            first, last = line.split()[0].split("-")
            found += int(last, 16) - int(first, 16)
    return found // (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

x, out = un.empty(100_000, np.float32), un.empty(group.size * 100_000, np.float32)

def check():
    x[:] = group.rank + 1
    group.all_gather(out, x)
    assert (out.reshape(group.size, -1) == np.arange(1, group.size + 1)[:, None]).all()
    group.all_reduce(x)
    assert (x == sum(range(1, group.size + 1))).all()
"""


def test_they_are_mapped_by_those_who_read_them() -> None:
    program = CHECK + "check(); print('mapped', mapped()); assert inside.engine(group).opened >= 4\n"
    for output in ranks.run(3, program + "group.close(); print('then', mapped())"):
        assert "mapped 3" in output, output
        assert "then 1" in output, output  # its own


@pytest.mark.parametrize("places", [(True, True), (True, False), (False, True)])
def test_both_ends_of_a_loan_may_be_mapped(places: tuple[bool, bool]) -> None:
    """A sender with nothing else to do copies, too, into what it has mapped or by system calls."""
    program = f"""
make = un.empty if {places}[group.rank] else np.empty
x = make(1_000_000, np.float32)
for turn in range(5):
    for source in (0, 1):
        x[:] = group.rank + turn
        group.broadcast(x, source)
        assert (x == source + turn).all()
        x[:] = group.rank - turn
        if group.rank == source:
            group.send(x, 1 - source)
        else:
            group.recv(x, source)
        assert (x == source - turn).all()
"""
    ranks.run(2, program)


def test_who_has_no_such_memory_goes_with_those_who_have() -> None:
    program = """
import resource
if group.rank == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # of the file behind it
"""
    everybody = CHECK + "check(); check(); print('mapped', mapped())"
    outputs = ranks.run(2, program + everybody)
    assert ["mapped 1" in output for output in outputs] == [True, True], outputs


def test_a_descriptor_that_was_closed_costs_copies_only() -> None:
    """Somebody closes all descriptors that it does not know, and one of them is another file's afterwards."""
    program = """
for number in range(3, 200):
    try:
        if "unisono-arrays" in os.readlink(f"/proc/self/fd/{number}"):
            os.dup2(os.memfd_create("unisono-arrays"), number)
    except OSError:
        pass
check()
print("mapped", mapped())
"""
    assert all("mapped 1" in output for output in ranks.run(2, CHECK + program))


def held(collective: str, ending: str) -> dict[str, str]:
    """What sender and reader say when the reader was held in the middle of a message."""
    program = Path(__file__).with_name("held_program.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(program), collective, ending]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return dict(line.split(": ", 1) for line in ended.stdout.splitlines())


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
def test_a_reader_that_is_killed_takes_nothing_with_it(collective: str) -> None:
    said = held(collective, "kill")
    assert list(said) == ["sender"]
    assert said["sender"].startswith(f"PeerLost: {collective} failed: rank 1"), said


@pytest.mark.parametrize(
    ("collective", "read"), [("reduce_scatter", "[2.0, 8.0]"), ("all_gather", "[1.0, 7.0]")]
)
def test_memory_that_was_given_back_is_no_result(collective: str, read: str) -> None:
    """Who comes to read what its sender has put there since, after it gave up, is told so."""
    said = held(collective, "abort")
    assert said["sender"].startswith(f"Aborted: {collective} failed: rank 0"), said
    assert said["reader"].startswith(f"{read} Aborted: {collective} failed: rank 0"), said


def test_a_forks_child_makes_a_group_with_the_same_peer() -> None:
    """What its parent has mapped of that peer is not mapped in the child."""
    program = """
check()
if group.rank == 0:
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print("fine", flush=True)
        os._exit(0)
rank, again = group.rank, os.environ["MEETING"] + "-again"
with un.init_process_group(init_method=again, rank=rank, world_size=2, timeout=60) as second:
    y, all_y = un.empty(100_000, np.float32), un.empty(200_000, np.float32)
    y[:] = rank
    second.all_gather(all_y, y)
    assert (all_y.reshape(2, -1) == np.arange(2)[:, None]).all()
    assert inside.engine(second).opened > 0
os._exit(0)
"""
    assert "fine" in ranks.run(2, CHECK + program)[0]
