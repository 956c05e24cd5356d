"""One step under PyTorch's profiler: every collective with its place and reason, and a trace of all ranks
for Perfetto.

What a collective is for follows from the labelled ranges it began in: `fully_shard` labels its own
(`FSDP::...`), the room labels the rest (`up::...`).
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from unisono.torch.control_data import gather_on_rank_0, on_rank_0

from .costs.collectives import Link
from .experts.layers import ExpertAxis
from .mesh import PlanMesh

Result = TypeVar("Result")
SIZES = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "short": 2,
    "bool": 1, "unsigned char": 1, "signed char": 1,
}  # fmt: skip
MOVED = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
COLLECTIVE = re.compile(r"(?:unisono|nccl|gloo):(_?\w+)")
REASONS = (  # range -> axis of the mesh, why
    ("FSDP::all_gather", "shard", "parameters are gathered before use"),
    ("FSDP::forward_prefetch", "shard", "parameters are gathered ahead of use"),
    ("FSDP::backward_prefetch", "shard", "parameters are gathered ahead of use"),
    ("FSDP::post_backward_reduce", "data", "gradients are reduced to their owners"),
    ("up::gradients", "replica", "gradients are averaged over replicas"),
    (
        "up::compressed units",
        "shard",
        "whole gradients are averaged, compressed, and each rank keeps its part",
    ),
    ("up::compressed", "replica", "gradients are averaged over replicas, compressed"),
    ("up::meeting", "replica", "replicas meet with the difference of their weights"),
    ("up::attention", "context", "attention takes the other parts of the sequence"),
    ("up::positions", "context", "sums over all positions, or positions that move"),
    ("up::programs", "context", "ranks compare their programs"),
    ("up::stages", "pipeline", "ranks compare their programs"),
    ("up::tensor", "tensor", "activations of a cut module"),
    ("up::shard", "tensor", "up.shard: a value goes into the layout of an operator"),
    ("up::experts", "expert", "rows go to their experts and back"),
    ("up::sums", "tensor", "gradients of a whole parameter in a cut region"),
    ("up::rows", "world", "how many rows each rank has"),
    ("up::buffers", "data", "buffers are made equal"),
    ("up::norms", "data", "statistics of BatchNorm over all rows, and their gradients"),
    ("up::agree", "world", "loss, norm and overflow verdict of all ranks"),
    ("up::tied", "pipeline", "gradients of a tied parameter"),
)


class CollectiveRecord(NamedTuple):
    """One collective or message of this rank. `nbytes`: received (a message: sent)."""

    operation: str
    axis: str
    ranks: int
    where: str
    why: str
    nbytes: float
    predicted_s: float
    measured_s: float


class ProfiledStep:
    """The events of one step on one rank."""

    def __init__(self, events: list[dict[str, Any]], base_ns: int) -> None:
        self.events = [event for event in events if event.get("ph") == "X"]
        self.base_ns = base_ns

    def calls(self, mesh: PlanMesh, link: Link, experts: ExpertAxis | None = None) -> list[CollectiveRecord]:
        """Every collective and message, in the order in which they began."""
        ranges = [e for e in self.events if e["name"].startswith(("FSDP::", "up::"))]
        found = [event for event in self.events if COLLECTIVE.match(event["name"])]
        return [
            _call(event, _around(event, ranges), mesh, link, experts)
            for event in sorted(found, key=lambda e: e["ts"])
        ]

    def received(self, ranks: int) -> float:
        """The bytes that this rank has received, where all collectives are over so many ranks."""
        total = 0.0
        for event in self.events:
            found = COLLECTIVE.match(event["name"])
            if found is None or found[1] == "send":
                continue
            moves = found[1] in MOVED and ranks > 1
            total += Link().received(found[1], ranks, _nbytes(event)) if moves else _nbytes(event)
        return total

    def share(self) -> float:
        """The share of the step in which at least one collective or message was under way."""
        return self._covered(lambda _: True) / self._whole()

    def shares(self) -> tuple[float, float]:
        """The shares of the step in collectives, and in receiving from other stages only."""
        every = self._covered(lambda _: True)
        collectives = self._covered(lambda operation: operation not in ("send", "recv"))
        return collectives / self._whole(), (every - collectives) / self._whole()

    def _covered(self, wanted: Callable[[str], bool]) -> float:
        """Microseconds in which at least one such collective or message was under way."""
        found = [(COLLECTIVE.match(event["name"]), event) for event in self.events]
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for match, e in found if match and wanted(match[1]))
        covered: float = 0.0
        end: float = 0.0
        for start, stop in spans:
            covered += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return covered

    def _whole(self) -> float:
        times = [(e["ts"], e["ts"] + e["dur"]) for e in self.events if e.get("cat") != "Trace"]
        whole: float = max(stop for _, stop in times) - min(start for start, _ in times)
        return whole


def profile_step(work: Callable[[], Result]) -> tuple[Result, ProfiledStep]:
    """Run `work` under the profiler."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        result = work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        written = json.loads(path.read_text())
    return result, ProfiledStep(written["traceEvents"], int(written.get("baseTimeNanoseconds", 0)))


