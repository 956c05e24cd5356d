"""GOAL and Chakra: every algorithm there and back, and damaged files refused."""

import random
import struct
from pathlib import Path

import pytest

from loops import each
from unisono.plans import ALGORITHMS, Plan, Send, make, prove
from unisono.schedules import load, read_actions, save
from unisono.schedules.goal import goal, parse_goal

CATALOGUE = [(collective, name) for collective in ALGORITHMS for name in ALGORITHMS[collective]]

README = """num_ranks 2

rank 0 {
l1: calc 100 cpu 0
l2: send 10b to 1 tag 7 cpu 0 nic 0
l2 requires l1
l3: recv 10b from 1
l3 irequires l2
}

rank 1 {
l1: recv 10b from 0 tag 7
l2: send 10b to 0
l2 requires l1
}
"""


def without_empty(plan: Plan) -> tuple[tuple[object, ...], ...]:
    return tuple(tuple(s for s in steps if not (isinstance(s, Send) and not s.to)) for steps in plan.steps)


@each("name", ["a.goal", "a.0.et"])
@each("collective, algorithm", CATALOGUE)
def test_every_algorithm_comes_back(collective: str, algorithm: str, name: str, tmp_path: Path) -> None:
    if name.endswith(".et"):
        pytest.importorskip("google.protobuf")
    for size in (2, 3, 4, 7):
        folder = tmp_path / f"{collective}-{algorithm}-{size}-{name}"
        folder.mkdir()
        plan = make(collective, algorithm, size, 0, tuple(rank // 2 for rank in range(size)))
        save(plan, folder / name, 4096)
        again = load(folder / name, collective, size, 0, plan.hosts)
        assert without_empty(again) == without_empty(plan)
        prove(again)


def test_goal_is_read_as_loggopsim_writes_it() -> None:
    ranks = parse_goal(README)
    assert [[action.kind for action in listed] for listed in ranks] == [
        ["calc", "send", "recv"],
        ["recv", "send"],
    ]
    send = ranks[0][1]
    assert (send.size, send.peer, send.tag, send.requires) == (10, 1, 7, (0,))
    assert ranks[0][2].irequires == (1,)


def test_what_says_no_chunks_can_be_simulated_only(tmp_path: Path) -> None:
    (tmp_path / "s.goal").write_text(README)
    assert len(read_actions(tmp_path / "s.goal")) == 2
    with pytest.raises(ValueError, match="it can be simulated, but not run"):
        load(tmp_path / "s.goal")


@each(
    "before, after, line, says",
    [
        ("num_ranks 2", "num_ranks 0", 1, "expected num_ranks"),
        ("num_ranks 2", "num_ranks 9999999", 1, "expected num_ranks"),
        ("to 1", "to 5", 5, "peer is 5"),
        ("to 1", "to 0", 5, "peer is 0"),
        ("to 1", "to -1", 5, "neither an action nor"),
        ("l2 requires l1", "l9 requires l1", 6, "no label 'l9'"),
        ("l2 requires l1", "l2 requires l2", 6, "waits for itself"),
        ("l2 requires l1", "l2 requires l1\nl1 requires l2", 4, "in a cycle"),
        ("send 10b", "send 99999999999999999999b", 5, "neither an action nor"),
        ("tag 7", "tax 7", 5, "is no option"),
        ("rank 1 {", "rank 0 {", 11, "expected a new rank"),
        ("l3: recv", "l2: recv", 7, "stands there twice"),
    ],
)
def test_a_damaged_goal_file_names_its_line(before: str, after: str, line: int, says: str) -> None:
    assert before in README
    with pytest.raises(ValueError, match=rf"^s\.goal:{line}: ") as caught:
        parse_goal(README.replace(before, after, 1), "s.goal")
    assert says in str(caught.value)


def test_a_label_that_contradicts_its_action_is_refused(tmp_path: Path) -> None:
    text = goal(make("all_reduce", "ring", 3), 64)
    for before, after in (
        ("s0_send_out0_0: send", "s0_recv_out0: send"),
        ("_reduce_out2_0", "_reduce_out1_0"),
    ):
        assert before in text
        file = tmp_path / "s.goal"
        file.write_text(text.replace(before, after))
        with pytest.raises(ValueError):
            prove(load(file))


def test_damaged_traces_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    save(make("all_reduce", "doubling", 4), tmp_path / "t.0.et")
    whole = (tmp_path / "t.2.et").read_bytes()
    choice = random.Random(3)
    for _ in range(200):
        damaged = bytearray(whole)
        at = choice.randrange(len(damaged))
        if choice.random() < 0.5:
            damaged[at] = choice.randrange(256)
        else:
            del damaged[at:]
        (tmp_path / "t.2.et").write_bytes(damaged)
        try:
            prove(load(tmp_path / "t.0.et"))
        except ValueError as error:
            assert str(error)
    with pytest.raises(ValueError, match=r"ends in \.0\.et"):
        load(tmp_path / "t.2.et")


def varint(value: int) -> bytes:
    head = bytearray()
    while value > 127:
        head.append(value & 127 | 128)
        value >>= 7
    return bytes([*head, value])


def within(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def one_message(rank: int, size: bytes) -> bytes:
    """A trace of one message from rank 0 to rank 1; size: the field with the value of comm_size."""
    ends = [within(1, b"comm_src") + b"\x38\x00", within(1, b"comm_dst") + b"\x38\x01"]
    attributes = b"".join(within(10, each) for each in (*ends, within(1, b"comm_size") + size))
    node = within(2, b"a") + bytes([0x18, 5 + rank]) + attributes
    return b"\x00" + varint(len(node)) + node


@each(
    "size, read",
    [
        (varint(13 << 3) + varint(300), 300),  # uint64
        (varint(17 << 3) + varint(600), 300),  # sint64
        (varint(21 << 3 | 1) + (300).to_bytes(8, "little"), 300),  # fixed64
        (varint(23 << 3 | 5) + (300).to_bytes(4, "little"), 300),  # sfixed32
        (varint(3 << 3 | 1) + struct.pack("<d", 300), None),  # double
        (within(29, b"300"), None),  # string
    ],
)
def test_a_size_is_read_in_every_type_of_whole_numbers(size: bytes, read: int | None, tmp_path: Path) -> None:
    """A value of another type was taken for 0."""
    pytest.importorskip("google.protobuf")
    for rank in range(2):
        (tmp_path / f"t.{rank}.et").write_bytes(one_message(rank, size))
    if read is None:
        with pytest.raises(ValueError, match="comm_size is no whole number"):
            read_actions(tmp_path / "t.0.et")
    else:
        assert [[action.size for action in rank] for rank in read_actions(tmp_path / "t.0.et")] == [
            [read]
        ] * 2
