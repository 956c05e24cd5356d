"""What ranks learn from each other's peer info."""

import os
import tempfile

import pytest

from loops import each
from unisono import _native
from unisono.commands.launch.process import StatusBoard
from unisono.engine.bootstrap.liveness import board
from unisono.engine.bootstrap.peer_info import Membership, PeerInfo, local_peer_info, version
from unisono.engine.costs.machine import DEFAULTS
from unisono.engine.operations.kinds import KINDS
from unisono.plans import ALGORITHMS


@each(
    ("hosts", "masks", "cores"),
    [
        ("aa", [0b11, 0b11], 2),
        ("aaaa", [0b11, 0b11, 0b11, 0b11], 2),
        ("aabb", [0b11, 0b11, 0b11, 0b11], 1),  # two hosts of one machine share its cores
        ("aa", [0b01, 0b10], 2),
        ("aa", [0b01, 0b01], 1),
        ("aaaa", [0b01, 0b01, 0b01, 0b10], 1),  # three have to share one, whatever the fourth has
        ("aaaa", [0b0011, 0b0011, 0b1100, 0b1100], 4),
        ("aaa", [0b1, 0b1, 0b1111], 1),
    ],
)
def test_cores_that_the_ranks_of_a_host_have(hosts: str, masks: list[int], cores: int) -> None:
    peers = [
        PeerInfo(1, rank, "name", 100 + rank, 1, "kernel", "network", home, 0, f"{mask:x}")
        for rank, (home, mask) in enumerate(zip(hosts, masks, strict=True))
    ]
    membership = Membership(peers, b"", 0, DEFAULTS)
    assert {membership.cores(rank) for rank in range(len(peers))} == {cores}


def test_the_version_covers_the_engine_and_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = version(ALGORITHMS)
    assert local_peer_info(0, 0).layout == mine
    longer = {**ALGORITHMS, "all_reduce": [*ALGORITHMS["all_reduce"], "pass_on"]}
    moved = {**ALGORITHMS, "scan": ["direct"], "exclusive_scan": ["direct", "linear"]}
    backwards = {collective: reversed(list(ALGORITHMS[collective])) for collective in reversed(ALGORITHMS)}
    assert mine not in (version(longer), version(moved))
    assert mine == version(backwards)
    inserted = [*KINDS[: KINDS.index("split")], "all_pass", *KINDS[KINDS.index("split") :]]
    swapped = [KINDS[1], KINDS[0], *KINDS[2:]]
    versions = {mine, *(version(ALGORITHMS, kinds) for kinds in (inserted, [*KINDS, "all_pass"], swapped))}
    assert len(versions) == 4  # a kind's index is its number on the wire
    monkeypatch.setattr(_native, "LAYOUT", _native.LAYOUT + 1)
    assert version(ALGORITHMS) != mine


# ---- what a rank knows about the others without a word from them ----


def test_a_rank_that_has_not_made_its_engine_is_named_by_its_process() -> None:
    region = _native.Region(-1, 2, 1 << 16, True)
    engine = _native.Engine(region, 0, [-1, -1], -1, 2, 0.0, 1 << 18, pids=[os.getpid(), 4242])
    assert engine.record_of(0).pid == os.getpid()
    assert engine.record_of(1).pid == 4242


def test_as_many_processes_as_ranks() -> None:
    region = _native.Region(-1, 2, 1 << 16, True)
    with pytest.raises(ValueError, match="name every rank once"):
        _native.Engine(region, 0, [-1, -1], -1, 2, 0.0, 1 << 18, pids=[1])


# ---- what a rank takes for the launcher's status board ----


def test_the_status_board_is_known_by_its_inode_and_its_seals() -> None:
    made = StatusBoard(2)
    fd, inode = map(int, made.name.split(":"))
    assert fd == made.fd
    assert board((fd, inode)) == fd
    assert board((fd, inode + 1)) == board(None) == -1
    memory = os.memfd_create("not sealed")
    with tempfile.TemporaryFile() as file:
        for other in (file.fileno(), memory):
            assert board((other, os.fstat(other).st_ino)) == -1
    os.close(memory)
    made.close()
    assert board((fd, inode)) == -1