def _around(event: dict[str, Any], ranges: list[dict[str, Any]]) -> list[str]:
    """Names of the ranges in which `event` began, the innermost first."""
    at = event["ts"]
    inside = [r for r in ranges if r["tid"] == event["tid"] and r["ts"] <= at <= r["ts"] + r["dur"]]
    return [r["name"] for r in sorted(inside, key=lambda r: r["dur"])]


def _call(
    event: dict[str, Any], around: list[str], mesh: PlanMesh, link: Link, experts: ExpertAxis | None
) -> CollectiveRecord:
    operation = COLLECTIVE.match(event["name"])[1]  # type: ignore[index]
    axis, where, why = _reason(operation, around)
    if experts is not None and mesh.plan.tensor == 1 and axis == "tensor":
        axis = "expert"
    if experts is not None and axis not in ("world", "tensor", "context") and experts.holds(where):
        mesh = experts.mesh
    ranks = _ranks("tensor" if axis == "expert" else axis, operation, mesh)
    nbytes = _nbytes(event)
    if operation in ("send", "recv"):
        received, predicted = float(nbytes), link.latency_s + nbytes * link.byte_s
    elif operation in MOVED and ranks > 1:
        received, predicted = link.received(operation, ranks, nbytes), link.seconds(operation, ranks, nbytes)
    else:
        received, predicted = (
            nbytes,
            link.latency_s * math.ceil(math.log2(max(ranks, 2))) + nbytes * link.byte_s,
        )
    return CollectiveRecord(operation, axis, ranks, where, why, received, predicted, event["dur"] * 1e-6)


def _reason(operation: str, around: list[str]) -> tuple[str, str, str]:
    slot = next((name.partition("|")[2] for name in around if name.startswith("up::pipeline")), "")
    if operation in ("send", "recv") and not any(name.startswith("up::attention") for name in around):
        return "pipeline", slot or "between stages", "activations or gradients go to the next stage"
    for name in around:
        for start, axis, why in REASONS:
            if name.startswith(start):
                if axis == "data" and operation == "all_reduce":
                    return "replica", _place(name), "gradients are summed over replicas"
                return "shard" if axis == "data" else axis, _place(name), why
    return "tensor", f"backward, {slot}", "gradients of the inputs of a cut module"


def _place(name: str) -> str:
    """Example: "FSDP::all_gather (blocks.1)" -> "blocks.1"; "up::tensor|blocks.1.fc2" -> "blocks.1.fc2"."""
    inner = re.search(r"\(([^()]*)\)", name)
    return (inner[1] if inner else name.partition("|")[2]) or "root"


