"""The process that starts the ranks, waits for them, shows their output and ends the job.

One event loop without polling: signals, the ranks' pipes and the front process wake it.
It ends only after every process below it has.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping

import msgspec

from unisono.commands.launch.console import Console, OutputStreams
from unisono.commands.launch.elastic import ElasticRanks
from unisono.commands.launch.failures import JobFailures, RankProcess, exit_status
from unisono.commands.launch.job import Assignment, Job, rank_environment
from unisono.commands.launch.mpi_imports import MpiImports
from unisono.commands.launch.process import (
    AFTER_FAILURE_S,
    AFTER_INTERRUPT_S,
    AFTER_SIGNAL_S,
    STRAYS_IN_A_HURRY_S,
    TELL_S,
    SignalEscalation,
    StatusBoard,
    become_subreaper,
    children,
    end_children,
    ends_of_relays,
    ends_of_strays,
    relays,
    signal_rank,
    signal_strays,
    start,
    undying,
)
from unisono.engine.base.limits import is_limit, limit_text, usable_cores
from unisono.engine.diagnosis.fault_text import signal_name
from unisono.engine.environment import env

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # they end the job
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)  # they are for the ranks
FORWARDED = (*STOPPING, *PASSED_ON, signal.SIGTSTP)  # what the front process sends here

REPEATED_S = 0.3  # a second signal within this time is the same one: terminal and wrapper both sent it
DRAIN_S = 0.3  # an interrupted job waits this long for a blocked console


class Supervisor:
    """Runs one job. It needs a process of its own: it takes over signals and adopts orphans."""

    def __init__(self, job: Job, base: Mapping[str, str], front_fd: int, news_fd: int = -1) -> None:
        self._job = job
        self._base = base
        self._news_fd = news_fd  # where failures are reported to the front, when there are other nodes
        self._assignment = Assignment("", 0, 0, job.world_size)
        self._ranks: dict[int, RankProcess] = {}
        self._ranks_ended = 0
        self._escalation = SignalEscalation()
        self._stopped_by: signal.Signals | None = None  # the user's signal
        self._stopped_at = 0.0
        self._start_failed = False
        self._childless = False
        self._strays: SignalEscalation | None = None
        self._strays_since = 0.0
        self._relays_waited_for = False
        self._left = False  # SIGKILL does not end a process, and the launcher no longer waits for it
        self._give_up_at: float | None = None  # when to stop waiting for pipes and the console
        self._late = False  # that time is over
        self._reported = False
        self._status = 0
        self._selector = selectors.DefaultSelector()
        self._catch_signals()
        self._selector.register(front_fd, selectors.EVENT_READ, lambda: self._on_front(front_fd))
        color = "NO_COLOR" not in base and not env.dumb_terminal(base)
        self._screen = Console(color=color, on_progress=self._wake)
        self._streams = OutputStreams(job, self._screen, self._selector)
        self._board = StatusBoard(job.world_size)
        self._elastic = ElasticRanks(job, self._ranks, self._say) if job.elastic else None
        on_notice = None if self._elastic is None else self._elastic.take
        self._failures = JobFailures(job, self._screen, self._ranks, on_notice)
        self._shared = ""
        self._ended_elsewhere = False
        self._orphans: SignalEscalation | None = None  # of lost ranks
        self._orphans_since = 0.0
        self._selector.register(self._failures.inbox.socket, selectors.EVENT_READ, self._failures.take)
        self._mpi = MpiImports()
        if self._mpi.fd >= 0:
            self._selector.register(self._mpi.fd, selectors.EVENT_READ, self._on_mpi)
        self._adopts = become_subreaper()

    def _catch_signals(self) -> None:
        """Make every signal wake the loop through a socket. It may be full, so signals are also stored."""
        self._signals: collections.deque[int] = collections.deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in FORWARDED:
            signal.signal(number, lambda number, _frame: self._signals.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD, *FORWARDED))  # a parent may block any
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)

    def _on_mpi(self) -> None:
        """Warn once of a rank that imports mpi4py."""
        alone, size = self._mpi.take(list(self._ranks)), self._assignment.world_size
        if alone is not None and size > 1:
            self._selector.unregister(self._mpi.fd)
            self._mpi.close()
            self._say(
                f"rank {self._ranks[alone].rank} uses mpi4py, and this launcher starts no MPI "
                f"job: each process is alone in it, rank 0 of 1. Run it on Unisono, unisono run --replace "
                f"mpi4py -n {size}, or with MPI's launcher, mpiexec -n {size} (or mpirun)."
            )

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_write.send(b"\0")

    def run(self, assignment: Assignment, *, ended: bool = False) -> int:
        """Start the ranks, wait until no process of theirs is left, report; return the exit code.

        Args:
            ended: another node has already ended the job.
        """
        try:
            self._assignment = assignment
            self._start_ranks()
            if ended:
                self._begin_the_end(self._job.grace_s)
            self._screen.start()  # starts a thread: not before the ranks, see process.start
            if not self._adopts:
                self._say(
                    "this system refuses PR_SET_CHILD_SUBREAPER: a process whose parent has ended stays "
                    "when the job ends. Look for such processes yourself."
                )
            self._reap()
            while not self._is_finished():
                for key, _ in self._selector.select(self._timeout_s()):
                    key.data()
                self._act_on_time()
            return self._status
        finally:
            end_children(give_up_s=1.0 if self._left else 5.0)

    # starting

    def _start_ranks(self) -> None:
        job = self._job
        if job.world_size > 1 and "OMP_NUM_THREADS" not in self._base:
            cores = usable_cores()
            threads = max(1, cores // job.world_size)
            self._say(
                f"{job.world_size} ranks on {cores} cores, OMP_NUM_THREADS={threads} each (set it to choose)"
            )
        self._shared = _shared_file() if job.gpus else ""
        for rank in range(job.world_size):
            try:
                self._start_rank(rank)
            except (OSError, subprocess.SubprocessError) as error:
                why = limit_text(error) if is_limit(error) else error
                self._say(f"rank {rank} could not be started: {why}")
                self._start_failed = True
                self._tell({"failed": f"rank {rank} could not be started: {why}"})
                self._escalation = SignalEscalation((0, signal.SIGKILL))
                return

    def _start_rank(self, local_rank: int, join: str = "") -> None:
        """Start one rank. join: it replaces another one, and joins the group at these addresses."""
        rank = self._assignment.first_rank + local_rank
        environ = rank_environment(
            self._job,
            local_rank,
            self._base,
            assignment=self._assignment,
            status_fd=self._board.name,
            report_fd=self._failures.inbox.name,
            shared=self._shared,
            join=join,
        )
        stdin = None if self._job.stdin and rank == 0 and not join else subprocess.DEVNULL
        process = start(
            self._job.command, environ, stdin=stdin, pass_fds=(self._board.fd, self._failures.inbox.fd)
        )
        self._board.started(local_rank, process.pid)
        process.returncode = 0  # this class reaps it, not the Popen object
        assert process.stdout is not None and process.stderr is not None
        self._childless, self._strays, self._relays_waited_for = False, None, False
        self._streams.add(local_rank, rank, process.stdout, 1, replaces=bool(join))
        stderr = self._streams.add(local_rank, rank, process.stderr, 2, replaces=bool(join))
        self._ranks[process.pid] = RankProcess(local_rank, rank, process.pid, stderr)

    # what wakes the loop

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        self._reap()  # a process that ends after this wakes us again
        while self._signals:
            self._on_signal(signal.Signals(self._signals.popleft()))
        self._streams.resume_if_drained()
        if self._screen.broken and self._stopped_by is None:
            self._stop(
                signal.SIGPIPE, SignalEscalation((0, signal.SIGTERM), (AFTER_SIGNAL_S, signal.SIGKILL))
            )

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGTSTP:
            self._signal_ranks(signal.SIGSTOP, asking=False)
        elif number in PASSED_ON:
            self._signal_ranks(number, asking=False)
        elif self._stopped_by is not None:
            if time.monotonic() > self._stopped_at + REPEATED_S:
                self._stop(self._stopped_by, SignalEscalation((0, signal.SIGKILL)))
        elif number == signal.SIGINT:
            self._say("interrupted, ending the ranks (Ctrl-C again kills them at once)")
            self._stop(
                number,
                SignalEscalation(
                    (0, number), (AFTER_SIGNAL_S, signal.SIGTERM), (AFTER_INTERRUPT_S, signal.SIGKILL)
                ),
            )
        else:
            self._say(f"got {number.name}, ending the ranks")
            self._stop(number, SignalEscalation((0, signal.SIGTERM), (AFTER_SIGNAL_S, signal.SIGKILL)))

    def _on_front(self, front_fd: int) -> None:
        """The front reports that another node ended the job; or the front was killed: end everything."""
        if os.read(front_fd, 4096):
            if self._elastic is None or not self._elastic.formed:  # otherwise the ranks go on without it
                self._ended_elsewhere = True
                self._begin_the_end(self._job.grace_s)
            return
        self._selector.unregister(front_fd)
        self._stop(signal.SIGKILL, SignalEscalation((0, signal.SIGKILL)))

    def _stop(self, cause: signal.Signals, escalation: SignalEscalation) -> None:
        if self._stopped_by is None:
            self._stopped_at = time.monotonic()
            self._tell({"stopped": int(cause)})
        self._stopped_by = cause
        if not self._escalation.killing:
            self._escalation = escalation
        if self._strays is not None and not self._strays.killing:
            self._strays = ends_of_strays(0.0)

    def _reap(self) -> None:
        """Record every child that has ended; first on the board, because survivors wait for it."""
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self._childless = True
                return
            if info is None:
                return
            rank = self._ranks.get(info.si_pid)
            if rank is not None and rank.end is None:
                self._on_rank_ended(rank, info.si_status, info.si_code != os.CLD_EXITED)
            os.waitpid(info.si_pid, 0)

    def _on_rank_ended(self, rank: RankProcess, code: int, signaled: bool) -> None:
        self._board.ended(rank.local_rank, code=code, signaled=signaled)
        rank.end = (self._ranks_ended, code, signaled)
        rank.ended_at = time.time()
        self._ranks_ended += 1
        failed = signaled or code != 0
        if self._elastic is not None:
            self._failures.take()  # what the rank told before its end
            self._elastic.on_end(rank, failed)
            if self._elastic.formed:
                self._orphans, self._orphans_since = ends_of_strays(), time.monotonic()
                return
        if failed and not rank.asked:
            how = signal_name(code) if signaled else f"exit code {code}"
            self._tell({"failed": f"rank {rank.rank}: {how}"})
        if failed:
            self._begin_the_end(self._job.grace_s)

    def _begin_the_end(self, grace: float) -> None:
        """Begin the time in which ranks may end by themselves, unless it has begun."""
        if self._stopped_by is None and self._escalation.due is None:
            self._escalation = SignalEscalation((grace, signal.SIGTERM), (AFTER_FAILURE_S, signal.SIGKILL))
            if self._relays_waited_for:  # another node has failed
                self._strays = ends_of_strays()

    # time

    def _timeout_s(self) -> float | None:
        ending = self._at_work()
        give_up = None if self._late else self._give_up_at
        times = [ending.due if ending else None, give_up, self._streams.partial_due(), self._failures.due]
        if self._elastic is not None and not self._over:
            times.append(self._elastic.due())
        if self._orphans is not None and self._living():
            times.append(self._orphans.due)
        due = [t for t in times if t is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _at_work(self) -> SignalEscalation | None:
        """The escalation for the remaining processes, if there are any."""
        if self._left or self._childless:
            return None
        return self._escalation if self._living() else self._strays

    def _act_on_time(self) -> None:
        now = time.monotonic()
        self._streams.show_partials(now)
        self._failures.show_overdue(now)
        if self._left:
            return
        if self._elastic is not None:
            self._follow(self._elastic, now)
        if self._living():
            number = self._escalation.pop(now)
            if number is not None:
                self._signal_ranks(number)
                self._give_up_on_undying(self._escalation)
        elif not self._childless:
            self._end_strays(now)

    def _follow(self, elastic: ElasticRanks, now: float) -> None:
        """Replace ranks of an elastic job, and end those that have no place in it any more."""
        if not self._over and elastic.over:
            self._begin_the_end(self._job.grace_s)
        if self._over:
            elastic.give_up()
        self._end_orphans(now)
        for rank in elastic.to_be_killed(now):
            rank.asked = True
            signal_rank(rank.pid, signal.SIGKILL)
        for local_rank, join in elastic.replacements(now):
            try:
                self._start_rank(local_rank, join)
            except (OSError, subprocess.SubprocessError) as error:
                self._say(f"rank {local_rank} could not be replaced: {error}")

    def _end_orphans(self, now: float) -> None:
        """End the processes that a lost rank has left, while other ranks run."""
        number = None if self._orphans is None else self._orphans.pop(now)
        if number is None:
            return
        spared = {rank.pid for rank in self._living()} | set(relays())
        if not set(children()) - spared:
            self._orphans = None
        else:
            signal_strays(number, now - self._orphans_since, spared)

    @property
    def _over(self) -> bool:
        """Whether this launcher ends its ranks."""
        return self._stopped_by is not None or self._escalation.due is not None

    def _living(self) -> list[RankProcess]:
        return [rank for rank in self._ranks.values() if rank.end is None]

    def _signal_ranks(self, number: signal.Signals, *, asking: bool = True) -> None:
        self._reap()  # so that a process that has already ended does not count as asked
        for rank in self._living():
            rank.asked |= asking
            signal_rank(rank.pid, number)
            if number == signal.SIGTERM:  # a stopped process cannot handle it
                signal_rank(rank.pid, signal.SIGCONT)

    def _end_strays(self, now: float) -> None:
        """End the processes that ranks left behind, which this process has adopted: workers, daemons.

        After a job without failures, relays of TLS get the time to deliver what the ranks have sent.
        """
        if self._strays is None:
            self._strays_since = now
            self._strays = ends_of_strays(STRAYS_IN_A_HURRY_S if self._stopped_by else None)
            return
        number = self._strays.pop(now)
        if number is None:
            return
        spared = set() if self._relays_waited_for or self._escalation.due else set(relays())
        left = set(children()) - spared
        if spared and not left:
            self._say("TLS connections of ranks that have ended are still open; Ctrl-C closes them")
            self._relays_waited_for = True
            self._strays = ends_of_relays(env.read(self._base, strict=False).peer_timeout_s)
            return
        if number == signal.SIGTERM and left and not self._relays_waited_for:
            self._say(f"ending {len(left)} process{'es' if len(left) > 1 else ''} left behind by the ranks")
        signal_strays(number, now - self._strays_since, spared)
        self._give_up_on_undying(self._strays)

    def _give_up_on_undying(self, ending: SignalEscalation) -> None:
        """Report the processes that SIGKILL does not end; after a minute, stop waiting for them."""
        to_be_reported = ending.to_be_reported()
        if not to_be_reported and not ending.in_vain:
            return
        self._reap()
        ranks = [f"rank {rank.rank}, {undying(rank.pid)}" for rank in self._living()]
        names = "; ".join(ranks or map(undying, children()))
        if not names:
            return
        if to_be_reported:
            self._say(
                f"SIGKILL has not ended {names} within {TELL_S:g} s: it waits in the kernel (state D) or is"
                " another user's"
            )
        if ending.in_vain:
            self._say(f"leaving without {names}")
            self._left = True

    # the end

    def _is_finished(self) -> bool:
        """Whether no rank, stray or output byte is left. An interrupted job drops unread output."""
        if not self._childless and not self._left:
            return False
        if self._elastic is not None and self._elastic.replacing and not self._left:
            return False
        now = time.monotonic()
        if self._give_up_at is None:
            self._give_up_at = now + DRAIN_S
        self._late = now >= self._give_up_at
        if self._late:
            self._streams.abandon()
        if any(self._streams.open()) and not (self._late and self._stopped_by):
            return False
        if not self._reported:
            self._report()
        return self._screen.backlog_nbytes == 0 or bool(self._late and self._stopped_by)

    def _report(self) -> None:
        self._reported = True
        text = self._failures.report()
        first = self._failures.first
        if self._news_fd >= 0:
            self._tell({"failure": first, "report": text, "follow": self._failures.follow_up()})
        elif text:
            self._screen.say(text)
        self._screen.end_open_lines()
        if self._stopped_by is not None:
            self._status = 128 + self._stopped_by
        elif first is not None:
            self._status = exit_status(first)
        else:
            self._status = 1 if self._start_failed or self._living() or self._lost_all() else 0
        self._failures.write_record(self._status)

    def _lost_all(self) -> bool:
        """Whether an elastic job ended without a rank here that has ended normally."""
        return self._elastic is not None and (self._ended_elsewhere or not self._elastic.ending)

    def _tell(self, messages: Mapping[str, object]) -> None:
        """Tell the front, which tells the other nodes."""
        if self._news_fd >= 0:
            with contextlib.suppress(OSError):
                write_record(self._news_fd, messages)

    def _say(self, text: str) -> None:
        self._screen.say(f"unisono run: {text}")


def write_record(fd: int, record: Mapping[str, object]) -> None:
    """Write one line completely: a signal may end a long write after a part.

    Raises:
        OSError: the reader has ended.
    """
    rest = memoryview(msgspec.json.encode(record) + b"\n")
    while rest:
        rest = rest[os.write(fd, rest) :]


def _shared_file() -> str:
    from unisono.virtual.environment import shared_file  # a third of what a launcher imports

    return shared_file()
