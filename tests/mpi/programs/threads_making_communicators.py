"""Threads of every rank make communicators at the same time, each of its own one; so do requests."""

import random
import sys
import threading
import time

from unisono import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
THREADS, ROUNDS = 3, int(sys.argv[1])


def alive(made: MPI.Comm, number: int) -> None:
    """Messages in its context reach this communicator alone; so do collectives, also by the engine."""
    mine, of = made.Get_rank(), made.Get_size()
    got = made.sendrecv((number, mine), (mine + 1) % of, source=(mine - 1) % of)
    assert got == (number, (mine - 1) % of), got
    for _ in range(6):
        assert made.allgather((number, mine)) == [(number, other) for other in range(of)]


def work(own: MPI.Comm, thread: int, failed: list[BaseException]) -> None:
    """One thread's rounds. A rank's threads are in no order that others know."""
    draw = random.Random(100 * rank + thread)
    try:
        for round_ in range(ROUNDS):
            time.sleep(draw.random() * 0.002)
            number = 1000 * thread + round_
            duplicate, part = own.Dup(), own.Split(rank % 2, rank)
            alive(duplicate, number)
            alive(part, number)
            duplicate.Free()
            part.Free()
    except BaseException as error:
        failed.append(error)
        raise


def threads() -> None:
    owns = [comm.Dup() for _ in range(THREADS)]
    failed: list[BaseException] = []
    started = [threading.Thread(target=work, args=(own, n, failed)) for n, own in enumerate(owns)]
    for one in started:
        one.start()
    for one in started:
        one.join()
    assert not failed
    for own in owns:
        own.Free()


def requests() -> None:
    """The ranks wait for them in other orders."""
    owns = [comm.Dup() for _ in range(4)]
    for _ in range(ROUNDS):
        made, waits = zip(*(own.Idup() for own in owns), strict=True)
        order = list(range(len(waits)))
        random.Random(rank).shuffle(order)
        for one in order:
            waits[one].Wait()
        for number, one in enumerate(made):
            alive(one, number)
            one.Free()
    for own in owns:
        own.Free()


requests()
threads()
sys.stdout.write("all is well\n")
