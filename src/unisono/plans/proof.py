"""Prove a plan by running it on symbols.

Every chunk holds a value: the contributions that it combines, and their order. The ranks' steps are run
greedily. As in the engine, an edge holds a bounded number of messages, and a sender can have a bounded number
outstanding.

Why one run proves every interleaving: a rank's steps are a fixed sequence, and each waits for counters that
only grow (messages arrived on an edge, messages received from it). Such a system is confluent: in whatever
order the ranks run, it ends in the same state, or blocks at the same place (Kahn, "The semantics of a simple
language for parallel programming", IFIP 1974). The same argument covers several operations and segments in
succession: running them one after another is one of the interleavings.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from unisono.engine.base.validation import instance, whole
from unisono.errors import PlanError
from unisono.plans.coded_edges import coded_edges, rounds
from unisono.plans.contracts import CONTRACTS, Contribution
from unisono.plans.plan import EDGE_CAPACITY, Chunk, Copy, Plan, Recv, Reduce, Send, Step

CODES = "codes"
"""(CODES, order): the decoded codes of a value."""


class Deadlock(PlanError):
    """Ranks wait for each other in a cycle."""


@dataclass(frozen=True)
class SymbolicValue:
    """The value of a chunk.

    Attributes:
        order: how it was combined; equal orders mean equal bits. A contribution, or a tuple of orders.
        ranks: bit r is set when rank r contributed.  block: which block of theirs.
        raw: it is one rank's untouched contribution: neither sent nor reduced yet (PREMUL_SUM multiplies at
            the first send or Reduce, once).
        lossy: bit r is set when the contribution of rank r has been encoded.
        decoded: it is a decoded value, to which nothing was added since.
    """

    order: tuple[object, ...]
    ranks: int
    block: int
    raw: bool = False
    lossy: int = 0
    decoded: bool = False


@dataclass(frozen=True)
class StepValues:
    """The values at one step: the own value that it read, and the one that it wrote."""

    own: SymbolicValue | None
    result: SymbolicValue | None


@dataclass(frozen=True)
class Proof:
    """Further properties of a correct plan.

    Attributes:
        canonical: every reduction combines untouched contributions in the order of ranks, all at once: the
            bits equal those of any other canonical plan, however the buffer is cut. A plan that rounds and
            forwards partial results, as around a ring, is not canonical.
        once: no two ranks compute the same: a function that gives other bits on another machine still gives
            all ranks the same.
        encodings: how often a contribution is encoded before it is in a result, at most.
        results: the orders in which results are combined, each once; an encoded value is (CODES, order).
    """

    canonical: bool
    once: bool = True
    encodings: int = 0
    results: tuple[tuple[object, ...], ...] = ()


@dataclass
class _SymbolicRank:
    chunks: dict[Chunk, SymbolicValue]
    next_step: int = 0
    outstanding: deque[list[int]] = field(default_factory=deque)  # per message: receivers left
    findings: list[StepValues] = field(default_factory=list)


def start(plan: Plan, rank: int) -> dict[Chunk, SymbolicValue]:
    """The values of a rank before its first step."""
    contract = CONTRACTS[plan.collective]
    space = "out" if contract.in_place else "in"
    if not contract.gives(rank, plan.root):
        return {}
    return {
        Chunk(space, index): SymbolicValue((rank, index), 1 << rank, index, raw=True)
        for index in range(max(1, plan.chunks(space)))
    }


class _SymbolicRun:
    """A symbolic run of all ranks."""

    def __init__(self, plan: Plan, edge_capacity: int, in_flight: int, idempotent: bool) -> None:
        self.plan = plan
        self.idempotent = idempotent
        self.coded = coded_edges(plan.coding, plan.hosts)
        self.rounds = [
            rounds(plan.collective, rank, plan.root, steps, self.coded) if plan.coding else ()
            for rank, steps in enumerate(plan.steps)
        ]
        self.contract = CONTRACTS[plan.collective]
        self.edge_capacity = edge_capacity
        self.in_flight = in_flight
        self.edges: dict[tuple[int, int], deque[tuple[SymbolicValue, int, list[int]]]] = {}
        self.ranks = [_SymbolicRank(start(plan, rank)) for rank in range(plan.size)]

    def error(self, rank: int, what: str, number: int | None = None) -> PlanError:
        number = self.ranks[rank].next_step if number is None else number
        steps = self.plan.steps[rank]
        step = steps[number] if number < len(steps) else "end"
        return PlanError(f"{self.plan}: rank {rank}, step {number}, {step}: {what}")

    # ---- steps ---------------------------------------------------------------------------------------

    def advance(self, rank: int) -> bool:
        """Run all steps of a rank that can run now; returns whether there was one."""
        state, steps, moved = self.ranks[rank], self.plan.steps[rank], False
        while state.next_step < len(steps) and self._ready(rank, steps[state.next_step]):
            self._do(rank, steps[state.next_step])
            state.next_step += 1
            moved = True
        return moved

    def _ready(self, rank: int, step: Step) -> bool:
        return self._blocker(rank, step) is None

    def _blocker(self, rank: int, step: Step) -> int | None:
        """The rank a step has to wait for, or None."""
        if isinstance(step, Send):
            self._check_peers(rank, step.to)
            for peer in step.to:
                if len(self.edges.get((rank, peer), ())) >= self.edge_capacity:
                    return peer
            outstanding = self.ranks[rank].outstanding
            while outstanding and not outstanding[0]:
                outstanding.popleft()
            return outstanding[0][0] if step.to and len(outstanding) >= self.in_flight else None
        for peer in self._sources(rank, step):
            if not self.edges.get((peer, rank)):
                return peer
        return None

    def _sources(self, rank: int, step: Step) -> tuple[int, ...]:
        if isinstance(step, Recv):
            self._check_peers(rank, (step.frm,))
            return (step.frm,)
        if isinstance(step, Reduce):
            sources = tuple(peer for peer in step.frm if peer != rank)
            self._check_peers(rank, sources)
            if len(set(step.frm)) != len(step.frm) or not step.frm:
                raise self.error(rank, "names a rank twice, or none")
            return sources
        return ()

    def _check_peers(self, rank: int, peers: tuple[int, ...]) -> None:
        if rank in peers or len(set(peers)) != len(peers):
            raise self.error(rank, "names a rank twice, or itself")
        for peer in peers:
            if not 0 <= peer < self.plan.size:
                raise self.error(rank, f"there is no rank {peer}")

    def _do(self, rank: int, step: Step) -> None:
        own: SymbolicValue | None = None
        result: SymbolicValue | None = None
        if isinstance(step, Send):
            own = self._read(rank, step.chunk)
            receivers = list(step.to)
            if receivers:
                self.ranks[rank].outstanding.append(receivers)
            decoded = self._encode(rank, own) if any(self.coded(rank, peer) for peer in step.to) else own
            for peer in step.to:
                value = decoded if self.coded(rank, peer) else own
                message = (replace(value, raw=False), step.chunk.index, receivers)
                self.edges.setdefault((rank, peer), deque()).append(message)
            if self.plan.coding and self.rounds[rank][self.ranks[rank].next_step]:
                self._write(rank, step.chunk, decoded)
        elif isinstance(step, Recv):
            result = self._take(rank, step.frm, step.chunk)
        elif isinstance(step, Reduce):
            own_chunk = step.own or step.chunk
            self._check_sizes(rank, step.chunk, own_chunk)
            values = [
                self._read(rank, own_chunk) if peer == rank else self._take(rank, peer, step.chunk)
                for peer in step.frm
            ]
            own = values[step.frm.index(rank)] if rank in step.frm else None
            result = self._combine(rank, values)
        else:
            self._check_sizes(rank, step.dst, step.src)
            own = result = self._read(rank, step.src)
        if result is not None:
            self._write(rank, step.dst if isinstance(step, Copy) else step.chunk, result)
        self.ranks[rank].findings.append(StepValues(own, result))

    def _encode(self, rank: int, value: SymbolicValue) -> SymbolicValue:
        """The decoded codes of a value; refuses an encoding that would add a second error."""
        if value.decoded and self.idempotent:
            return value
        if value.decoded:
            raise self.error(
                rank,
                "passes on what came as codes, and encoding it again changes it; let its first sender send "
                "it to all",
            )
        if value.lossy and not (self.contract.reduces and value.ranks == (1 << self.plan.size) - 1):
            raise self.error(
                rank,
                f"encodes a partial result in which the contribution of rank {_first(value.lossy)} has been "
                "encoded already; let one rank add up all contributions",
            )
        return SymbolicValue((CODES, value.order), value.ranks, value.block, lossy=value.ranks, decoded=True)

    def _read(self, rank: int, chunk: Chunk) -> SymbolicValue:
        value = self.ranks[rank].chunks.get(chunk)
        if value is None:
            raise self.error(rank, f"reads {chunk} before anything was written there")
        return value

    def _write(self, rank: int, chunk: Chunk, value: SymbolicValue) -> None:
        if chunk.space == "in":
            raise self.error(rank, f"writes {chunk}, the caller's input")
        self.ranks[rank].chunks[chunk] = value

    def _take(self, rank: int, peer: int, chunk: Chunk) -> SymbolicValue:
        value, index, receivers = self.edges[peer, rank].popleft()
        receivers.remove(rank)
        if self.contract.out_blocks == "any" and index != chunk.index:
            raise self.error(rank, f"takes chunk {index} of rank {peer} for {chunk}; their sizes differ")
        return value

    def _check_sizes(self, rank: int, result: Chunk, source: Chunk) -> None:
        if self.contract.out_blocks == "any" and result.index != source.index:
            raise self.error(rank, f"takes {source} for {result}; their sizes differ")

    def _combine(self, rank: int, values: list[SymbolicValue]) -> SymbolicValue:
        if not self.contract.reduces:
            raise self.error(rank, f"{self.plan.collective} has nothing to reduce")
        ranks = lossy = 0
        for value in values:
            twice = ranks & value.ranks
            if twice and self.contract.counts:
                raise self.error(rank, f"the contribution of rank {_first(twice)} comes in twice")
            if value.block != values[0].block:
                raise self.error(rank, f"mixes block {value.block} with block {values[0].block}")
            ranks |= value.ranks
            lossy |= value.lossy
        if len(values) == 1:
            return replace(values[0], raw=False)
        return SymbolicValue(tuple(value.order for value in values), ranks, values[0].block, lossy=lossy)

    # ---- the end -------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Run everything; refuse a deadlock and messages that no rank receives."""
        waiting = deque(range(self.plan.size))
        idle = 0
        while waiting and idle < len(waiting):
            rank = waiting.popleft()
            moved = self.advance(rank)
            if self.ranks[rank].next_step < len(self.plan.steps[rank]):
                waiting.append(rank)
                idle = 0 if moved else idle + 1
            else:
                idle = 0
        if waiting:
            raise self._deadlock(sorted(waiting))
        for (sender, receiver), messages in self.edges.items():
            if messages:
                raise PlanError(
                    f"{self.plan}: rank {receiver} never takes {len(messages)} of the messages that "
                    f"rank {sender} sends it ({self._sends(sender, receiver)})"
                )

    def _sends(self, sender: int, receiver: int) -> str:
        steps = self.plan.steps[sender]
        found = [
            f"step {n}, {step}"
            for n, step in enumerate(steps)
            if isinstance(step, Send) and receiver in step.to
        ]
        return f"the last is {found[-1]}"

    def _deadlock(self, waiting: list[int]) -> Deadlock:
        lines = []
        for rank in waiting[:8]:
            number = self.ranks[rank].next_step
            step = self.plan.steps[rank][number]
            lines.append(f"rank {rank} waits for rank {self._blocker(rank, step)} at step {number}, {step}")
        return Deadlock(f"{self.plan}: deadlock: " + "; ".join(lines))


