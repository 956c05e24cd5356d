"""Random programs of messages whose buffers overlap, against a model: nothing wrong in silence, no wait.

    shared_memory_messages.py --seed 5 --cases 1000     so many programs
    shared_memory_messages.py --seed 5 --case 17        that one alone

Every rank has one piece of memory, plain, shared, mapped from a file or a bytearray; all buffers are parts of
it. A program is a list of rounds. In a round, ranks exchange parts in place, post sends and then receives
over them in any order of tags, or one rank makes a call that has no meaning: it raises, and nothing changes.
The model copies what each part holds before the round. Ranks are threads, on one host or as if on several.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import numpy as np

import ranks
import unisono as un

PATIENCE_S = 30.0
LENGTHS = (0, 1, 3, 5, 6, 40, 1000, 5000, 5000, 70_000, 70_000)  # 70,000 float64 are sent with zero copy
MANY = 5_000_000  # 40 MB: offered before it is sent
MEMORIES = ("plain", "shared", "mapped", "bytes")

Slice = tuple[int, int]  # start, length
Memory = Any  # an array of float64


@dataclass
class Message:
    source: int
    target: int
    tag: int
    sent: Slice
    received: Slice
    anybody: bool  # the receive names no source


@dataclass
class Round:
    """form: "sendrecv", "batch", "isend" (then irecv), "refused" (only `rank` and `call` count)."""

    form: str
    messages: list[Message] = field(default_factory=list)
    order: int = 0  # a seed: in which order each rank posts and waits
    rank: int = 0
    call: str = ""


@dataclass
class Program:
    size: int
    per_host: int
    zero_copy: bool
    numel: int
    memories: list[str]
    rounds: list[Round]


# ---- making programs ------------------------------------------------------------------------------------


def program(seed: int) -> Program:
    """A random one."""
    draw = random.Random(seed)
    size, per_host = draw.choice([(2, 0), (2, 0), (3, 0), (4, 0), (2, 1), (3, 1), (4, 2)])
    large = draw.random() < 0.03
    lengths = (MANY,) if large else LENGTHS
    numel = MANY + 1000 if large else draw.choice([64, 6000, 150_000])
    count = 2 if large else draw.randint(2, 8)
    rounds = [_round(draw, size, numel, lengths, 100 + number) for number in range(count)]
    memories = [draw.choice(MEMORIES) for _ in range(size)]
    return Program(size, per_host, draw.random() < 0.8, numel, memories, rounds)


def _round(draw: random.Random, size: int, numel: int, lengths: tuple[int, ...], own_tag: int) -> Round:
    form = draw.choice(["sendrecv", "batch", "isend", "isend", "refused"])
    made = Round(form, order=draw.getrandbits(32), rank=draw.randrange(size), call=draw.choice(REFUSED))
    if form == "refused":
        return made
    if form == "sendrecv":  # each rank sends to the next one of a circle, in one length
        circle = draw.sample(range(size), size)
        length = min(draw.choice(lengths), numel)
        for source, target in zip(circle, circle[1:] + circle[:1], strict=True):
            sent, received = _slice(draw, numel, length), _slice(draw, numel, length)
            made.messages.append(Message(source, target, own_tag, sent, received, draw.random() < 0.3))
        return made
    for tag in range(draw.randint(1, 2 if MANY in lengths else 6)):
        source, target = draw.randrange(size), draw.randrange(size)
        length = min(draw.choice(lengths), numel // 2 if MANY not in lengths else numel)
        message = Message(
            source, target, tag, _slice(draw, numel, length), _slice(draw, numel, length), False
        )
        if not _two_share(
            [one.received for one in made.messages if one.target == target] + [message.received]
        ):
            made.messages.append(message)
    return made


def _slice(draw: random.Random, numel: int, length: int) -> Slice:
    return draw.choice([0, draw.randint(0, numel - length), min(1, numel - length)]), length


def _two_share(slices: list[Slice]) -> bool:
    filled = sorted(one for one in slices if one[1])
    return any(start + length > following for (start, length), (following, _) in pairwise(filled))


# ---- the model ------------------------------------------------------------------------------------------


def beginning(numel: int, rank: int) -> Memory:
    """What the memory of a rank holds first: each number once in the job."""
    return np.arange(numel, dtype=np.float64) + rank * numel


def after(made: Round, memories: list[Memory]) -> list[Memory]:
    """The memories after a round: each message carries what its part held before."""
    result = [memory.copy() for memory in memories]
    for one in made.messages:
        result[one.target][_part(one.received)] = memories[one.source][_part(one.sent)]
    return result


def _part(part: Slice) -> slice:
    return slice(part[0], part[0] + part[1])


# ---- running programs -----------------------------------------------------------------------------------


@contextmanager
def memory_of(kind: str, numel: int, rank: int) -> Any:
    """Memory of that kind, filled."""
    with tempfile.NamedTemporaryFile() as file:
        if kind == "mapped":
            x = np.memmap(file.name, np.float64, "w+", shape=numel)
        elif kind == "bytes":
            x = np.frombuffer(bytearray(8 * numel))
        else:
            x = un.empty(numel) if kind == "shared" else np.empty(numel)
        x[...] = beginning(numel, rank)
        yield x


def run_round(group: un.Group, made: Round, x: Memory) -> None:
    """This rank's part of a round."""
    me, draw = group.rank, random.Random(made.order + group.rank)
    if made.form == "refused":
        if me == made.rank:
            _refused(group, made.call, x)
        return
    sends = [one for one in made.messages if one.source == me]
    receives = [one for one in made.messages if one.target == me]
    draw.shuffle(sends)
    draw.shuffle(receives)
    if made.form == "sendrecv":
        (send,), (receive,) = sends, receives
        source = None if receive.anybody else receive.source
        group.sendrecv(x[_part(send.sent)], send.target, x[_part(receive.received)], source, send.tag)
        return
    if made.form == "batch":
        batch: list[Any] = [un.SendTo(x[_part(one.sent)], one.target, one.tag) for one in sends]
        batch += [un.RecvFrom(x[_part(one.received)], one.source, one.tag) for one in receives]
        draw.shuffle(batch)
        works = group.batch(batch)
    else:
        works = [group.isend(x[_part(one.sent)], one.target, one.tag) for one in sends]
        works += [group.irecv(x[_part(one.received)], one.source, one.tag) for one in receives]
    draw.shuffle(works)
    un.wait_all(works)


