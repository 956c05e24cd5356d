"""A plan as the data of a picture: the messages of each round, and what each rank then holds.

Nothing is simulated here. The values are the proof's (`plans.proof`), the rounds and times the cost model's
(`costs.simulation`): in a round every rank sends at most one message and receives at most one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from unisono.engine.costs import plan_cost
from unisono.engine.costs.machine import DEFAULTS, MachineCalibration
from unisono.engine.costs.simulation import trace
from unisono.engine.costs.tuner import edges, predict_seconds
from unisono.plans import CONTRACTS, Chunk, Copy, Plan, Recv, Reduce, Send
from unisono.plans.plan import Step
from unisono.plans.proof import StepValues, SymbolicValue, prove, run, start

__all__ = ["ChunkUpdate", "PlanCost", "PlanTrace", "RoundMessage", "TraceRound", "numbers", "trace_plan"]


class RoundMessage(NamedTuple):
    """One message from `sender` to `receiver`: chunks of the sender, and the value of each."""

    sender: int
    receiver: int
    parts: tuple[tuple[Chunk, SymbolicValue], ...]


class ChunkUpdate(NamedTuple):
    """A rank's `step` ("recv", "reduce", "copy") wrote `value` into `chunk`, from messages of ranks `frm`."""

    rank: int
    chunk: Chunk
    value: SymbolicValue
    step: str
    frm: tuple[int, ...]


class TraceRound(NamedTuple):
    """The events between two rows of the picture.

    Attributes:
        number: 1 for the first.  end_s: when it is over, by the cost model, from the start of the plan.
    """

    number: int
    end_s: float
    messages: tuple[RoundMessage, ...]
    changes: tuple[ChunkUpdate, ...]


class PlanCost(NamedTuple):
    """The cost of a plan.

    Attributes:
        rounds: successive latencies.  messages, sent: the most of any rank; sent is a part of
            the buffer, such as "3/2".  formula: see `plan_cost.formula`.
        crossing: the most that leaves a host, a part of the buffer; "" on one host.
        nbytes: of the whole buffer, for the figures in seconds.  seconds: until the last rank is done.
        call_s: of a call, as `unisono bench` predicts: in shared memory a rank writes once for all receivers.
        a_s, b_s, g_s: of a message, of one of its bytes, of a byte reduced.  far_a_s, far_b_s: between hosts.
        calibrated: whether these were measured on this machine.
    """

    rounds: int
    messages: int
    sent: str
    formula: str
    crossing: str
    nbytes: int
    seconds: float
    call_s: float
    a_s: float
    b_s: float
    g_s: float
    far_a_s: float
    far_b_s: float
    calibrated: bool