def _ranks(axis: str, operation: str, mesh: PlanMesh) -> int:
    if axis in ("world", "context"):
        return mesh.plan.ranks if axis == "world" else mesh.plan.context
    if operation in ("send", "recv"):
        return 2
    return int((mesh.everyone if axis == "replica" else mesh).part(axis).size())


def _nbytes(event: dict[str, Any]) -> int:
    shapes, types = event.get("args", {}).get("Input Dims", []), event.get("args", {}).get("Input type", [])
    return sum(
        math.prod(shape) * SIZES.get(kind, 4)
        for shape, kind in zip(shapes, types, strict=False)
        if not shape or isinstance(shape[0], int)
    )


class CommunicationReport(list[CollectiveRecord]):
    """Every collective of a step; as text one line for each kind of call, and the sum of each axis.

    Attributes:
        notes: what this run does otherwise than its plan could, and why.
    """

    notes: Sequence[str] = ()

    def __str__(self) -> str:
        head = (
            f"{'operation':15}{'axis':9}{'ranks':>6}{'times':>6}{'bytes':>12}{'predicted':>12}{'measured':>12}"
            "  where: why"
        )
        lines = [head]
        for key, calls in _group_by(self, lambda c: (c.operation, c.axis, c.ranks, c.where, c.why)).items():
            operation, axis, ranks, where, why = key
            lines.append(f"{operation:15}{axis:9}{ranks:6}{_figures(calls)}  {where}: {why}")
        for axis, calls in _group_by(self, lambda c: c.axis).items():
            lines.append(f"{'in all':15}{axis:9}{'':6}{_figures(calls)}")
        lines += self.notes
        return "\n".join(lines)


def _group_by(
    calls: Iterable[CollectiveRecord], key: Callable[[CollectiveRecord], Any]
) -> dict[Any, list[CollectiveRecord]]:
    groups: dict[Any, list[CollectiveRecord]] = {}
    for call in calls:
        groups.setdefault(key(call), []).append(call)
    return groups


def _figures(calls: list[CollectiveRecord]) -> str:
    nbytes, predicted, measured = (sum(call[at] for call in calls) for at in (5, 6, 7))  # type: ignore[misc]
    return f"{len(calls):6}{nbytes:12.0f}{predicted * 1e3:10.3f}ms{measured * 1e3:10.3f}ms"


def write_trace(watched: ProfiledStep, path: Path) -> None:
    """Write the step of all ranks as one file for ui.perfetto.dev. All ranks call this; rank 0 writes."""
    rows: list[dict[str, Any]] = []
    for event in watched.events:
        row = _row(event["name"])
        if row is None and (event.get("cat") != "cpu_op" or event["dur"] < 20):
            continue
        name = event["name"].removeprefix("up::")
        kept = {"ph": "X", "name": name, "pid": dist.get_rank(), "tid": row or "compute"}
        kept |= {"ts": watched.base_ns / 1e3 + event["ts"], "dur": event["dur"]}
        rows.append(kept | {"args": {"bytes": _nbytes(event)} if row == "collectives" else {}})
    gathered = gather_on_rank_0(lambda: rows)
    on_rank_0(lambda: path.write_text(json.dumps(_merge_traces(gathered))))


def _merge_traces(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    names = ["pipeline slots", "compute", "parameters and gradients", "collectives"]
    start = min((event["ts"] for events in ranks for event in events), default=0.0)
    merged: list[dict[str, Any]] = []
    for rank, events in enumerate(ranks):
        merged.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for tid, name in enumerate(names):
            merged.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}})
        merged += [event | {"ts": event["ts"] - start, "tid": names.index(event["tid"])} for event in events]
    return {"traceEvents": merged, "displayTimeUnit": "ms"}


def _row(name: str) -> str | None:
    if name.startswith("up::pipeline"):
        return "pipeline slots"
    if COLLECTIVE.match(name):
        return "collectives"
    return "parameters and gradients" if name.startswith(("FSDP::", "up::")) else None
