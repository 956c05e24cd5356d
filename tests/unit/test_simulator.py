"""The native simulator against a slow exact one, and its arguments."""

from __future__ import annotations

import random
import time
from array import array
from fractions import Fraction
from typing import Any

import pytest

import max_min
from unisono import _native
from unisono.plans.codes import RECV, REDUCE, SEND, chunk_code, compute_code

LINKS = 5


def native(
    programs: list[array[int]],
    routes: dict[tuple[int, int], tuple[int, ...]],
    latency: list[float],
    capacity: list[float],
    **given: Any,
) -> dict[str, Any]:
    """Run programs with these routes; a route may cross a link once only."""
    blocks = {rank: iter([(program.tobytes(), 1)]) for rank, program in enumerate(programs)}
    arguments: dict[str, Any] = {
        "ranks": len(programs),
        "streams": 1,
        "extra": 0,
        "digits": [],
        "rates": capacity,
        "costs": [[0.0] * 7 + [1.0] + [0.0] * 7],
        "costs_index": [],
        "window": 1 << 12,
        "most_spans": 0,
        "next": lambda rank: next(blocks[rank], None),
        "route": lambda s, t: (
            sum([latency[link] for link in routes[s, t]]),
            [(link, 1) for link in routes[s, t]],
        ),
    }
    return _native.simulate(**{**arguments, **given})


def random_programs(draw: random.Random, size: int) -> list[list[max_min.Step]]:
    """Programs without a deadlock: messages in one order that all ranks keep."""
    programs: list[list[max_min.Step]] = [[] for _ in range(size)]
    for _ in range(draw.randint(1, 14)):
        source, target = draw.sample(range(size), 2)
        nbytes = Fraction(draw.choice([1, 64, 100, 4096]))
        programs[source].append(max_min.Step("send", target, nbytes))
        programs[target].append(max_min.Step("recv", source, nbytes))
        if draw.random() < 0.4:
            programs[target].append(max_min.Step("compute", 0, Fraction(draw.randint(1, 60))))
    return programs


def codes(program: list[max_min.Step]) -> array[int]:
    """The same program for the native simulator: chunks of a byte."""
    found = chunk_code(1.0)
    for step in program:
        if step.kind == "send":
            found.extend((SEND, int(step.nbytes), 1, step.peer))
        elif step.kind == "recv":
            found.extend((RECV, int(step.nbytes), step.peer))
        else:
            found.extend(compute_code(float(step.nbytes)))
    return found


