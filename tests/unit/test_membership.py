"""What ranks learn from each other's peer info."""

import pytest

from loops import each
from unisono import _native
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
