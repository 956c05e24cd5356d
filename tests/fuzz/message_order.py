"""Random messages against the order rules of MPI: sources and tags named or any, contexts, any timing.

    message_order.py --seed 5 --cases 10000     so many rounds

In a round every rank posts receives and sends in a random order, of both at once. Then it cancels the
receives that nothing matched, and takes the messages that nobody wanted. Which receive got which message has
to follow the rules:
    a receive takes the message that came first of those of one source which it matches;
    a message goes to the receive that was posted first of those which it matches;
    no message is left beside a receive that matches it.
Ranks are threads, on one host or as if on several.
"""

import argparse
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import numpy as np

import inside
import ranks
import unisono as un

SIZE = 3
PATIENCE_S = 60.0
NUMELS = (1, 2, 3, 700, 6000, 90_000)  # int64: at once, whole, in pieces, with zero copy
TAGS = (0, 1, 2)


@dataclass
class Message:
    source: int
    target: int
    context: int
    tag: int
    number: int  # among those of its source
    numel: int
    synchronous: bool


@dataclass
class Receive:
    context: int
    source: int | None
    tag: int
    sized: bool

    def matches(self, one: Message) -> bool:
        """Whether it may take the message."""
        return (
            self.context == one.context
            and self.source in (None, one.source)
            and self.tag in (un.ANY_TAG, one.tag)
        )


def plan(draw: random.Random) -> tuple[list[Message], list[list[Receive]]]:
    """The messages of a round, and the receives of each rank."""
    numels = NUMELS if draw.random() < 0.3 else NUMELS[:3]
    messages, receives = [], []
    for number in range(draw.randint(0, 24)):
        place = draw.randrange(SIZE), draw.randrange(SIZE), draw.randrange(3), draw.choice(TAGS)
        messages.append(Message(*place, number, draw.choice(numels), draw.random() < 0.1))
    for _ in range(SIZE):
        wanted = [
            Receive(
                draw.randrange(3),
                draw.choice((None, *range(SIZE))),
                draw.choice((un.ANY_TAG, *TAGS)),
                draw.random() < 0.3,
            )
            for _ in range(draw.randint(0, 16))
        ]
        receives.append(wanted)
    return messages, receives


def number_in(data: Any) -> int:
    """The number of the message of which these are the elements."""
    assert (data == data[0]).all()
    return int(data[0])


def run(
    groups: list[un.Group], messages: list[Message], receives: list[Receive], seed: int
) -> dict[int, int]:
    """This rank's part of a round: which message each of its receives got; -1 - number: nobody wanted it."""
    world, draw = groups[0], random.Random(seed)
    mine = [one for one in messages if one.source == world.rank]
    works: list[tuple[int, Any, Any]] = []
    sends: list[Any] = []
    todo = ["send"] * len(mine) + ["receive"] * len(receives)
    draw.shuffle(todo)
    for kind in todo:
        if kind == "send":
            one = mine[len(sends)]
            x = np.full(one.numel, one.number)
            work = groups[one.context].isend(x, one.target, one.tag, synchronous=one.synchronous)
            sends.append(work)
        else:
            place = len(works)
            wanted, buffer = receives[place], np.empty(max(NUMELS), np.int64)
            group = groups[wanted.context]
            if wanted.sized:
                works.append((place, group.irecv_bytes(wanted.source, wanted.tag), None))
            else:
                works.append((place, group.irecv(buffer, wanted.source, wanted.tag), buffer))
        if draw.random() < 0.1:
            groups[draw.randrange(3)].iprobe(None, un.ANY_TAG)
    world.barrier()  # everything has been posted
    return settle(groups, messages, works, sends)


def settle(
    groups: list[un.Group], messages: list[Message], works: list[Any], sends: list[Any]
) -> dict[int, int]:
    """Wait until all messages have come, cancel the other receives, take the other messages."""
    world, got = groups[0], {}
    expected = sum(one.target == world.rank for one in messages)
    end = time.monotonic() + PATIENCE_S
    while sum(work.done() for _, work, _ in works) + len(inside.engine(world).unexpected()) < expected:
        assert time.monotonic() < end, "a message did not come"
        world.iprobe(world.rank, 9)
    world.iprobe(world.rank, 9)  # matches what has come since
    for place, work, buffer in works:
        if work.cancel():
            continue
        work.wait(PATIENCE_S)
        data = work.result().view(np.int64) if buffer is None else buffer[: work.status.numel]
        one = messages[number_in(data)]
        assert (work.status.source, work.status.tag, len(data)) == (one.source, one.tag, one.numel)
        got[place] = one.number
    for context, group in enumerate(groups):
        while (status := group.iprobe(None, un.ANY_TAG)) is not None:
            data, found = group.recv_bytes(status.source, status.tag)
            number = number_in(data.view(np.int64))
            assert (found, messages[number].context) == (status, context)
            got[-1 - number] = number
    for work in sends:
        work.wait(PATIENCE_S)
    world.barrier()
    return got


def check(messages: list[Message], receives: list[Receive], got: dict[int, int], rank: int) -> None:
    """Raises AssertionError: this rank's receives broke a rule."""
    taker = {number: place for place, number in got.items()}
    mine = [one for one in messages if one.target == rank]
    assert sorted(taker) == [one.number for one in mine], "not every message came once"
    for place, wanted in enumerate(receives):
        taken = messages[got[place]] if place in got else None
        assert taken is None or wanted.matches(taken), f"receive {place} matches not what it got"
        for one in filter(wanted.matches, mine):
            by = taker[one.number]
            if by == place:
                continue
            if taken is None:
                assert 0 <= by < place, f"message {one.number} passed receive {place}, which got none"
            elif taken.source == one.source and one.number < taken.number:
                assert 0 <= by < place, f"receive {place} got {taken.number} before {one.number}"


def play(seed: int, rounds: int, per_host: int | None) -> None:
    """Run rounds on one job."""
    worlds = ranks.groups(SIZE, timeout_s=PATIENCE_S, per_host=per_host)

    def work(world: un.Group) -> None:
        with world:
            groups = [world, world.duplicate(), world.duplicate()]
            for number in range(rounds):
                messages, receives = plan(random.Random(seed * 1_000_003 + number))
                mine = receives[world.rank]
                got = run(groups, messages, mine, seed + 7 * number + world.rank)
                try:
                    check(messages, mine, got, world.rank)
                except AssertionError as error:
                    print(f"--seed {seed}, round {number}, rank {world.rank}: {error}", flush=True)
                    raise

    with ThreadPoolExecutor(SIZE) as pool:
        list(pool.map(work, worlds))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=10_000)
    args = parser.parse_args()
    for per_host in (None, 1, 2):
        play(args.seed, args.cases // 3 + 1, per_host)
    print(f"{args.cases} rounds follow the rules")


if __name__ == "__main__":
    main()