def run(
    plan: Plan, *, edge_capacity: int = EDGE_CAPACITY, idempotent: bool = False
) -> tuple[int, list[list[StepValues]]]:
    """Run a plan on symbols: (messages in flight, the findings of every rank and step).

    Messages in flight: how many a sender must be able to have outstanding so that the plan does not deadlock.
    The engine chooses the size of segments by it. As many as there are chunks cost nothing (a segment of all
    of them fits into staging memory), and are enough for every algorithm of the catalogue; a larger number is
    found by doubling.

    Raises:
        PlanError: a deadlock, a read before a write, a contribution twice, a message that no rank receives.
    """
    in_flight, running = _run_to_end(plan, edge_capacity, idempotent)
    return in_flight, [rank.findings for rank in running.ranks]


def _run_to_end(plan: Plan, edge_capacity: int, idempotent: bool) -> tuple[int, _SymbolicRun]:
    most = max((sum(isinstance(step, Send) for step in steps) for steps in plan.steps), default=0)
    in_flight = max(1, plan.chunks("out"), plan.chunks("in"))
    while True:
        running = _SymbolicRun(plan, edge_capacity, in_flight, idempotent)
        try:
            running.finish()
        except Deadlock:
            if in_flight >= most:
                raise
            in_flight = min(2 * in_flight, most)
        else:
            _check_results(running)
            return in_flight, running


