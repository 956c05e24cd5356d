"""What a launcher shows of its ranks, on this process's stdout and stderr. Run by test_launch.py.

`shows_on_a_console.py CASE`: a case is a function of the screen, which writes from its end on.
"""

import os
import selectors
import sys
import threading
import time

from unisono.commands.launch.console import LONGEST_LINE_NBYTES, Console, OutputStreams, RankStream
from unisono.commands.launch.job import Job

LIMIT_S = 600.0


def lines_of_two(screen: Console) -> None:
    screen.show(1, b"A ", b"one ")
    screen.show(1, b"A ", b"line\ntwo ")
    screen.show(1, b"B ", b"x\n")
    screen.show(1, b"A ", b"lines\n")
    screen.show(2, b"B ", b"y")
    screen.say("done")


def progress_bar(screen: Console) -> None:
    screen.show(2, b"A ", b"\r10%")


def lines_of_a_stream(screen: Console) -> None:
    read, write = os.pipe()
    with open(read, "rb", buffering=0) as reader, open(write, "wb", buffering=0) as writer:
        stream = RankStream(reader, 2, b"A ", screen=screen, shown=True, log=None)
        writer.write(b"begun ")
        stream.pump()
        assert screen.backlog_nbytes == 0
        assert stream.partial_due() is None
        writer.write(b"and ended\nagain")
        stream.pump()
        assert screen.backlog_nbytes == len(b"A begun and ended\n")
        writer.close()
        stream.pump()
        assert not stream.open
        assert stream.tail == b"begun and ended\nagain"


def line_without_end(screen: Console) -> None:
    read, write = os.pipe()
    with open(read, "rb", buffering=0) as reader, open(write, "wb", buffering=0) as writer:
        stream = RankStream(reader, 1, b"A ", screen=screen, shown=True, log=None)
        feeder = feeding(writer, b"x" * (LONGEST_LINE_NBYTES + 100_000))
        while stream.open:
            stream.pump()
        feeder.join()


def more_than_is_taken(screen: Console) -> None:
    """Nothing is read from the ranks while the console is behind; all of it once it has caught up."""
    read, write = os.pipe()
    job = Job(command=("x",), world_size=1, shown=(3,), logged=(0,))
    with (
        selectors.DefaultSelector() as selector,
        open(read, "rb", buffering=0) as reader,
        open(write, "wb", buffering=0) as writer,
    ):
        streams = OutputStreams(job, screen, selector)
        streams.add(0, 0, reader, 1)
        feeder = feeding(writer, b"x\n" * (4 << 20))
        while selector.get_map():
            pump(selector)
        assert screen.backlog_nbytes > 4 << 20
        assert any(streams.open())
        screen.start()
        while any(streams.open()):
            pump(selector)
            streams.resume_if_drained()
        feeder.join()


def feeding(writer, data: bytes) -> threading.Thread:
    thread = threading.Thread(target=lambda: (writer.write(data), writer.close()))
    thread.start()
    return thread


def pump(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select(0.01):
        key.data()


def main(case: str) -> None:
    screen = Console(color=False, on_progress=lambda: None)
    globals()[case](screen)
    if case != more_than_is_taken.__name__:
        screen.start()
    end = time.monotonic() + LIMIT_S
    while screen.backlog_nbytes:
        assert time.monotonic() < end
        time.sleep(0.001)


if __name__ == "__main__":
    main(sys.argv[1])
