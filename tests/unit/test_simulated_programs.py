"""Programs of ranks on networks: calls, compute and messages, in order, with overlap."""

from pathlib import Path
from typing import Any

import pytest

import unisono as un
from unisono import networks
from unisono.networks import Cable, Costs, Network
from unisono.simulation import (
    Call,
    Compute,
    Program,
    RecvFrom,
    SendTo,
    Wait,
    read_program,
    simulate_program,
    write_program,
)

CABLE = Cable(2e-6, 1e9)


def star(ranks: int, **given: Any) -> Network:
    return networks.star(ranks, cable=CABLE, costs=Costs(), **given)


def test_compute_overlaps_with_a_call_that_has_a_handle() -> None:
    network = star(8)
    call = un.simulate("all_reduce", network, algorithm="ring", nbytes=1e7).seconds
    overlap = [Call("all_reduce", "ring", 1e7, handle="x"), Compute(2 * call), Wait("x")]
    in_turn = [Call("all_reduce", "ring", 1e7), Compute(2 * call)]
    assert simulate_program(Program(ranks=[overlap]), network).seconds == pytest.approx(2 * call)
    assert simulate_program(Program(ranks=[in_turn]), network).seconds == pytest.approx(3 * call)


def test_groups_at_once_share_the_links() -> None:
    """Two groups over one cable: each gets half of it. Alone, one gets all."""
    network = networks.two_hosts(ranks=2, cable=Cable(0.0, 1e9), costs=Costs())
    groups = [[0, 2], [1, 3]]
    both = Program(
        ranks=[[Call("broadcast", "direct", 1e6, group=rank % 2)] for rank in range(4)], groups=groups
    )
    alone = Program(ranks=[[Call("broadcast", "direct", 1e6)]] * 3 + [[]], groups=[[0, 2]])
    assert simulate_program(both, network).seconds == pytest.approx(2e-3)
    alone = Program(
        ranks=[[Call("broadcast", "direct", 1e6)], [], [Call("broadcast", "direct", 1e6)], []],
        groups=[[0, 2]],
    )
    assert simulate_program(alone, network).seconds == pytest.approx(1e-3)


def test_a_program_folds_where_all_its_calls_do() -> None:
    network = networks.star(8, ranks=2, cable=CABLE, costs=Costs(o_send_s=3e-7, g_s=4e-7))
    items = [
        Compute(1e-4),
        Call("all_reduce", "ring", 1e5, handle="x"),
        Call("all_reduce", "hierarchical", 1e6),
        Wait("x"),
    ]
    same = simulate_program(Program(ranks=[items]), network)
    each = simulate_program(Program(ranks=[items] * 16), network)
    assert (same.seconds, same.messages, same.ends) == (each.seconds, each.messages, each.ends)
    assert same.simulated * 8 == each.simulated


def test_a_rank_does_not_wait_for_a_call_of_a_group_without_it() -> None:
    items = [Call("all_reduce", "ring", 1e3, group=1, handle="x"), Wait("x"), Compute(1e-3)]
    found = simulate_program(Program([items], groups=[(), (0, 1)]), star(4))
    assert found.ends[3] == pytest.approx(1e-3)
    assert found.ends[0] > 1e-3


def test_many_groups_need_streams_of_their_members_only() -> None:
    """64 groups of two: every rank has two streams, not 65."""
    groups = [(rank, rank + 1) for rank in range(0, 128, 2)]
    ranks = [[Call("all_reduce", "ring", 1e3, group=rank // 2)] for rank in range(128)]
    found = simulate_program(Program(ranks, groups=groups), star(128))
    assert found.messages == 64 * 4


def test_a_program_survives_json(tmp_path: Path) -> None:
    items = [
        Compute(1e-3),
        Call("all_reduce", "ring", 8.0, handle="x"),
        Wait("x"),
        SendTo(1, 4.0),
        RecvFrom(1),
    ]
    program = Program(ranks=[items, [RecvFrom(0), SendTo(0, 4.0)]], groups=[[0]], name="step")
    write_program(program, tmp_path / "program.json")
    assert read_program(tmp_path / "program.json") == program
    assert simulate_program(program, star(2)).seconds > 1e-3
    (tmp_path / "program.json").write_bytes(b"\x00garbage")
    with pytest.raises(ValueError, match="is no program"):
        read_program(tmp_path / "program.json")


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([Wait("x")], "rank 0, item 0 waits for 'x'"),
        ([Compute(-1.0)], "rank 0, item 0: seconds"),
        ([Call("all_reduce", "ring", 8.0, group=3)], "rank 0, item 0: group"),
        ([SendTo(99, 8.0)], "rank 0, item 0: peer"),
        ([Call("all_reduce", "nothing", 8.0)], "no algorithm 'nothing'"),
        ([SendTo(1, 8.0)], "rank 0, item 0: a message of a list that is not one rank's own"),
    ],
)
def test_a_wrong_item_is_named(items: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        simulate_program(Program(ranks=[items]), star(2))


@pytest.mark.parametrize(
    ("ranks", "given", "text"),
    [
        ([[SendTo(0, 8.0)], []], {}, "rank 0, item 0: a message of rank 0 to itself"),
        ([], {}, "the program has no ranks"),
        ([[]], {"size": 0}, "size"),
        ([["x"]], {}, "rank 0, item 0 is a str"),
        (5, {}, "the ranks of the program is a int"),
        ([[]], {"groups": [5]}, "group 0 is a int"),
        ([[]], {"groups": [(0, 0)]}, "group 0 has a rank twice"),
        ([[Call(5, "ring", 8.0)]], {}, "collective"),
        ([[Call("all_reduce", "ring", "x")]], {}, "nbytes"),
    ],
)
def test_a_wrong_program_is_refused(ranks: Any, given: dict[str, Any], text: str) -> None:
    groups = given.pop("groups", [()])
    with pytest.raises((ValueError, TypeError), match=text):
        simulate_program(Program(ranks=ranks, groups=groups), star(2), **given)


def test_a_program_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "program.json").write_text('{"ranks": ' + "[" * 100_000)
    with pytest.raises(ValueError, match="is no program"):
        read_program(tmp_path / "program.json")


def test_a_rendezvous_waits_until_its_receiver_asks() -> None:
    costs = Costs(rendezvous_bytes=1000)
    network = networks.star(2, cable=Cable(1e-6, 1e9), costs=costs)
    program = Program(ranks=[[SendTo(1, 1000.0)], [Compute(1e-3), RecvFrom(0)]])
    found = simulate_program(program, network)
    assert found.ends == pytest.approx(
        [0.0, 1e-3 + 2e-6 + 1e-6 + 2e-6]
    )  # the answer, the bytes, their latency
