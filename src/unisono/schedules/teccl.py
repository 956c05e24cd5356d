"""TE-CCL's schedules as its solver writes them (JSON): which chunk goes over which link in which epoch.

A flow reads "Chunk 0 from 14 traveled over 14->3 in epoch 0 via switches 0". The ranks are the GPUs of the
demand, in the order of their numbers; switches have numbers, too, and are left to the network. Where every
GPU wants every chunk the collective is all_gather, where one wants it all_to_all.

A rank sends in the order of the epochs. It receives a chunk when it has to pass it on, or at the end.

Source: Liu et al., "Rethinking machine learning collective communication as a multi-commodity flow problem",
SIGCOMM 2024, and the files that its repository publishes.
"""

from __future__ import annotations

import json
import re
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from unisono.errors import PlanError
from unisono.plans.plan import Chunk, Copy, In, Out, Plan, Recv, Send, Step, Tmp

__all__ = ["Piece", "TecclFlow", "TecclSchedule", "parse_teccl", "read_paced", "read_teccl"]

MOST_BYTES = 64 << 20
MOST_FLOWS = 1 << 18

_FLOW = re.compile(
    r"Chunk (\d{1,6}) from (\d{1,6}) traveled over (\d{1,6})->(\d{1,6}) in epoch (\d{1,12})\b.*"
)
_GPU = re.compile(r"GPU (\d{1,6})")
_CHUNK = re.compile(r"Chunk (\d{1,6})")

Piece = tuple[int, int]
"""A chunk: the rank that it comes from, and its number there."""


class TecclFlow(NamedTuple):
    """A chunk from a rank to another in an epoch."""

    epoch: int
    piece: Piece
    source: int
    target: int


def read_teccl(file: str | Path) -> Plan:
    """The plan in a file; it is not proved yet.

    Raises:
        OSError: the file cannot be read.  ValueError: it is wrong.  PlanError: it is no plan.
    """
    return parse_teccl(_record(Path(file)), str(file))


def _record(file: Path) -> Any:
    with file.open("rb") as opened:
        data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{file}: is larger than {MOST_BYTES >> 20} MiB")
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, or a number of too many digits
        raise ValueError(f"{file}: {error}") from None


def read_paced(file: str | Path) -> tuple[TecclSchedule, float]:
    """The schedule in a file, and the seconds of an epoch, for the simulator.

    Raises:
        OSError, ValueError, PlanError: as `read_teccl`.
    """
    record = _record(Path(file))
    schedule = _schedule(record, str(file))
    epoch_s = record.get("1-Epoch_Duration")
    if isinstance(epoch_s, bool) or not isinstance(epoch_s, (int, float)) or not 0 < epoch_s < 1e6:
        raise ValueError(f"{file}: 1-Epoch_Duration is {epoch_s!r}, expected seconds")
    return schedule, float(epoch_s)


def parse_teccl(record: Any, file: str = "schedule.json") -> Plan:
    """As `read_teccl`, from the decoded file.

    Raises:
        ValueError: it is wrong.  PlanError: it is no plan; the message names the rank.
    """
    return _schedule(record, file).plan()


def _schedule(record: Any, file: str) -> TecclSchedule:
    demand = record.get("6-Demand_Met") if isinstance(record, dict) else None
    flows = record.get("7-Flows") if isinstance(record, dict) else None
    if not isinstance(demand, dict) or not isinstance(flows, list) or len(flows) > MOST_FLOWS:
        raise ValueError(f"{file}: expected TE-CCL's tables 6-Demand_Met and 7-Flows")
    gpus = sorted(_number(file, _GPU, name) for name in demand)
    ranks = {gpu: rank for rank, gpu in enumerate(gpus)}
    if not ranks:
        raise ValueError(f"{file}: there is no demand")
    wanted = _wanted(file, demand, ranks)
    found = TecclSchedule(file, len(ranks), wanted, [_flow(file, each, ranks) for each in flows])
    found.run()
    return found


def _number(file: str, pattern: re.Pattern[str], text: object) -> int:
    found = pattern.fullmatch(text) if isinstance(text, str) else None
    if not found:
        raise ValueError(f"{file}: is {str(text)[:40]!r}, expected such as {pattern.pattern[:5]}7")
    return int(found[1])


def _wanted(file: str, demand: dict[str, Any], ranks: dict[int, int]) -> dict[Piece, set[int]]:
    """The ranks that want each chunk."""
    found: dict[Piece, set[int]] = {}
    for name, sources in demand.items():
        target = ranks[_number(file, _GPU, name)]
        if not isinstance(sources, dict):
            raise ValueError(f"{file}: what {name} wants is {str(sources)[:40]!r}, expected a table")
        for origin, chunks in sources.items():
            gpu = _number(file, _GPU, origin)
            if gpu not in ranks or not isinstance(chunks, dict):
                raise ValueError(f"{file}: GPU {gpu} gives chunks, but wants none")
            for chunk in chunks:
                found.setdefault((ranks[gpu], _number(file, _CHUNK, chunk)), set()).add(target)
    return found


def _flow(file: str, text: object, ranks: dict[int, int]) -> TecclFlow:
    found = _FLOW.fullmatch(text) if isinstance(text, str) else None
    if not found:
        raise ValueError(f"{file}: flow {str(text)[:80]!r} is not understood")
    chunk, origin, source, target, epoch = map(int, found.groups())
    for gpu in (origin, source, target):
        if gpu not in ranks:
            raise ValueError(f"{file}: flow {str(text)[:80]!r}: there is no GPU {gpu}")
    return TecclFlow(epoch, (ranks[origin], chunk), ranks[source], ranks[target])


