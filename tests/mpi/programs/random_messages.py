"""Random sequences of sends and receives against the rules of MPI about their order.

All ranks draw the same program from a seed: a list of messages with a communicator, tag, size and mode, and
for each receiver the order of its receives, some with wildcards. The model: a receive gets the first message
sent to it, of those not yet received, that its source, tag and communicator match; between one pair of ranks.
"""

import random
import sys

import numpy as np

from unisono import MPI

ROUNDS = int(sys.argv[1])
world = MPI.COMM_WORLD
comms = [world, world.Dup()]


def draw(seed: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """(messages: source, destination, communicator, tag, bytes, mode; receives by message number)."""
    rng = random.Random(seed)
    size = world.size
    messages = []
    for number in range(rng.randint(1, 24)):
        source, target = rng.randrange(size), rng.randrange(size)
        nbytes = rng.choice([1, 8, 100, 5000, 70000, 300000])
        messages.append(
            (source, target, rng.randrange(2), rng.randrange(3), nbytes, rng.randrange(4), number)
        )
    return messages, [(rng.random() < 0.3, rng.random() < 0.3) for _ in messages]


def run(seed: int) -> None:
    messages, wild = draw(seed)
    requests, expected = [], []
    mine = [one for one in messages if one[1] == world.rank]
    # Receives are posted in an order that deadlocks nobody: all at once, before or after the sends.
    posted_first = seed % 2 == 0
    order = list(mine)
    random.Random(seed + world.rank).shuffle(order)

    def post() -> None:
        left = list(mine)
        for one in order:
            any_tag = wild[one[6]][0]
            # What it gets: the first message of this source and communicator that its tag matches.
            fits = [m for m in left if m[0] == one[0] and m[2] == one[2] and (any_tag or m[3] == one[3])]
            if not fits:
                continue
            left.remove(fits[0])
            buffer = np.zeros(300000, np.uint8)
            tag = MPI.ANY_TAG if any_tag else one[3]
            requests.append(comms[one[2]].Irecv(buffer, one[0], tag))
            expected.append((fits[0], buffer))
        for one in left:  # those whose receives had been drawn for other messages
            buffer = np.zeros(300000, np.uint8)
            requests.append(comms[one[2]].Irecv(buffer, one[0], one[3]))
            expected.append((one, buffer))

    if posted_first:
        post()
    sends = []
    for source, target, comm, tag, nbytes, mode, number in messages:
        if source == world.rank:
            data = np.full(nbytes, number, np.uint8)
            call = (comms[comm].Isend, comms[comm].Issend, comms[comm].Ibsend, comms[comm].Isend)[mode]
            sends.append(call(data, target, tag))
    if not posted_first:
        post()
    statuses = [MPI.Status() for _ in requests]
    MPI.Request.Waitall(requests, statuses)
    MPI.Request.Waitall(sends)
    for status, ((source, _, _, tag, nbytes, _, number), buffer) in zip(statuses, expected, strict=True):
        assert (status.source, status.tag, status.count) == (source, tag, nbytes), (seed, number)
        assert (buffer[:nbytes] == number).all() and not buffer[nbytes:].any(), (seed, number)


for seed in range(ROUNDS):
    run(seed)
    if seed % 8 == 0:  # otherwise rounds overlap
        world.Barrier()
world.Barrier()
print("all is well")