@pytest.mark.parametrize("seed", range(300))
def test_random_programs_on_random_networks_take_as_long_as_in_exact_arithmetic(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(2, 6)
    capacity = [Fraction(draw.choice([1, 2, 3, 7, 10])) for _ in range(LINKS)]
    latency = [Fraction(draw.choice([0, 1, 5])) for _ in range(LINKS)]
    routes = {
        (s, t): tuple(draw.sample(range(LINKS), draw.randint(1, 3)))
        for s in range(size)
        for t in range(size)
        if s != t
    }
    o_send, o_recv = Fraction(draw.choice([0, 3])), Fraction(draw.choice([0, 2]))
    programs = random_programs(draw, size)
    exact = max_min.run(programs, routes, latency, capacity, o_send, o_recv)
    costs = [[float(o_send), float(o_recv), *([0.0] * 5), 1.0, *([0.0] * 7)]]
    found = native(
        [codes(p) for p in programs], routes, [*map(float, latency)], [*map(float, capacity)], costs=costs
    )
    assert not found["stuck"]
    assert found["ends"] == pytest.approx([float(end) for end in exact], rel=1e-12)


@pytest.mark.parametrize("seed", range(150))
def test_bursts_and_waiting_ranks_take_as_long_as_in_exact_arithmetic(seed: int) -> None:
    """All sizes and times differ, so messages begin together only where they do so exactly."""
    draw = random.Random(seed)
    size = draw.randint(2, 6)
    capacity, latency, bursts = (
        [Fraction(draw.randint(low, high)) for _ in range(LINKS)]
        for low, high in ((5, 999), (0, 5), (0, 40_000))
    )
    routes = {
        (s, t): tuple(draw.sample(range(LINKS), draw.randint(1, 3)))
        for s in range(size)
        for t in range(size)
        if s != t
    }
    programs = random_programs(draw, size)
    wake = Fraction(draw.choice([0, 3, 17]))
    exact = max_min.run(programs, routes, latency, capacity, Fraction(1), Fraction(2), wake, bursts)
    found = native(
        [codes(p) for p in programs],
        routes,
        [*map(float, latency)],
        [*map(float, capacity)],
        costs=[[1.0, 2.0, *([0.0] * 5), 1.0, *([0.0] * 6), float(wake)]],
        bursts=[*map(float, bursts)],
    )
    assert not found["stuck"]
    assert found["ends"] == pytest.approx([float(end) for end in exact], rel=1e-12)


def test_two_flows_share_a_link_and_the_third_takes_what_the_first_leaves() -> None:
    """Links of 10 and 2 bytes a second: flow 0 crosses both, flow 1 the first one, flow 2 the second one."""
    programs = [
        chunk_code(1.0) + array("i", [SEND, 8, 1, 1, SEND, 8, 1, 2]),
        chunk_code(1.0) + array("i", [RECV, 8, 0]),
        chunk_code(1.0) + array("i", [RECV, 8, 0, RECV, 8, 3]),
        chunk_code(1.0) + array("i", [SEND, 8, 1, 2]),
    ]
    routes = {(0, 1): (0,), (0, 2): (0, 1), (3, 2): (1,)}
    found = native(programs, routes, [0.0, 0.0], [10.0, 2.0])
    assert found["ends"] == pytest.approx([0.0, 8 / 9, 8.0, 0.0])
    (busy, limiting, nbytes), (busy_1, limiting_1, nbytes_1) = found["links"]
    assert (busy, nbytes, nbytes_1) == (8.0, 16.0, 16.0)
    assert (limiting, busy_1, limiting_1) == pytest.approx((8 / 9, 8.0, 8.0))


@pytest.mark.parametrize(
    "block",
    [
        array("i", [99]),
        array("i", [SEND]),
        array("i", [SEND, 1, 5, 1]),
        array("i", [SEND, 1, -1]),
        array("i", [SEND, -1, 1, 1]),
        array("i", [SEND, 1, 1, 0]),
        array("i", [SEND, 1, 1, 7]),
        array("i", [RECV, 1, -3]),
        array("i", [4, 1]),
        array("i", [REDUCE, 1, -1, 1, 1]),
        chunk_code(float("nan")),
        chunk_code(-1.0),
        compute_code(float("inf")),
        compute_code(-1e-9),
        array("i", [10]),
        array("i", [12]),
    ],
)
def test_a_malformed_program_is_an_error(block: array[int]) -> None:
    with pytest.raises(ValueError, match="program"):
        native([block, array("i")], {(0, 1): (0,), (1, 0): (0,)}, [0.0], [1.0])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rates": [-1.0]}, "rate"),
        ({"rates": [float("nan")]}, "rate"),
        ({"costs": []}, "costs"),
        ({"costs": [[1.0]]}, "costs"),
        ({"costs": [[-1.0] * 15]}, "cost"),
        ({"costs_index": [0, 4]}, "costs"),
        ({"costs_index": [0]}, "costs_index"),
        ({"digits": [(3, True)]}, "digits"),
        ({"digits": [(0, True)]}, "digit"),
        ({"bursts": [-1.0]}, "burst"),
        ({"bursts": [0.0, 0.0]}, "bursts"),
        ({"window": 0}, "window"),
        ({"window": 1 << 20}, "window"),
        ({"streams": 0}, "streams"),
        ({"route": lambda *_: (0.0, [(9, 1)])}, "link"),
        ({"route": lambda *_: (-1.0, [])}, "latency"),
    ],
)
def test_a_wrong_argument_is_an_error(given: dict[str, Any], text: str) -> None:
    program = chunk_code(1.0) + array("i", [SEND, 1, 1, 1])
    with pytest.raises(ValueError, match=text):
        native([program, array("i", [RECV, 1, 0])], {(0, 1): (0,)}, [0.0], [1.0], **given)


def test_a_step_that_names_a_rank_twice_is_an_error() -> None:
    """The second message is not there: nothing is read in its place."""
    programs = [
        chunk_code(1.0) + array("i", [REDUCE, 1, 1, 2, 1, 1]),
        chunk_code(1.0) + array("i", [SEND, 1, 1, 0]),
    ]
    with pytest.raises(ValueError, match="names a rank twice"):
        native(programs, {(1, 0): (0,)}, [0.0], [1.0])


def test_a_reduction_of_many_ranks_looks_at_each_message_twice_at_most() -> None:
    """Of 20,000 messages that arrive one after the other: a look at all for each would take minutes."""
    count = 20_000
    programs = [chunk_code(1.0) + array("i", [REDUCE, 1, count, count, *range(1, count + 1)])]
    programs += [compute_code(rank * 1e-6) + chunk_code(1.0) + array("i", [SEND, 1, 1, 0])
                 for rank in range(1, count + 1)]  # fmt: skip
    begun = time.process_time()
    found = native(programs, {(rank, 0): (0,) for rank in range(1, count + 1)}, [0.0], [1e12])
    assert found["ends"][0] == pytest.approx(count * 1e-6, rel=1e-3)
    assert time.process_time() - begun < 10