class PlanTrace(NamedTuple):
    """A plan, ready to be drawn.

    Attributes:
        start: start[rank] is what the rank holds before its first step.
    """

    plan: Plan
    cost: PlanCost
    start: tuple[dict[Chunk, SymbolicValue], ...]
    rounds: tuple[TraceRound, ...]

    def held(self) -> list[list[dict[Chunk, SymbolicValue]]]:
        """held()[k][rank]: what a rank holds after round k; 0 is the start."""
        rows = [[dict(each) for each in self.start]]
        for one in self.rounds:
            row = [dict(each) for each in rows[-1]]
            for change in one.changes:
                row[change.rank][change.chunk] = change.value
            rows.append(row)
        return rows

    def complete(self, value: SymbolicValue) -> float:
        """The share of the final value that a value holds, from 0 to 1.

        In a reduction: the share of the ranks whose contributions it includes. Otherwise 1, or 0 for a value
        that no rank needs: before a broadcast the buffers of all ranks but the root.
        """
        if CONTRACTS[self.plan.collective].reduces:
            return value.ranks.bit_count() / self.plan.size
        return float(self.plan.collective != "broadcast" or value.ranks == 1 << self.plan.root)

    def colour(self, value: SymbolicValue) -> int:
        """The number of its colour: of its block, or of its rank where blocks are gathered."""
        if CONTRACTS[self.plan.collective].out_blocks == "p":
            return value.ranks.bit_length() - 1
        return value.block

    def label(self, value: SymbolicValue) -> str:
        """A short label of a value: its chunk, or its ranks where the buffer is not cut.

        Examples: "2" chunk 2; "r1" the contribution of rank 1; "Σ0–3" those of ranks 0 to 3, combined; "1→3"
        what rank 1 has for rank 3.
        """
        name = self.plan.collective
        if name == "all_to_all":
            return f"{self.colour(value)}→{value.block}"
        if CONTRACTS[name].reduces and max(self.plan.chunks("out"), self.plan.chunks("in")) <= 1:
            return ("Σ" if value.ranks & (value.ranks - 1) else "r") + numbers(ranks_of(value))
        return str(self.colour(value))

    def record(self) -> dict[str, Any]:
        """The picture as JSON data; docs/new-algorithm.md describes the fields."""
        plan = self.plan
        return {
            "collective": plan.collective,
            "algorithm": plan.algorithm,
            "size": plan.size,
            "root": plan.root,
            "hosts": list(plan.hosts),
            "reduces": CONTRACTS[plan.collective].reduces,
            "cost": self.cost._asdict(),
            "start": [[self._part(chunk, value) for chunk, value in chunks.items()] for chunks in self.start],
            "rounds": [
                {
                    "number": one.number,
                    "end_s": one.end_s,
                    "messages": [
                        {
                            "from": message.sender,
                            "to": message.receiver,
                            "chunks": [self._part(chunk, value) for chunk, value in message.parts],
                            "text": self.sentence(message),
                        }
                        for message in one.messages
                    ],
                    "changes": [
                        {
                            "rank": change.rank,
                            "step": change.step,
                            "from": list(change.frm),
                            **self._part(change.chunk, change.value),
                            "text": self._describe(change),
                        }
                        for change in one.changes
                    ],
                }
                for one in self.rounds
            ],
        }

    def _part(self, chunk: Chunk, value: SymbolicValue) -> dict[str, Any]:
        return {
            "space": chunk.space,
            "index": chunk.index,
            "block": value.block,
            "ranks": list(ranks_of(value)),
            "colour": self.colour(value),
            "label": self.label(value),
            "complete": self.complete(value),
        }

    def sentence(self, message: RoundMessage) -> str:
        """Example: "rank 0 sends Out(3) (of ranks 0,3) to rank 1"."""
        chunks = ", ".join(str(chunk) + self._owners(value) for chunk, value in message.parts)
        return f"rank {message.sender} sends {chunks} to rank {message.receiver}"

    def _describe(self, change: ChunkUpdate) -> str:
        frm = numbers(change.frm)
        how = {
            "recv": f"takes {change.chunk} from rank {frm}",
            "reduce": f"reduces {change.chunk}"
            + (f", from rank{'s' * (len(change.frm) > 1)} {frm}" if frm else ""),
            "copy": f"copies to {change.chunk}",
        }[change.step]
        return f"rank {change.rank} {how}{self._owners(change.value, 'now ')}"

    def _owners(self, value: SymbolicValue, now: str = "") -> str:
        """The ranks whose contributions a value combines, where there can be several."""
        if not CONTRACTS[self.plan.collective].reduces:
            return ""
        ranks = ranks_of(value)
        return f" ({now}of rank{'s' if len(ranks) > 1 else ''} {numbers(ranks)})"


def ranks_of(value: SymbolicValue) -> tuple[int, ...]:
    """The ranks whose contributions a value holds."""
    return tuple(rank for rank in range(value.ranks.bit_length()) if value.ranks >> rank & 1)


def numbers(values: tuple[int, ...]) -> str:
    """Example: numbers((0, 1, 2, 5)) is "0–2,5"."""
    found: list[list[int]] = []
    for value in sorted(values):
        if found and value == found[-1][1] + 1:
            found[-1][1] = value
        else:
            found.append([value, value])
    return ",".join(
        str(first) if first == last else f"{first},{last}" if last == first + 1 else f"{first}–{last}"
        for first, last in found
    )


