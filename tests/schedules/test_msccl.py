"""MSCCL's XML: what it means, every algorithm there and back, wrong schedules refused with rank and step."""

import random
from collections.abc import Iterator

import pytest

from effort import cases
from loops import each
from unisono.engine.costs import plan_cost
from unisono.errors import PlanError
from unisono.plans import ALGORITHMS, CONTRACTS, Plan, Recv, Reduce, Send, make, prove
from unisono.schedules.msccl import parse_algorithm
from unisono.schedules.msccl_writer import msccl
from unisono.schedules.translation import plan_of

CATALOGUE = [(collective, name) for collective in ALGORITHMS for name in ALGORITHMS[collective]]


def read(text: str) -> Plan:
    return plan_of(parse_algorithm(text.encode(), "s.xml"))


def step(
    number: int, kind: str, source: str, target: str, count: int = 1, waits: tuple[int, int] = (-1, -1)
) -> str:
    return (
        f'<step s="{number}" type="{kind}" srcbuf="{source[0]}" srcoff="{source[1:]}" dstbuf="{target[0]}" '
        f'dstoff="{target[1:]}" cnt="{count}" depid="{waits[0]}" deps="{waits[1]}" hasdep="0"/>'
    )


def steps(*kinds: str) -> list[str]:
    """Steps on the one chunk of the input."""
    return [step(number, kind, "i0", "i0") for number, kind in enumerate(kinds)]


def algo(coll: str, chunks: int, gpus: list[list[tuple[int, int, int, list[str]]]], in_place: int = 1) -> str:
    """gpus: for each, thread blocks of (send, recv, channel, steps)."""
    lines = [
        f'<algo name="t" nchunksperloop="{chunks}" ngpus="{len(gpus)}" coll="{coll}" inplace="{in_place}">'
    ]
    for rank, blocks in enumerate(gpus):
        lines.append(
            f'<gpu id="{rank}" i_chunks="{chunks}" o_chunks="{chunks}" s_chunks="{chunks * len(gpus)}">'
        )
        for number, (send, recv, channel, steps) in enumerate(blocks):
            lines += [f'<tb id="{number}" send="{send}" recv="{recv}" chan="{channel}">', *steps, "</tb>"]
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


def ring(size: int, channels: int = 1) -> str:
    """The ring of msccl-tools: rrs on the way round, rrcs where the sum is complete, rcs on the way back."""
    gpus = []
    for rank in range(size):
        blocks = []
        for channel in range(channels):
            place = [f"i{(rank - number) % size * channels + channel}" for number in range(size)]
            steps = [step(0, "s", place[0], place[0])]
            steps += [step(n, "rrs", place[n], place[n]) for n in range(1, size - 1)]
            steps.append(step(size - 1, "rrcs", place[size - 1], place[size - 1]))
            steps += [step(size + n, "rcs", place[n], place[n]) for n in range(size - 2)]
            steps.append(step(2 * size - 2, "r", place[size - 2], place[size - 2]))
            blocks.append(((rank + 1) % size, (rank - 1) % size, channel, steps))
        gpus.append(blocks)
    return algo("allreduce", size * channels, gpus)


def all_pairs(size: int) -> str:
    """Every rank gets its chunk of all others in scratch memory, adds them there (re), and sends the sum."""
    gpus = []
    for rank in range(size):
        others = [peer for peer in range(size) if peer != rank]
        blocks = [
            (peer, peer, 0, [step(0, "s", f"i{peer}", f"s{rank}"), step(1, "r", f"i{rank}", f"s{peer}")])
            for peer in others
        ]
        adds = [step(n, "re", f"s{peer}", f"i{rank}", 1, (n, 1)) for n, peer in enumerate(others)]
        back = [
            (peer, peer, 1, [
                step(0, "s", f"i{rank}", f"i{rank}", 1, (size - 1, size - 2)),
                step(1, "r", f"i{peer}", f"i{peer}"),
            ])
            for peer in others
        ]  # fmt: skip
        gpus.append([*blocks, (-1, -1, 0, adds), *back])
    return algo("allreduce", size, gpus)


@each("size", cases([2, 3, 4, 6, 8], long=[5, 7, 9]))
@each("collective, algorithm", CATALOGUE)
def test_every_algorithm_comes_back_as_good_as_it_was(collective: str, algorithm: str, size: int) -> None:
    for plan in variants(collective, algorithm, size):
        again = read(msccl(plan))
        proof = prove(again)
        assert messages(again) == messages(plan)
        assert plan_cost.rounds(again) <= plan_cost.rounds(plan)
        assert proof.canonical or not prove(plan).canonical


