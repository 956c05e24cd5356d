"""The steps of a plan as sends, receives and computations with labels: what GOAL and Chakra can say.

Those formats know how many bytes move, not what they mean. So the label of each action says which step it
belongs to, and a file that Unisono wrote becomes the same plan again:

    plan_all_reduce_root0_parts1_ring     what the plan is; computes nothing
    s0_send_out3_0      step 0 sends Out(3), to its first peer
    s1_recv_out2        step 1 receives Out(2)
    s2_reduce_out1_0    step 2 combines into Out(1); its first contribution is a message
    s2_own_out1_in4_1   ... its second one is this rank's In(4)
    s2_add_out1         ... the time that this takes
    s3_copy_out1_in0    step 3 copies
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unisono.plans.contracts import CONTRACTS
from unisono.plans.plan import Chunk, Copy, Plan, Recv, Reduce, Send, Step

__all__ = ["Rates", "TraceAction", "actions", "plan_of_actions"]

_PLAN = re.compile(r"plan_([a-z_]+)_root(\d{1,7})_parts(\d{1,5})_(\w+)")
_STEP = re.compile(
    r"s(\d{1,7})_(send|recv|reduce|own|add|copy)_(out|in|tmp)(\d{1,6})(?:_(out|in|tmp)(\d{1,6}))?(?:_(\d{1,7}))?"
)


class TraceAction(NamedTuple):
    """Something that a rank does.

    Attributes:
        kind: "send", "recv" or "calc".  label: see above, unique within the rank.
        size: bytes; of a calc nanoseconds.  peer, tag: of a message; -1, 0: none.
        requires: positions of the actions that must have ended.  irequires: of those that must have begun.
        cpu, nic: which of them do it, in GOAL.  line: of the file.
    """

    kind: str
    label: str
    size: int
    peer: int = -1
    tag: int = 0
    requires: tuple[int, ...] = ()
    irequires: tuple[int, ...] = ()
    cpu: int = 0
    nic: int = 0
    line: int = 0


class Rates(NamedTuple):
    """Nanoseconds per byte of reducing and copying."""

    reduce: float = 0.0
    copy: float = 0.0


def actions(plan: Plan, nbytes: int, rates: Rates = Rates()) -> list[list[TraceAction]]:  # noqa: B008  # frozen
    """The actions of all ranks for a buffer of `nbytes`, which its chunks share evenly (rounded up)."""
    chunk = -(-nbytes // max(1, plan.chunks("out"), plan.chunks("in")))
    tags: dict[tuple[int, int], int] = defaultdict(int)
    taken: dict[tuple[int, int], int] = defaultdict(int)
    found = []
    for rank, steps in enumerate(plan.steps):
        name = re.sub(r"\W", "_", plan.algorithm)
        title = f"plan_{plan.collective}_root{plan.root}_parts{plan.parts}_{name}"
        listed = [TraceAction("calc", title, 0)]
        for number, step in enumerate(steps):
            for action in _actions(rank, f"s{number}", step, chunk, rates):
                tag = 0
                if action.kind == "send":
                    tag = tags[rank, action.peer]
                    tags[rank, action.peer] += 1
                elif action.kind == "recv":
                    tag = taken[action.peer, rank]
                    taken[action.peer, rank] += 1
                before = (len(listed) - 1,)
                if listed[-1].kind == "send":  # a send need not have ended
                    listed.append(action._replace(tag=tag, irequires=before))
                else:
                    listed.append(action._replace(tag=tag, requires=before))
        found.append(listed)
    return found


def _actions(rank: int, name: str, step: Step, chunk: int, rates: Rates) -> Iterator[TraceAction]:
    if isinstance(step, Send):
        for at, peer in enumerate(step.to):
            yield TraceAction("send", f"{name}_send_{_ref(step.chunk)}_{at}", chunk, peer)
    elif isinstance(step, Recv):
        yield TraceAction("recv", f"{name}_recv_{_ref(step.chunk)}", chunk, step.frm)
    elif isinstance(step, Copy):
        yield TraceAction("calc", f"{name}_copy_{_ref(step.dst)}_{_ref(step.src)}", round(chunk * rates.copy))
    else:
        own = "" if step.own is None else f"_{_ref(step.own)}"
        for at, peer in enumerate(step.frm):
            if peer == rank:
                yield TraceAction("calc", f"{name}_own_{_ref(step.chunk)}{own}_{at}", 0)
            else:
                yield TraceAction("recv", f"{name}_reduce_{_ref(step.chunk)}_{at}", chunk, peer)
        more = max(0, len(step.frm) - 1)
        yield TraceAction("calc", f"{name}_add_{_ref(step.chunk)}", round(chunk * more * rates.reduce))


def _ref(chunk: Chunk) -> str:
    return f"{chunk.space}{chunk.index}"


class _Parts:
    """The actions of one step, until all are known."""

    def __init__(self, kind: str, chunk: Chunk, line: int) -> None:
        self.kind, self.chunk, self.line = kind, chunk, line
        self.own: Chunk | None = None
        self.peers: dict[int, int] = {}

    def step(self) -> Step:
        peers = tuple(self.peers[at] for at in sorted(self.peers))
        if self.kind == "send":
            return Send(self.chunk, peers)
        if self.kind == "recv":
            return Recv(self.chunk, peers[0])
        if self.kind == "copy":
            return Copy(self.chunk, self.own or self.chunk)
        return Reduce(self.chunk, peers, self.own)


def plan_of_actions(file: str, ranks: Sequence[Sequence[TraceAction]]) -> Plan:
    """The plan that the labels describe; it is not proved yet.

    Raises:
        ValueError: there are no such labels, or they contradict the actions; the message names the line.
    """
    title = (
        next((found for found in (_PLAN.fullmatch(a.label) for a in ranks[0]) if found), None)
        if ranks
        else None
    )
    if title is None or title[1] not in CONTRACTS:
        raise ValueError(
            f"{file}: says how many bytes move, not which chunks they are: it can be simulated, but not run. "
            "Only files that Unisono wrote become plans"
        )
    steps = tuple(tuple(_steps(file, rank, each)) for rank, each in enumerate(ranks))
    root, parts = int(title[2]), int(title[3])
    if not root < len(ranks) or not parts:
        raise ValueError(f"{file}: root {root} and {parts} parts, with {len(ranks)} ranks")
    return Plan(title[1], title[4], len(ranks), root, steps, parts=parts)


def _steps(file: str, rank: int, listed: Sequence[TraceAction]) -> Iterator[Step]:
    found: dict[int, _Parts] = {}
    for action in listed:
        label = _STEP.fullmatch(action.label)
        if label is None:
            if _PLAN.fullmatch(action.label):
                continue
            raise ValueError(f"{file}:{action.line}: rank {rank}: {action.label!r} is no step of a plan")
        number, kind, at = int(label[1]), label[2], int(label[7] or 0)
        expected = {"send": "send", "recv": "recv", "reduce": "recv"}.get(kind, "calc")
        same = "reduce" if kind in ("own", "add") else kind
        parts = found.setdefault(number, _Parts(same, Chunk(label[3], int(label[4])), action.line))
        if action.kind != expected or parts.kind != same or parts.chunk != (label[3], int(label[4])):
            raise ValueError(f"{file}:{action.line}: rank {rank}: {action.label!r} contradicts its step")
        if label[5]:
            parts.own = Chunk(label[5], int(label[6]))
        if kind in ("send", "recv", "reduce", "own"):
            if at in parts.peers:
                raise ValueError(f"{file}:{action.line}: rank {rank}: {action.label!r} stands there twice")
            parts.peers[at] = rank if kind == "own" else action.peer
    for number in sorted(found):
        parts = found[number]
        if not parts.peers and parts.kind != "copy":
            raise ValueError(f"{file}:{parts.line}: rank {rank}: step {number} has no message")
        yield parts.step()
