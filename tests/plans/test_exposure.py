"""Messages that are read where they lie: in whatever order ranks run, a plan ends as it does with copies."""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from loops import each
from unisono.plans import ALGORITHMS, CONTRACTS, PLACED, Chunk, Copy, In, Out, Plan, Recv, Reduce, Send, make
from unisono.plans.plan import Step
from unisono.plans.provenance import Provenance
from unisono.plans.zero_copy import zero_copy_sends

NAMES = [(collective, name) for collective in ALGORITHMS for name in ALGORITHMS[collective]]
HOSTS = [(0, 0, 1), (0, 1, 1, 0, 2), (1, 0, 0, 0, 1, 1), (0, 1, 2)]


def plans(collective: str, name: str) -> Iterator[Plan]:
    """For several sizes, on one host and on more, and with every rank as the root."""
    placed = name in PLACED.get(collective, {})
    for hosts in [(0,) * size for size in (2, 3, 4, 5, 8)] + (HOSTS if placed else []):
        for root in range(len(hosts) if CONTRACTS[collective].rooted else 1):
            yield make(collective, name, len(hosts), root, hosts)


Places = Callable[[int, Chunk], Chunk]
"""(rank, chunk) -> where it lies: two chunks that lie in one place share their memory."""


def apart(rank: int, chunk: Chunk) -> Chunk:
    return chunk


def input_in_output(rank: int, chunk: Chunk) -> Chunk:
    return Out(rank) if chunk == In(0) else chunk


def output_in_input(rank: int, chunk: Chunk) -> Chunk:
    return In(rank) if chunk == Out(0) else chunk


def layouts(collective: str) -> list[Places]:
    """How a call's buffers may lie: see `unisono.engine.group.buffer_layout`."""
    if collective in ("all_gather", "gather"):
        return [apart, input_in_output]
    return [apart, output_in_input] if collective in ("scatter", "reduce_scatter") else [apart]


class Run:
    """A plan run with values that tell whose contributions they are; of what is open a reference is sent."""

    def __init__(self, plan: Plan, open_: list[list[bool]], places: Places) -> None:
        self.plan, self.open, self.places = plan, open_, places
        contract = CONTRACTS[plan.collective]
        space = "out" if contract.in_place else "in"
        self.memory: list[dict[Chunk, Any]] = [
            {
                places(rank, Chunk(space, index)): (rank, index)
                for index in range(max(1, plan.chunks(space)))
                if contract.gives(rank, plan.root)
            }
            for rank in range(plan.size)
        ]
        self.edges: dict[tuple[int, int], deque[Callable[[], Any]]] = defaultdict(deque)
        self.next = [0] * plan.size
        self.zero_copy: list[set[Chunk]] = [set() for _ in range(plan.size)]

    def ready(self) -> list[int]:
        return [rank for rank in range(self.plan.size) if self._ready(rank)]

    def _ready(self, rank: int) -> bool:
        steps = self.plan.steps[rank]
        if self.next[rank] == len(steps):
            return False
        return all(self.edges[peer, rank] for peer in senders(rank, steps[self.next[rank]]))

    def urgency(self, rank: int) -> int:
        """Whoever sends goes first, then whoever writes over what it has sent, and readers last."""
        step = self.plan.steps[rank][self.next[rank]]
        if isinstance(step, Send):
            return 0
        return 1 if self.places(rank, written(step)) in self.zero_copy[rank] else 2

    def advance(self, rank: int) -> None:
        number, memory = self.next[rank], self.memory[rank]
        step = self.plan.steps[rank][number]
        self.next[rank] += 1
        if isinstance(step, Send):
            place = self.places(rank, step.chunk)
            kept = memory.get(place)
            if self.open[rank][number]:
                self.zero_copy[rank].add(place)
            message = (lambda: memory.get(place)) if self.open[rank][number] else (lambda: kept)
            for peer in step.to:
                self.edges[rank, peer].append(message)
        elif isinstance(step, Copy):
            memory[self.places(rank, step.dst)] = memory.get(self.places(rank, step.src))
        elif isinstance(step, Recv):
            memory[self.places(rank, step.chunk)] = self.edges[step.frm, rank].popleft()()
        else:
            own = memory.get(self.places(rank, step.own or step.chunk))
            memory[self.places(rank, step.chunk)] = tuple(
                own if peer == rank else self.edges[peer, rank].popleft()() for peer in step.frm
            )

    def results(self) -> list[dict[int, Any]]:
        """What Out holds on every rank that has one."""
        plan, expected = self.plan, CONTRACTS[self.plan.collective].expected
        return [
            {
                index: memory.get(self.places(rank, Out(index)))
                for index in range(plan.chunks("out"))
                if expected(rank, index, plan.size, plan.root) is not None
            }
            for rank, memory in enumerate(self.memory)
        ]


def senders(rank: int, step: Any) -> list[int]:
    if isinstance(step, Recv):
        return [step.frm]
    return [peer for peer in step.frm if peer != rank] if isinstance(step, Reduce) else []


def written(step: Any) -> Chunk:
    return step.dst if isinstance(step, Copy) else step.chunk


Order = Callable[[Run, Sequence[int]], int]


def orders(seed: str) -> list[Order]:
    """Which of the ranks that can go on does."""
    chance = random.Random(seed)
    return [
        lambda run, ranks: min(ranks),
        lambda run, ranks: max(ranks),
        lambda run, ranks: min(ranks, key=run.urgency),
        lambda run, ranks: max(ranks, key=lambda rank: (-run.urgency(rank), rank)),
        *[lambda run, ranks: chance.choice(ranks)] * 3,
    ]


