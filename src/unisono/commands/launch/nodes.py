"""A job on several nodes: the front processes of all of them meet in a store that node 0 serves.

    unisono run --nnodes 2 --node-rank 0 --master-addr a --token-file F -n 2 train.py      # on a
    unisono run --nnodes 2 --node-rank 1 --master-addr a --token-file F -n 3 train.py      # on b

In the store, under "unisono/launch/":

    nnodes       the first to come writes it, the others compare
    node/1       the process of that node and its number of ranks; ranks are numbered node by node
    plan         made by node 0 when all have come: sizes of all, MASTER_PORT for the ranks
    beat/1       a counter that increases while the node runs
    end          why the job ends early, from the first node that knows; every node waits for it
    final/1      how it ended there; all wait for all, so that all name the same rank and exit alike
    settled      how many nodes have read that, or are given up: then node 0 ends the store

The supervisor sends the front lines of JSON about its own ranks:

    {"stopped": 15}             a signal ends the job
    {"failed": "rank 2: ..."}   so does a failure
    {"failure": ..., ...}       how it ended: the last line
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

import msgspec

from unisono.commands.launch.failures import RankExit
from unisono.commands.launch.job import MEET_S, Assignment, Job
from unisono.engine.store import PrefixStore, TCPStore
from unisono.errors import AuthenticationError, LaunchError, StoreError, StoreTimeout, message

BEAT_S = 1.0
SILENT_S = 10.0  # a node without a heartbeat for so long counts as lost
ENDING_S = 8.0  # time for the others, after the grace, to end their ranks and report how
UNHEARD = (StoreError, AuthenticationError)  # the store did not answer, or another program did
SAY_S = 8.0  # time for node 0 to accept a node's report: node 0 may have been stopped for a while


class _NodeInfo(msgspec.Struct, frozen=True):
    host: str
    pid: int
    size: int


class _NodeTable(msgspec.Struct, frozen=True):
    nodes: tuple[_NodeInfo, ...]
    master_port: int


class NodeExit(msgspec.Struct, frozen=True):
    """Why a node ends the job ("end"), or how the job ended on it ("final/1").

    Attributes:
        status: the exit code when no rank's failure gives one. At its end: when a signal ended it, else 0.
        text: why it ends the job.
        failure: the first failure of the node's ranks.
        given_up: node 0 wrote this for a silent node, and counts the node as settled. It stays valid if the
            node returns.
    """

    node: int
    host: str
    status: int = 0
    text: str = ""
    failure: RankExit | None = None
    given_up: bool = False


_decode_node = msgspec.msgpack.Decoder(_NodeInfo).decode
_decode_plan = msgspec.msgpack.Decoder(_NodeTable).decode
_decode_end = msgspec.msgpack.Decoder(NodeExit).decode


class NodeRendezvous:
    """This node's part in a job of several."""

    def __init__(self, job: Job, store: TCPStore) -> None:
        self._job = job
        self._store = PrefixStore("unisono/launch", store)
        self._me = _NodeInfo(socket.gethostname(), os.getpid(), job.world_size)
        self._hosts: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._beats: dict[int, tuple[bytes, float]] = {}  # of each node: the last one and when it was seen
        self._looked_at = 0.0
        self.end: NodeExit | None = None

    def meet(self, master_port: int) -> Assignment:
        """Wait for the other nodes; returns the assignment of this one.

        Raises:
            LaunchError: two nodes have one number, they disagree on --nnodes, or some did not join.
        """
        job, store = self._job, self._store
        deadline = time.monotonic() + MEET_S
        held = store.compare_set("nnodes", b"", str(job.nnodes))
        if held != str(job.nnodes).encode():
            raise LaunchError(
                f"--nnodes is {job.nnodes} here and {held.decode()} on the node that started first."
            )
        mine = msgspec.msgpack.encode(self._me)
        held = store.compare_set(f"node/{job.node_rank}", b"", mine)
        if held != mine:
            other = _decode_node(held)
            text = f"--node-rank {job.node_rank} is taken by host {other.host}, pid {other.pid}"
            raise LaunchError(message(text, remedy="Give every node a number of its own."))
        if job.node_rank == 0:
            nodes = tuple(self._await_node(number, deadline) for number in range(job.nnodes))
            store.set("plan", msgspec.msgpack.encode(_NodeTable(nodes, master_port)))
        try:
            raw = store.get("plan", max(0.0, deadline - time.monotonic()))
            plan = _decode_plan(raw)
        except StoreTimeout:
            raise LaunchError(self._missing()) from None
        self._hosts = tuple(node.host for node in plan.nodes)
        sizes = [node.size for node in plan.nodes]
        return Assignment(
            store=f"{_bracketed(job.master_addr)}:{job.master_port}",
            master_port=plan.master_port,
            first_rank=sum(sizes[: job.node_rank]),
            world_size=sum(sizes),
        )

    def _await_node(self, number: int, deadline: float) -> _NodeInfo:
        try:
            raw = self._store.get(f"node/{number}", max(0.0, deadline - time.monotonic()))
        except StoreTimeout:
            raise LaunchError(self._missing()) from None
        return _decode_node(raw)

    def _missing(self) -> str:
        numbers = [str(n) for n in range(self._job.nnodes) if not self._store.check([f"node/{n}"])]
        return message(
            f"{self._job.nnodes - len(numbers)} of {self._job.nnodes} nodes joined within {MEET_S:g} s",
            observed=f"missing node {', '.join(numbers)}",
            remedy="See whether `unisono run` was started there with this --master-addr and --master-port.",
        )

    # while it runs

    def watch(self, on_end: Callable[[], None]) -> None:
        """Start a thread that calls `on_end` once, when another node ends the job or is lost."""
        self._thread = threading.Thread(target=self._watch, args=(on_end,), name="unisono-nodes", daemon=True)
        self._thread.start()

    def _watch(self, on_end: Callable[[], None]) -> None:
        unanswered = 0  # successive ones: after this node was stopped itself, a single one means nothing
        while not self._over.is_set():
            try:
                self._beat(SILENT_S / 2)
                raw = self._store.get("end", BEAT_S)
            except StoreTimeout as error:
                unanswered = unanswered + 1 if "no answer" in str(error) else 0
                if unanswered < 2:
                    continue
                self._lost()
                break
            except UNHEARD:
                if self._over.is_set():
                    return
                self._lost()
                break
            self.end = _decode_end(raw)
            break
        if self.end is not None and not self._over.is_set():
            on_end()
            self._keep_beating()

    def _keep_beating(self) -> None:
        """Continue the heartbeat while this node ends its ranks, so that it does not count as lost."""
        while not self._over.wait(BEAT_S):
            with contextlib.suppress(*UNHEARD):  # the next may be
                self._beat(SILENT_S)

    def _beat(self, timeout_s: float) -> None:
        self._store.add(f"beat/{self._job.node_rank}", 1, timeout_s=timeout_s)
        if self._job.node_rank == 0:
            self._look_for_silent()

    def _look_for_silent(self) -> None:
        now = time.monotonic()
        if now - self._looked_at > SILENT_S / 2:
            self._beats.clear()  # this node was stopped itself: measure the others again from now
        self._looked_at = now
        for number in range(1, self._job.nnodes):
            beat = self._store.get(f"beat/{number}", 0) if self._store.check([f"beat/{number}"]) else b""
            known, since = self._beats.setdefault(number, (beat, now))
            if self._store.check([f"final/{number}"]) or beat != known:
                self._beats[number] = (beat, now)
            elif now - since > SILENT_S:
                self._give_up(number)

    def _give_up(self, number: int) -> None:
        """End the job without this node; no other node needs to wait for its result."""
        host = self._hosts[number]
        self.announce(f"node {number} (host {host}) has been silent for {SILENT_S:g} s", 1)
        encoded = msgspec.msgpack.encode(NodeExit(number, host, given_up=True))
        if self._store.compare_set(f"final/{number}", b"", encoded) == encoded:
            self._store.add("settled", 1)

    def _lost(self) -> None:
        text = f"node 0 (host {self._hosts[0]}), which serves the store, is gone"
        self.end = NodeExit(0, self._hosts[0], 1, text)

    def announce(self, text: str, status: int) -> None:
        """End the job on all nodes, unless another node has done so. Never raises."""
        record = msgspec.msgpack.encode(NodeExit(self._job.node_rank, self._me.host, status, text))
        with contextlib.suppress(*UNHEARD):
            self._store.compare_set("end", b"", record, timeout_s=2.0)

    # the end

    def report_end(self, failure: RankExit | None, stopped: int) -> list[NodeExit]:
        """Report how the job ended here, and read how it ended on other nodes, except silent ones."""
        mine = NodeExit(self._job.node_rank, self._me.host, stopped, failure=failure)
        finals = [mine]
        with contextlib.suppress(*UNHEARD):
            encoded = msgspec.msgpack.encode(mine)
            counted = self._store.compare_set(f"final/{mine.node}", b"", encoded, timeout_s=SAY_S) != encoded
            give_up: float | None = None
            for number in range(self._job.nnodes):
                while number != mine.node and not stopped:
                    if give_up is None and (failure is not None or self.end is not None):
                        give_up = time.monotonic() + self._job.grace_s + ENDING_S
                    if give_up is not None and time.monotonic() > give_up:
                        break
                    try:
                        raw = self._store.get(f"final/{number}", 0.5)
                    except StoreTimeout:
                        continue
                    finals.append(_decode_end(raw))
                    break
            self._over.set()  # node 0 may end as soon as it has the following
            if not counted:  # a lost node is counted already
                self._store.add("settled", 1, timeout_s=SAY_S)
        return finals

    def await_reports(self, seconds: float) -> None:
        """For the node that serves the store: wait until all others are settled, at most so long."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(*UNHEARD):
            while time.monotonic() < deadline:
                if self._store.add("settled", 0, timeout_s=1.0) >= self._job.nnodes:
                    return
                time.sleep(0.02)

    def close(self) -> None:
        """Stop watching."""
        self._over.set()


class SupervisorMessages:
    """Reads the supervisor's messages in a thread, and forwards what the other nodes must know at once."""

    def __init__(self, messages: IO[str], nodes: NodeRendezvous) -> None:
        self.failure: RankExit | None = None
        self.stopped = 0
        self.report = self.follow = ""
        self.reported = False
        self._news = messages
        self._nodes = nodes
        self.thread = threading.Thread(target=self._read, name="unisono-news", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for line in self._news:
            try:
                found = json.loads(line)
            except ValueError:
                self._on_fragment(line)
            else:
                self._on_record(found)

    def _on_record(self, found: Mapping[str, Any]) -> None:
        self.reported = True
        if "stopped" in found:
            self.stopped = 128 + int(found["stopped"])
            self._nodes.announce(signal.Signals(found["stopped"]).name, self.stopped)
        elif "failed" in found:
            self._nodes.announce(found["failed"], 1)
        else:
            self.failure = msgspec.convert(found["failure"], RankExit | None)
            self.report, self.follow = found["report"], found["follow"]

    def _on_fragment(self, line: str) -> None:
        """The supervisor was killed while it wrote: the job has failed, whatever the message was."""
        how = f"the launcher's notice breaks off after {len(line)} characters"
        self.failure = RankExit(rank=-1, pid=0, code=1, order=0, ended_at=time.time(), note=how)
        self.report = f"unisono run: {how}; how the ranks of this node ended is not known"
        self._nodes.announce(how, 1)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