def variants(collective: str, algorithm: str, size: int) -> Iterator[Plan]:
    roots = {0, size - 1} if CONTRACTS[collective].rooted else {0}
    for root in roots:
        for hosts in ((), tuple(rank // 2 for rank in range(size))):
            try:
                plan = make(collective, algorithm, size, root, hosts)
            except PlanError:
                continue
            yield plan


def messages(plan: Plan) -> int:
    return sum(len(each.to) for steps in plan.steps for each in steps if isinstance(each, Send))


@each("size", [2, 3, 4, 8])
@each("channels", [1, 2, 5])
def test_a_ring_on_channels(size: int, channels: int) -> None:
    plan = read(ring(size, channels))
    prove(plan)
    assert messages(plan) == 2 * (size - 1) * size * channels
    if channels == 1:
        assert plan_cost.rounds(plan) == 2 * (size - 1)


@each("size", [2, 3, 4, 8])
def test_what_waits_in_scratch_memory_is_added_in_one_step(size: int) -> None:
    plan = read(all_pairs(size))
    assert prove(plan).canonical
    reduces = [each for each in plan.steps[0] if isinstance(each, Reduce)]
    assert [each.frm for each in reduces] == [tuple(range(size))]
    assert plan.chunks("tmp") == 0


def test_many_messages_on_an_edge_take_turns() -> None:
    plan = read(ring(3, 24))
    prove(plan)  # an edge holds sixteen


def test_blocks_in_parts() -> None:
    gpus = []
    for rank in range(2):
        steps = [step(0, "s", f"o{2 * rank}", f"o{2 * rank}", 2), step(1, "r", "i0", f"o{2 - 2 * rank}", 2)]
        gpus.append([(1 - rank, 1 - rank, 0, steps)])
    plan = read(algo("allgather", 4, gpus))
    assert plan.parts == 2
    prove(plan)
    received = [each.chunk.index for each in plan.steps[0] if isinstance(each, Recv)]
    assert received == [2, 3]


def test_out_of_place_saves_what_is_still_read() -> None:
    gpus = [
        [(1 - rank, 1 - rank, 0, [
            step(0, "cpy", "i0", "s0"), step(1, "s", "i0", "o0"), step(2, "r", "i0", "o0"),
            step(3, "s", "s0", "s1"), step(4, "rrc", "o0", "s1"),
        ])]
        for rank in range(2)
    ]  # fmt: skip
    with pytest.raises(PlanError):  # twice the same contribution: it is understood, and refused
        prove(read(algo("allreduce", 1, gpus, 0)))


@each(
    "blocks, says",
    [
        (steps("s"), "never takes 1 of the messages"),
        (steps("r", "s"), "deadlock: rank 0, thread block 0, step 0"),
        (steps("s", "r"), "lacks the contribution of rank"),
        ([step(0, "s", "s1", "i0"), step(1, "r", "i0", "i0")], "reads s[1] before it is written"),
        ([step(0, "s", "i0", "i0", 1, (0, 0)), step(1, "r", "i0", "i0")], "deadlock"),
        (steps("re", "s", "r"), "adds messages only"),
        (steps("s", "rrc", "s", "rrc"), "comes in twice"),
    ],
)
def test_a_wrong_schedule_is_refused_with_its_rank(blocks: list[str], says: str) -> None:
    gpus = [[(1 - rank, 1 - rank, 0, blocks)] for rank in range(2)]
    with pytest.raises(PlanError) as caught:
        prove(read(algo("allreduce", 1, gpus)))
    assert says in str(caught.value)
    assert "rank" in str(caught.value)


def test_a_missing_dependency_is_a_race() -> None:
    text = all_pairs(3)
    prove(read(text))
    racy = text.replace('depid="2" deps="1"', 'depid="-1" deps="-1"')
    assert racy != text
    with pytest.raises(PlanError, match="nothing orders the two: it lacks a dependency"):
        read(racy)


@each(
    "before, after, line, says",
    [
        ('type="s"', 'type="moon"', 4, "expected one of s, r"),
        ('recv="1"', 'recv="-1"', 5, "receives, but"),
        ('send="1"', 'send="0"', 3, "itself"),
        ('srcoff="0"', 'srcoff="-3"', 4, "srcoff is -3"),
        ('srcoff="0"', 'srcoff="77"', 4, "beyond the 1 chunks of i"),
        ('srcoff="0"', 'srcoff="99999999999999999999"', 4, "expected a whole number"),
        ('cnt="1"', 'cnt="100000"', 4, "cnt is 100000"),
        ('depid="-1" deps="-1"', 'depid="5" deps="0"', 4, "no step 0 in thread block 5"),
        ('ngpus="2"', 'ngpus="3"', 1, "no <gpu> with id 2"),
        ('id="1"', 'id="0"', 8, "second one with id 0"),
        ('srcbuf="i"', 'srcbuf="x"', 4, "expected i, o or s"),
        ("</tb>", "", 7, "mismatched tag"),
        ("<algo", "<moon", 1, "expected <algo>"),
    ],
)
def test_a_damaged_file_names_its_line(before: str, after: str, line: int, says: str) -> None:
    gpus = [[(1 - rank, 1 - rank, 0, steps("s", "rrc"))] for rank in range(2)]
    text = algo("allreduce", 1, gpus)
    assert before in text
    with pytest.raises(ValueError, match=rf"^s\.xml:{line}: ") as caught:
        read(text.replace(before, after, 1))
    assert says in str(caught.value)


def test_entities_do_not_expand() -> None:
    bomb = '<!DOCTYPE algo [<!ENTITY a "aaaaaaaaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]><algo name="&b;"/>'
    with pytest.raises(ValueError, match="declares an entity"):
        read(bomb)


def test_files_damaged_at_random_are_refused_or_proved() -> None:
    """What is accepted has been proved: nothing wrong can pass, and nothing else than an error comes out."""
    choice = random.Random(7)
    texts = [
        ring(3),
        all_pairs(3),
        msccl(make("all_gather", "bruck", 5)),
        msccl(make("reduce", "binomial", 4, 3)),
    ]
    outcomes = set()
    for _ in range(600):
        text = choice.choice(texts)
        for _ in range(choice.choice((1, 1, 2))):
            at = choice.randrange(len(text))
            numbers = [n for n, letter in enumerate(text) if letter.isdigit()]
            if choice.random() < 0.7:
                at = choice.choice(numbers)
                text = text[:at] + choice.choice("0123456789") + text[at + 1 :]
            else:
                text = (
                    text[:at]
                    + choice.choice(("", "-", "<", '"', "é", "0" * 30))
                    + text[at + choice.randrange(9) :]
                )
        try:
            prove(read(text))
            outcomes.add("proved")
        except PlanError:
            outcomes.add("refused")
        except ValueError:
            outcomes.add("damaged")
    assert outcomes == {"proved", "refused", "damaged"}