def ended(plan: Plan, open_: list[list[bool]], places: Places, order: Order) -> list[dict[int, Any]]:
    run = Run(plan, open_, places)
    while ready := run.ready():
        run.advance(order(run, ready))
    return run.results()


def what_is_open(plan: Plan) -> list[list[bool]]:
    return [zero_copy_sends(rank, Provenance(plan.steps.__getitem__)) for rank in range(plan.size)]


@each(("collective", "name"), NAMES)
def test_reading_in_place_changes_nothing(collective: str, name: str) -> None:
    for plan in plans(collective, name):
        none, open_ = [[False] * len(steps) for steps in plan.steps], what_is_open(plan)
        expected = ended(plan, none, apart, lambda run, ranks: min(ranks))
        for places in layouts(collective):
            for order in orders(str(plan)):
                assert ended(plan, open_, places, order) == expected, (plan, places)


def as_far_as_they_come(plan: Plan, reader: int, stop: int) -> list[int]:
    """Where all ranks are when one has not taken step `stop` yet and the others can do no more without it.

    There is one such place: what a rank waits for does not go away.
    """
    reached = [0] * plan.size
    edges: Counter[tuple[int, int]] = Counter()
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(plan.steps):
            end = stop if rank == reader else len(steps)
            while reached[rank] < end:
                step = steps[reached[rank]]
                sources = senders(rank, step)
                if any(edges[peer, rank] == 0 for peer in sources):
                    break
                edges.subtract((peer, rank) for peer in sources)
                edges.update((rank, peer) for peer in (step.to if isinstance(step, Send) else ()))
                reached[rank] += 1
                moved = True
    return reached


def spoiled(plan: Plan, open_: list[list[bool]], places: Places) -> Iterator[str]:
    """Every open message that can be written over before its receiver, as late as can be, has taken it."""
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)  # (sender, receiver): steps
    for rank, steps in enumerate(plan.steps):
        for number, step in enumerate(steps):
            for peer in step.to if isinstance(step, Send) else ():
                sent[rank, peer].append(number)
    for reader, steps in enumerate(plan.steps):
        messages = {peer: iter(sent[peer, reader]) for peer in range(plan.size)}
        for stop, step in enumerate(steps):
            taken = [(peer, next(messages[peer])) for peer in senders(reader, step)]
            taken = [(peer, number) for peer, number in taken if open_[peer][number]]
            reached = as_far_as_they_come(plan, reader, stop) if taken else []
            for peer, number in taken:
                theirs = plan.steps[peer]
                place = places(peer, theirs[number].chunk)  # type: ignore[union-attr]
                for later in theirs[number + 1 : reached[peer]]:
                    if isinstance(later, Send) or places(peer, written(later)) != place:
                        continue
                    if not (isinstance(later, Copy) and places(peer, later.src) == place):  # onto itself
                        yield f"{plan}: rank {peer}, {later}, before rank {reader}, {step}"


@each(("collective", "name"), NAMES)
def test_a_reader_may_be_as_late_as_it_likes(collective: str, name: str) -> None:
    for plan in plans(collective, name):
        for places in layouts(collective):
            assert not list(spoiled(plan, what_is_open(plan), places))


def hasty() -> Plan:
    """An answer that was sent before the question was read."""
    steps = ((Send(Out(0), to=(1,)), Recv(Out(0), frm=1)), (Send(Out(0), to=(0,)), Recv(Out(0), frm=0)))
    return Plan("all_reduce", "hasty", 2, 0, steps)


def test_exposing_every_message_is_detected() -> None:
    """Were every message open, both tests above would say so."""
    names = ("one_shot", "doubling", "leaders")
    for plan in [hasty(), *(make("all_reduce", name, 6, 0, (0, 1, 1, 0, 2, 2)) for name in names)]:
        none, every = ([[flag] * len(steps) for steps in plan.steps] for flag in (False, True))
        expected = ended(plan, none, apart, orders("")[0])
        assert list(spoiled(plan, every, apart)), plan
        assert all(ended(plan, every, apart, order) != expected for order in orders("")[2:4]), plan


def opens(collective: str, name: str, size: int) -> tuple[int, int]:
    plan = make(collective, name, size)
    sends = [isinstance(step, Send) for steps in plan.steps for step in steps]
    return sum(sum(row) for row in what_is_open(plan)), sum(sends)


@each("collective", ["all_gather", "all_to_all", "reduce_scatter", "broadcast", "gather"])
def test_read_only_chunks_are_exposed(collective: str) -> None:
    found, sends = opens(collective, "direct", 4)
    assert found == sends > 0


def test_two_shots_are_open_and_a_ring_is_not() -> None:
    """In two shots an answer tells that the question was read; round a ring only what is final stays."""
    found, sends = opens("all_reduce", "two_shot", 4)
    assert found == sends
    found, _ = opens("all_reduce", "one_shot", 4)
    assert found == 0
    found, sends = opens("all_reduce", "ring", 4)
    assert found == sends // 2


def test_an_answer_that_was_sent_before_tells_nothing() -> None:
    assert what_is_open(hasty()) == [[False, False], [False, False]]


def test_no_more_of_the_others_is_written_down_than_answers_take() -> None:
    """In two shots an answer follows a reduction: what a peer takes afterwards does not matter."""
    size, asked = 8, Counter[int]()

    def steps(rank: int) -> Iterator[Step]:
        for step in make("all_reduce", "two_shot", size).steps[rank]:
            asked[rank] += 1
            yield step

    assert sum(zero_copy_sends(3, Provenance(steps))) == size
    assert asked[3] == 2 * size
    assert all(asked[peer] == size for peer in range(size) if peer != 3), asked  # sends, and the reduction
