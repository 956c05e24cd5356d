"""The launcher with one of its moments made to happen: `launcher_program.py NAME`, then words of `unisono`.

What these need of the launcher's own is named here, once.
"""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.commands import cli
from unisono.commands.launch import frontend, nodes, process, supervisor
from unisono.commands.launch.job import Assignment, Job
from unisono.commands.launch.nodes import NodeRendezvous
from unisono.commands.launch.process import SignalEscalation, children
from unisono.commands.launch.supervisor import Supervisor


def another_thread_takes_it() -> None:
    assign = frontend._assign

    def take_a_signal() -> None:
        time.sleep(0.5)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    def assign_and_go_on(*given: Any) -> None:
        assign(*given)
        threading.Thread(target=take_a_signal, daemon=True).start()

    frontend._assign = assign_and_go_on


def no_process_adopts_orphans() -> None:
    sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))
    import sandbox

    sandbox.refuse("adopt")


def a_storm_of_ends_comes_first() -> None:
    start = Supervisor._start_ranks

    def start_in_a_storm(ours: Supervisor) -> None:
        start(ours)
        for _ in range(2000):
            signal.raise_signal(signal.SIGCHLD)
        signal.raise_signal(signal.SIGTERM)

    Supervisor._start_ranks = start_in_a_storm  # type: ignore[method-assign]


def a_second_signal_while_cleaning_up() -> None:
    close, own = os.close, os.getpid()

    def close_late(fd: int) -> None:
        close(fd)
        if os.getpid() == own and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            signal.raise_signal(signal.SIGINT)

    def interrupted(nodes: NodeRendezvous, port: int) -> None:
        os.close = close_late
        signal.raise_signal(signal.SIGINT)

    NodeRendezvous.meet = interrupted  # type: ignore[assignment,method-assign]


def one_dies_before_it_is_asked() -> None:
    pop = SignalEscalation.pop

    def pop_late(escalation: SignalEscalation, now: float) -> int | None:
        number = pop(escalation, now)
        if number == signal.SIGTERM:
            for pid in children():
                os.kill(pid, signal.SIGUSR1)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return number

    SignalEscalation.pop = pop_late  # type: ignore[method-assign]


def the_next_ends_behind_the_look() -> None:
    reap = Supervisor._reap

    def reap_and_wait_for_the_next_to_end(ours: Supervisor) -> None:
        reap(ours)
        if ours._living():
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)

    Supervisor._reap = reap_and_wait_for_the_next_to_end  # type: ignore[method-assign]


def the_end_comes_with_the_assignment() -> None:
    read, write = os.pipe()
    assignment = Assignment("127.0.0.1:1", 1, 0, 1)
    os.write(write, json.dumps(dataclasses.asdict(assignment)).encode() + b"\nend\n")
    sys.exit(
        frontend._supervise(Job(("sleep", "300"), 1, (3,), (0,), grace_s=0.1), dict(os.environ), read, -1)
    )


def silence_is_soon_told() -> None:
    nodes.SILENT_S = 4.0


def no_kill_was_to_come() -> None:
    process.KILL_AGAIN = []


def it_cannot_be_signalled() -> None:
    supervisor.AFTER_FAILURE_S = 0.1
    process.TELL_S, process.LEAVE_S = 0.1, 0.3

    def protect(send: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def send_to_others(pid: int, number: int) -> None:
            with open(f"/proc/{pid}/cmdline", "rb") as words:
                if b"protected" in words.read():
                    raise PermissionError(1, "Operation not permitted")
            send(pid, number)

        return send_to_others

    os.kill, os.killpg = protect(os.kill), protect(os.killpg)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    sys.exit(cli.main(sys.argv[2:]))
