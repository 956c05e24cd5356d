"""The measuring itself: sides take turns, round by round, on the same case.

A round gives each side one block of calls for each case, on new buffers; the first side changes from round
to round. The figure of a side is the median over rounds of the block's median; a ratio is the median over
rounds of the ratio within the round, so a drift of the machine that lasts longer than a block cancels. Every
round measures all cases of a sweep. So the rounds of one case are spread over the whole sweep, and a slow
period of some seconds affects few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.commands.bench.cases import OPERATIONS, BenchCase
from unisono.commands.bench.contenders import ASIDE
from unisono.commands.bench.noise import CoreSpeed
from unisono.commands.bench.worker_group import BenchError, WorkerGroup

__all__ = ["CaseResult", "MeasurementFailure", "Timing", "calls_for", "measure_sweep", "ratio"]

MIN_CALLS = 5
MAX_CALLS = 20_000
PILOT_US = 5_000.0


@dataclass
class Timing:
    """What one side needed for one case; microseconds per call (per hop for send_recv).

    Attributes:
        slowest: per round, each call's time on its slowest rank.
        blocks: per round, the time per call of the whole block, on the rank that needed longest.
        rank0: per round, the median of rank 0 alone, which is what most latency benchmarks print.
    """

    side: str
    slowest: list[NDArray[np.float64]] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)
    rank0: list[float] = field(default_factory=list)
    calls: int = 0
    wrong: int = 0

    def add(self, samples: NDArray[np.float64]) -> None:
        """Add a round. Shapes: samples [ranks, calls]."""
        self.slowest.append(samples.max(axis=0))
        self.blocks.append(float(samples.mean(axis=1).max()))
        self.rank0.append(float(np.median(samples[0])))

    @property
    def rounds(self) -> list[float]:
        """Each round's median."""
        return [float(np.median(samples)) for samples in self.slowest]

    @property
    def p50_us(self) -> float:
        """The median over rounds of the rounds' medians, in microseconds."""
        return median(self.rounds)

    @property
    def p99_us(self) -> float:
        """Over the calls of all rounds; with few calls it is the slowest."""
        return float(np.percentile(np.concatenate(self.slowest), 99, method="higher"))

    def to_json(self) -> dict[str, Any]:
        """As the record has it."""
        return {
            "p50_us": self.p50_us,
            "p99_us": self.p99_us,
            "block_us": median(self.blocks),
            "rank0_p50_us": median(self.rank0),
            "rounds_p50_us": self.rounds,
            "calls_per_round": self.calls,
            "wrong": self.wrong,
        }


def ratio(own: Timing, peer: Timing) -> float:
    """Median over rounds of the ratio within the round: below 1, `own` is faster."""
    return median(ours / theirs for ours, theirs in zip(own.rounds, peer.rounds, strict=True))


@dataclass(frozen=True)
class MeasurementFailure:
    """A peer that cannot run a case, and its error."""

    side: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As the record has it."""
        return {"error": self.reason}


@dataclass(frozen=True)
class CaseResult:
    """One case, measured: Unisono's timing and that of each peer.

    `algorithm` is the one that Unisono took, `predicted_us` what its cost model gives that; "" and None where
    the operation has no plan.
    """

    case: BenchCase
    own: Timing
    peers: list[Timing | MeasurementFailure]
    algorithm: str = ""
    predicted_us: float | None = None

    @property
    def algbw_gbps(self) -> float:
        """Algorithm bandwidth: bytes over time, in 1e9 bytes per second."""
        return self.case.nbytes / self.own.p50_us / 1e3

    @property
    def busbw_gbps(self) -> float:
        """Bus bandwidth: algorithm bandwidth times the operation's factor."""
        return self.algbw_gbps * OPERATIONS[self.case.operation].bus_factor(self.case.ranks)

    def ratio(self, peer: Timing) -> float:
        """Unisono's time over the peer's: below 1, Unisono is faster."""
        return ratio(self.own, peer)

    def best_ratio(self) -> float | None:
        """Unisono's time over that of whichever library was fastest in the same round; None without one.

        The median over rounds, as for one peer.
        """
        libraries = [
            peer.rounds for peer in self.peers if isinstance(peer, Timing) and peer.side not in ASIDE
        ]
        if not libraries:
            return None
        best = [min(times) for times in zip(*libraries, strict=True)]
        return float(median(ours / theirs for ours, theirs in zip(self.own.rounds, best, strict=True)))

    def to_json(self) -> dict[str, Any]:
        """As the record has it."""
        peers = {
            peer.side: peer.to_json() | ({"ratio": self.ratio(peer)} if isinstance(peer, Timing) else {})
            for peer in self.peers
        }
        return {
            **self.case.to_json(),
            "nbytes": self.case.nbytes,
            **self.own.to_json(),
            "algbw_gbps": self.algbw_gbps,
            "busbw_gbps": self.busbw_gbps,
            "best_ratio": self.best_ratio(),
            "algorithm": self.algorithm,
            "predicted_us": self.predicted_us,
            "peers": peers,
        }