def _while_receiving(call: Callable[[un.Group, Memory], object]) -> Callable[[un.Group, Memory], object]:
    """Makes a call while a receive into the first half of x is under way; the receive is cancelled."""

    def made(group: un.Group, x: Memory) -> object:
        work = group.irecv(x[: len(x) // 2], group.rank, 99)
        try:
            return call(group, x)
        finally:
            assert work.cancel()

    return made


def _read_only(x: Memory) -> Memory:
    view = x[:]
    view.flags.writeable = False
    return view


CALLS: dict[str, tuple[type[Exception], Callable[[un.Group, Memory], object]]] = {
    "two receives of a batch": (
        ValueError,
        lambda group, x: group.batch([un.RecvFrom(x[:9], 0, 1), un.RecvFrom(x[8:], 0, 2)]),
    ),
    "a receive under a receive": (ValueError, _while_receiving(lambda group, x: group.irecv(x, 0, 98))),
    "recv under a receive": (ValueError, _while_receiving(lambda group, x: group.recv(x[1:3], 0, 98))),
    "isend under a receive": (ValueError, _while_receiving(lambda group, x: group.isend(x[3:], 0, 98))),
    "send under a receive": (ValueError, _while_receiving(lambda group, x: group.send(x[3:5], 0, 98))),
    "sendrecv under a receive": (
        ValueError,
        _while_receiving(lambda group, x: group.sendrecv(x[:4], 0, x[-4:], 0, 98)),
    ),
    "batch under a receive": (
        ValueError,
        _while_receiving(lambda group, x: group.batch([un.RecvFrom(x[-4:], 0, 98), un.SendTo(x[:1], 0, 98)])),
    ),
    "a strided send under a receive": (
        ValueError,
        _while_receiving(lambda group, x: group.send(x[::-2], 0, 98)),
    ),
    "a strided receive": (ValueError, _while_receiving(lambda group, x: group.recv(x[::2], 0, 98))),
    "a read-only receive": (ValueError, lambda group, x: group.irecv(_read_only(x), 0, 98)),
    "a read-only sendrecv": (ValueError, lambda group, x: group.sendrecv(x, 0, _read_only(x), 0, 98)),
    "a masked send": (TypeError, lambda group, x: group.isend(np.ma.array(x, mask=x > 1), 0, 98)),
    "a masked receive": (TypeError, lambda group, x: group.irecv(np.ma.array(x, mask=x > 1), 0, 98)),
}
REFUSED = list(CALLS)


def _refused(group: un.Group, call: str, x: Memory) -> None:
    error, make = CALLS[call]
    try:
        make(group, x)
    except error:
        return
    raise AssertionError(f"{call} was not refused")


def run(made: Program) -> list[str]:
    """Run a program; what is wrong with it."""
    wrong: list[str] = []
    states = [[beginning(made.numel, rank) for rank in range(made.size)]]
    for one in made.rounds:
        states.append(after(one, states[-1]))

    def work(group: un.Group) -> None:
        try:
            with group, memory_of(made.memories[group.rank], made.numel, group.rank) as x:
                for number, one in enumerate(made.rounds):
                    run_round(group, one, x)
                    differs = np.flatnonzero(x != states[number + 1][group.rank])
                    if differs.size:
                        raise AssertionError(f"{differs.size} numbers differ from {differs[0]} on")
                group.barrier()  # nobody leaves before the others have its messages
        except BaseException as error:
            wrong.append(f"rank {group.rank}: {type(error).__name__}: {error}")

    groups = ranks.groups(
        made.size, timeout_s=PATIENCE_S, per_host=made.per_host or None, zero_copy=made.zero_copy
    )
    threads = [threading.Thread(target=work, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 2 * PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    waiting = [f"rank {rank} waits" for rank, thread in enumerate(threads) if thread.is_alive()]
    return waiting + wrong


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--case", type=int, help="only this one")
    args = parser.parse_args()
    numbers = range(args.cases) if args.case is None else [args.case]
    for number in numbers:
        made = program(args.seed * 1_000_003 + number)
        if args.case is not None:
            print(made)
        wrong = run(made)
        if wrong:
            print(f"--seed {args.seed} --case {number}:", *wrong, sep="\n  ", flush=True)
            sys.exit(1)
    print(f"{len(numbers)} programs as the model says")


if __name__ == "__main__":
    main()