def trace_plan(plan: Plan, nbytes: int = 1 << 20, machine: MachineCalibration = DEFAULTS) -> PlanTrace:
    """Prove a plan, and record every round of it.

    Args:
        nbytes: size of the whole buffer, for the predicted times.  machine: the figures of the cost model.
    Raises:
        PlanError: the plan is wrong; the text names the rank and the step.
    """
    prove(plan)
    if not CONTRACTS[plan.collective].counts:
        nbytes = 0  # a barrier has none
    _, findings = run(plan)
    inside, between, g = edges(machine)
    counted = trace(plan)
    timed = trace(plan, nbytes, a=inside.a, b=inside.b, g=g, between=between)
    last = max([1, *(round(message.end) for message in counted.messages)])
    messages: list[list[RoundMessage]] = [[] for _ in range(last + 1)]
    changes: list[list[ChunkUpdate]] = [[] for _ in range(last + 1)]
    ends = [0.0] * (last + 1)
    when: dict[tuple[int, int, int], int] = {}
    for message in counted.messages:
        number = when[message.sender, message.receiver, message.step] = round(message.end)
        steps = range(message.step, message.step + message.sends)
        messages[number].append(
            RoundMessage(
                message.sender,
                message.receiver,
                tuple(_sent(plan.steps[message.sender][n], findings[message.sender][n]) for n in steps),
            )
        )
    for message in timed.messages:
        number = when[message.sender, message.receiver, message.step]
        ends[number] = max(ends[number], message.end)
    for rank, steps_of_rank in enumerate(plan.steps):
        for n, step in enumerate(steps_of_rank):
            if not isinstance(step, Send):
                number = max(1, round(counted.done[rank][n]))
                changes[number].append(_changed(rank, step, findings[rank][n]))
                ends[number] = max(ends[number], timed.done[rank][n])
    for number in range(1, last + 1):
        ends[number] = max(ends[number - 1 : number + 1])
    return PlanTrace(
        plan,
        _cost(plan, nbytes, machine),
        tuple(start(plan, rank) for rank in range(plan.size)),
        tuple(
            TraceRound(
                n, ends[n], tuple(sorted(messages[n], key=lambda each: each.sender)), tuple(changes[n])
            )
            for n in range(1, last + 1)
        ),
    )


def _sent(step: Step, found: StepValues) -> tuple[Chunk, SymbolicValue]:
    assert isinstance(step, Send)
    assert found.own is not None
    return step.chunk, found.own


def _changed(rank: int, step: Recv | Reduce | Copy, found: StepValues) -> ChunkUpdate:
    assert found.result is not None
    if isinstance(step, Copy):
        return ChunkUpdate(rank, step.dst, found.result, "copy", ())
    if isinstance(step, Recv):
        return ChunkUpdate(rank, step.chunk, found.result, "recv", (step.frm,))
    frm = tuple(peer for peer in step.frm if peer != rank)
    return ChunkUpdate(rank, step.chunk, found.result, "reduce", frm)


def _cost(plan: Plan, nbytes: int, machine: MachineCalibration) -> PlanCost:
    counts = CONTRACTS[plan.collective].counts
    inside, between, g = edges(machine)
    several = len(set(plan.hosts)) > 1
    return PlanCost(
        rounds=plan_cost.rounds(plan),
        messages=max(plan_cost.messages(plan)),
        sent=str(max(plan_cost.bytes_sent(plan))) if counts else "0",
        formula=plan_cost.formula(plan),
        crossing=str(max(out for out, _ in plan_cost.link_bytes(plan).values()))
        if several and counts
        else "",
        nbytes=nbytes,
        seconds=plan_cost.seconds(plan, nbytes, a=inside.a, b=inside.b, g=g, between=between),
        call_s=predict_seconds(plan, nbytes, machine),
        a_s=inside.a,
        b_s=inside.b,
        g_s=g,
        far_a_s=between.a,
        far_b_s=between.b,
        calibrated=machine.measured_here,
    )