def measure_sweep(
    cases: Sequence[BenchCase],
    own: WorkerGroup,
    peers: list[WorkerGroup],
    *,
    rounds: int,
    round_ms: float,
    pace: CoreSpeed,
) -> list[CaseResult]:
    """Check the values of each case on every side, then time `rounds` rounds of all cases, then check again.

    Args:
        round_ms: what a side's block should take; slow cases still get MIN_CALLS calls.
        pace: times a core on request.
    Raises:
        BenchError: Unisono's side failed. A peer that raises is reported as unmeasurable.
    """
    sweep = [_CaseRun(case, own, peers, round_ms) for case in cases]
    for number in range(rounds + 1):  # the first is for warming up
        for one in sweep:
            pace.beat()
            one.round(number)
    return [one.finish() for one in sweep]


class _CaseRun:
    """A case under way: bound once on every side to check it and to find out how many calls fill a block."""

    def __init__(self, case: BenchCase, own: WorkerGroup, peers: list[WorkerGroup], round_ms: float) -> None:
        self._case, self._own, self._peers = case, own, peers
        self._failed: dict[str, MeasurementFailure] = {}
        self._timings: dict[str, Timing] = {}
        for side in [own, *peers]:
            try:
                self._timings[side.name] = _prepare(case, side, round_ms)
            except BenchError as error:
                if side is own:
                    raise
                self._failed[side.name] = MeasurementFailure(side.name, str(error))
            if side is own:
                self._told = side.ask({"do": "choice"})[0]
        self._taking_part = [side for side in [own, *peers] if side.name in self._timings]

    def round(self, number: int) -> None:
        """Run a block of each side, and drop the samples of round 0."""
        first = number % len(self._taking_part)
        for side in self._taking_part[first:] + self._taking_part[:first]:
            timing = self._timings[side.name]
            _bind(self._case, side)
            samples = side.time_block(timing.calls, warmup_for(timing.calls))
            if number:
                timing.add(samples / OPERATIONS[self._case.operation].hops)

    def finish(self) -> CaseResult:
        """Check once more; the line."""
        for side in self._taking_part:
            _bind(self._case, side)
            self._timings[side.name].wrong += _check(side)
        figures = [self._failed.get(side.name) or self._timings[side.name] for side in self._peers]
        algorithm, predicted_us = self._told.get("algorithm", ""), self._told.get("predicted_us")
        return CaseResult(self._case, self._timings[self._own.name], figures, algorithm, predicted_us)


def calls_for(call_us: float, round_ms: float) -> int:
    """How many calls make a block of about `round_ms`.

    Example: 2 us and 50 ms -> 20,000 (the most); 10 ms and 50 ms -> 5 (the least).
    """
    return int(min(MAX_CALLS, max(MIN_CALLS, round_ms * 1e3 / max(call_us, 1e-3))))


def warmup_for(calls: int) -> int:
    """Unmeasured calls at the head of a block: caches and clocks belong to the other side until then."""
    return max(2, min(100, calls // 10))


def _bind(case: BenchCase, side: WorkerGroup) -> None:
    side.ask({"do": "bind", "case": case.to_json()})


def _prepare(case: BenchCase, side: WorkerGroup, round_ms: float) -> Timing:
    """Bind, check, and find out how many calls fit into a block."""
    _bind(case, side)
    timing = Timing(side.name, wrong=_check(side))
    call_us = float(np.median(side.time_block(3, 2).max(axis=0)))
    if call_us < PILOT_US:
        call_us = float(np.mean(side.time_block(calls_for(call_us, PILOT_US / 1e3), 2).max(axis=0)))
    timing.calls = calls_for(call_us, round_ms)
    return timing


def _check(side: WorkerGroup) -> int:
    return sum(int(answer["wrong"]) for answer in side.ask({"do": "check"}))