def prove(plan: Plan, *, edge_capacity: int = EDGE_CAPACITY, idempotent: bool = False) -> Proof:
    """Prove that a plan is correct, or raise an error with the step where it is not.

    The proof holds for this number of ranks and any interleaving. It shows that

    - every output chunk holds exactly the contributions of its contract, each once;
    - where ranks must agree, all combine them in one order, so that the bits agree;
    - every result has gone through a Reduce, which PREMUL_SUM needs;
    - nothing is read before it is written, and the caller's input is never written;
    - the plan does not deadlock, with edges of `edge_capacity` messages, and no message is left over;
    - where edges carry codes, a contribution is encoded once by itself or in a host's sum, and once in the
      complete result, and all ranks get the same bits.

    Args:
        idempotent: encoding a decoded value gives the same codes again, so that it may be forwarded.
    Raises:
        PlanError: the plan is wrong; the message shows the rank and the step.
    """
    instance(plan, Plan, "plan")
    edge_capacity = whole(edge_capacity, "edge_capacity", 1)
    if len(plan.steps) != plan.size or not 0 <= plan.root < plan.size:
        raise PlanError(f"{plan}: has steps for {len(plan.steps)} ranks and root {plan.root}")
    _, running = _run_to_end(plan, edge_capacity, idempotent)
    findings = [rank.findings for rank in running.ranks]
    results = [found.result for seen in findings for found in seen if found.result is not None]
    orders = {
        value.order: None
        for rank in running.ranks
        for chunk, value in rank.chunks.items()
        if chunk.space == "out"
    }
    combined = [
        found.result.order
        for steps, seen in zip(plan.steps, findings, strict=True)
        for step, found in zip(steps, seen, strict=True)
        if isinstance(step, Reduce) and len(step.frm) > 1 and found.result is not None
    ]
    return Proof(
        canonical=all(_in_rank_order(value) for value in results),
        once=len(set(combined)) == len(combined),
        encodings=max(map(_encodings, orders), default=0),
        results=tuple(orders),
    )