class TecclSchedule:
    """The flows in order, and the steps of a plan that come of them."""

    def __init__(self, file: str, size: int, wanted: dict[Piece, set[int]], flows: list[TecclFlow]) -> None:
        self.file, self.name, self.size = file, Path(file).name, size
        self.flows = sorted(flows)
        others = {len(targets - {piece[0]}) for piece, targets in wanted.items()}
        if others == {size - 1}:
            self.collective = "all_gather"
        elif others == {1}:
            self.collective = "all_to_all"
        else:
            raise ValueError(f"{file}: is neither an all_gather nor an all_to_all")
        self.places: dict[Piece, int] = {}
        counts: dict[tuple[int, int], int] = {}
        self.targets: dict[Piece, int] = {}
        for piece in sorted(wanted):
            target = next(iter(wanted[piece] - {piece[0]})) if self.collective == "all_to_all" else -1
            self.targets[piece] = target
            self.places[piece] = counts.get((piece[0], target), 0)
            counts[piece[0], target] = self.places[piece] + 1
        if len(set(counts.values())) != 1:
            raise ValueError(f"{file}: blocks have {min(counts.values())} to {max(counts.values())} chunks")
        self.parts = max(counts.values())
        self.own: list[list[Piece]] = [[] for _ in range(size)]
        for piece in self.places:
            self.own[piece[0]].append(piece)
        self.scratch = {piece: number for number, piece in enumerate(self.places)}
        self.steps: list[list[Step]] = [[] for _ in range(size)]
        self.holds: list[dict[Piece, Chunk]] = [{} for _ in range(size)]
        self.edges: dict[tuple[int, int], deque[Piece]] = {}
        self.coming: list[dict[tuple[int, Piece], None]] = [{} for _ in range(size)]
        self.first: list[dict[Piece, int]] = [{} for _ in range(size)]  # who sends a chunk first

    def plan(self) -> Plan:
        """The plan of the steps."""
        return Plan(self.collective, self.name, self.size, 0, tuple(map(tuple, self.steps)), parts=self.parts)

    def run(self) -> None:
        """Make steps of the flows."""
        for piece in self.places:
            self.holds[piece[0]][piece] = self.given(piece)
        for flow in self.flows:
            self.send(flow)
        for rank in range(self.size):
            self.copy_own(rank)
            for source, piece in self.coming[rank]:
                if piece not in self.holds[rank]:
                    self.receive(rank, source, piece)

    def given(self, piece: Piece) -> Chunk:
        """Where its rank has a chunk."""
        target = max(self.targets[piece], 0)
        return In(target * self.parts + self.places[piece])

    def send(self, flow: TecclFlow) -> None:
        """Send a chunk; receive it first, if it has not been."""
        if flow.piece not in self.places:
            raise ValueError(f"{self.file}: nobody wants chunk {flow.piece[1]} of rank {flow.piece[0]}")
        if flow.piece not in self.holds[flow.source]:
            source = self.first[flow.source].get(flow.piece)
            if source is None:
                raise PlanError(
                    f"{self.file}: rank {flow.source} sends chunk {flow.piece[1]} of rank {flow.piece[0]} in "
                    f"epoch {flow.epoch}, and does not have it"
                )
            self.receive(flow.source, source, flow.piece)
        if flow.source == flow.target or (flow.source, flow.piece) in self.coming[flow.target]:
            raise PlanError(
                f"{self.file}: chunk {flow.piece} goes from rank {flow.source} to {flow.target} twice"
            )
        chunk = self.holds[flow.source][flow.piece]
        steps = self.steps[flow.source]
        last = steps[-1] if steps else None
        if isinstance(last, Send) and last.chunk == chunk:
            steps[-1] = Send(chunk, (*last.to, flow.target))
        else:
            steps.append(Send(chunk, (flow.target,)))
        self.edges.setdefault((flow.source, flow.target), deque()).append(flow.piece)
        self.coming[flow.target][flow.source, flow.piece] = None
        self.first[flow.target].setdefault(flow.piece, flow.source)

    def receive(self, rank: int, source: int, piece: Piece) -> None:
        """Receive from a rank until the chunk has come: messages keep their order."""
        while piece not in self.holds[rank]:
            got = self.edges[source, rank].popleft()
            chunk = self.stored(rank, got)
            self.steps[rank].append(Recv(chunk, source))
            self.holds[rank][got] = chunk

    def stored(self, rank: int, piece: Piece) -> Chunk:
        """Where a chunk goes that a rank receives."""
        if self.targets[piece] in (-1, rank):
            return Out(piece[0] * self.parts + self.places[piece])
        return Tmp(self.scratch[piece])

    def copy_own(self, rank: int) -> None:
        """Copy what a rank itself gives to its result."""
        for piece in self.own[rank] if self.collective == "all_gather" else ():
            self.steps[rank].append(Copy(Out(rank * self.parts + self.places[piece]), self.given(piece)))
        if self.collective == "all_to_all":
            for place in range(self.parts):
                own = rank * self.parts + place
                self.steps[rank].append(Copy(Out(own), In(own)))