def test_work_shares_the_cores_of_a_host() -> None:
    """Three ranks on two cores, each with a second of work: a second and a half. One alone gets one core."""
    second = compute_code(1.0)
    shared = {"cores": [(0, 1)] * 3, "costs": [[0.0] * 7 + [1.0] + [0.0] * 7]}
    assert native([second] * 3, {}, [0.0], [2.0], **shared)["ends"] == pytest.approx([1.5] * 3)
    late = [second, compute_code(2.0), array("i")]
    assert native(late, {}, [0.0], [2.0], **shared)["ends"] == pytest.approx([1.0, 2.0, 0.0])
    busy = [compute_code(1.0), compute_code(1.0), compute_code(4.0)]
    assert native(busy, {}, [0.0], [2.0], **shared)["ends"] == pytest.approx([1.5, 1.5, 4.5])


def test_work_for_messages_shares_cores_too() -> None:
    """On one core a sender's overhead and a third rank's work share; the receiver pays when it is alone."""
    send = chunk_code(1.0) + array("i", [SEND, 1, 1, 1])
    programs = [send, array("i", [RECV, 1, 0]), compute_code(2.0)]
    costs = [[2.0, 3.0] + [0.0] * 5 + [1.0] + [0.0] * 7]
    found = native(programs, {(0, 1): ()}, [0.0], [1.0], costs=costs, cores=[(0, 1)] * 3)
    assert found["ends"] == pytest.approx([4.0, 7.0, 4.0])


def test_switches_that_store_and_forward() -> None:
    """Two messages of 4 bytes over links of 2 and 1 bytes a second: 2 + 4 seconds, and 4 for the second."""
    send = chunk_code(4.0) + array("i", [SEND, 1, 1, 1]) + chunk_code(4.0) + array("i", [SEND, 1, 1, 1])
    programs = [send, array("i", [RECV, 1, 0, RECV, 1, 0])]
    routes = {(0, 1): (0, 1)}
    stored = native(programs, routes, [0.5, 0.25], [2.0, 1.0], latencies=[0.5, 0.25])
    assert stored["ends"] == pytest.approx([0.0, 2 + 0.5 + 4 + 4 + 0.25])
    assert native(programs, routes, [0.5, 0.25], [2.0, 1.0])["ends"] == pytest.approx([0.0, 8.75])
    lost = native(programs, routes, [0.5, 0.25], [2.0, 0.0], latencies=[0.5, 0.25])
    assert [stuck[0] for stuck in lost["stuck"]] == [1]
    assert lost["stuck"][0][5] == 1  # the link


def any_step(draw: random.Random) -> list[int]:
    """A step with arguments that may be wrong."""
    count, peer = draw.choice([0, 1, 1, 3]), draw.choice([0, 1, 2, 2, draw.choice([-1, 3])])
    steps = [
        [0, count, 1, peer],
        [1, count, peer],
        [2, count, 1, 1, peer],
        [3, count],
        [6, 5],
        [7, 5],
        [8],
        [2, count, 1, 2, peer, peer],
        [2, count, 1, 2, peer, (peer + 1) % 3],
        [10, count, 1, peer],
        [11],
        [12],
    ]
    return draw.choice(steps[: draw.choice([7, 7, 9, 9, 11, 12])])


def test_any_programs_end_or_are_an_error() -> None:
    draw = random.Random(7)
    routes = {(s, t): (draw.randrange(2),) for s in range(3) for t in range(3)}
    ended = stuck = wrong = 0
    for _ in range(5000):
        programs = [
            array("i", [number for _ in range(draw.randint(0, 4)) for number in any_step(draw)])
            for _ in range(3)
        ]
        try:
            found = native(programs, routes, [0.0, 1.0], [1.0, 0.0], costs=[[1.0] * 15])
        except ValueError:
            wrong += 1
        else:
            stuck += bool(found["stuck"])
            ended += not found["stuck"]
    assert min(ended, stuck, wrong) > 100


def test_an_error_of_a_callback_is_raised() -> None:
    def broken(*_: object) -> None:
        raise KeyError("no route")

    program = chunk_code(1.0) + array("i", [SEND, 1, 1, 1])
    with pytest.raises(KeyError, match="no route"):
        native([program, array("i")], {}, [], [1.0], route=broken)