def _encodings(order: object) -> int:
    """How often a contribution in this order has been encoded, at most."""
    if not isinstance(order, tuple) or isinstance(order[0], int):
        return 0
    if order[0] == CODES:
        return 1 + _encodings(order[1])
    return max(map(_encodings, order))


def _in_rank_order(value: SymbolicValue) -> bool:
    """Whether its contributions were combined in one step, the lowest rank first."""
    contributors = tuple(rank for rank in range(value.ranks.bit_length()) if value.ranks >> rank & 1)
    if len(contributors) == 1:
        return True
    return value.order == tuple((rank, value.block) for rank in contributors)


def _check_results(running: _SymbolicRun) -> None:
    plan = running.plan
    _check_block_counts(plan)
    orders: dict[int, tuple[int, tuple[object, ...]]] = {}
    for rank in range(plan.size):
        for chunk in range(max(1, plan.chunks("out"))):
            expected = _expected(plan, rank, chunk)
            value = running.ranks[rank].chunks.get(Chunk("out", chunk))
            if expected is None:
                if value is not None:
                    raise running.error(rank, f"writes Out({chunk}), which is not its to write")
                continue
            _check_value(running, rank, chunk, value, expected)
            assert value is not None
            contract = running.contract
            if value.raw and contract.reduces and contract.counts and not contract.keeps(rank, plan.root):
                raise running.error(
                    rank,
                    f"Out({chunk}) is as its rank gave it, and PREMUL_SUM would not multiply it; "
                    f"let it go through Reduce(Out({chunk}), frm=({rank},))",
                )
            if plan.collective not in ("all_reduce", "all_gather", "broadcast"):
                continue
            first, order = orders.setdefault(chunk, (rank, value.order))
            if order != value.order:
                raise running.error(
                    rank, f"Out({chunk}) was combined as {value.order}, on rank {first} as {order}"
                )


def _expected(plan: Plan, rank: int, chunk: int) -> list[Contribution] | None:
    """What Out(chunk) has to hold: part k of every block is promised as the block is."""
    contract = CONTRACTS[plan.collective]
    if plan.parts == 1:
        return contract.expected(rank, chunk, plan.size, plan.root)
    block, part = divmod(chunk, plan.parts)
    expected = contract.expected(rank, block, plan.size, plan.root)
    return expected and [(peer, given * plan.parts + part) for peer, given in expected]


def _check_value(
    running: _SymbolicRun, rank: int, chunk: int, value: SymbolicValue | None, expected: list[Contribution]
) -> None:
    if value is None:
        raise running.error(rank, f"Out({chunk}) was never written")
    block = expected[0][1]
    wanted = sum(1 << peer for peer, _ in expected)
    if missing := wanted & ~value.ranks:
        raise running.error(rank, f"Out({chunk}) lacks the contribution of rank {_first(missing)}")
    if surplus := value.ranks & ~wanted:
        raise running.error(rank, f"Out({chunk}) holds the contribution of rank {_first(surplus)}")
    if value.block != block:
        raise running.error(rank, f"Out({chunk}) holds block {value.block}, expected block {block}")


def _first(ranks: int) -> int:
    return (ranks & -ranks).bit_length() - 1


def _check_block_counts(plan: Plan) -> None:
    contract = CONTRACTS[plan.collective]
    for space, blocks in (("in", contract.in_blocks), ("out", contract.out_blocks)):
        each = {"0": 0, "1": plan.parts, "p": plan.size * plan.parts}
        wanted = each.get(blocks, plan.chunks(space))
        found = plan.chunks(space)
        if found != wanted and not (plan.size == 1 and blocks == "any"):
            raise PlanError(f"{plan}: speaks of {found} {space} chunks, expected {wanted}")
