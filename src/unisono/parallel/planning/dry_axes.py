"""What a dry run has in place of parts of a run: experts, compression, swapping. No message is sent.

Layers of stacked experts run on one rank, which gets the rows of a full one. Values decide which rows go
where, and there are none. Rows are counted as if a router drew the experts of each row by chance: the mean,
and DEVIATIONS standard deviations more, as on a rank that is fuller than most. A run whose router prefers
some experts needs more on their ranks.

Compression keeps what it would keep when a step was made before. Swapping is the code of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.codecs.codec import Codec
from unisono.errors import UnfitError
from unisono.parallel.compression.compression_state import CompressionState
from unisono.parallel.compression.exchange_queue import length
from unisono.parallel.experts.exchange import RowExchange
from unisono.parallel.experts.layers import ExpertAxis, expert_layers, stacked_experts
from unisono.parallel.experts.stacked import StackedExperts, cut_stacked
from unisono.parallel.gradients import local
from unisono.parallel.plan import Plan
from unisono.parallel.spill import Host, Key, SpillStorage
from unisono.parallel.swap import ParameterSwap
from unisono.torch_internals.training import module_at

from .memory_account import StorageWatch

if TYPE_CHECKING:
    from unisono.parallel.compression.settings import CompressionSettings
    from unisono.parallel.mesh import PlanMesh


def refuse_axes(plan: Plan, axis: str, *, beside: Sequence[str]) -> None:
    """Raise UnfitError for an axis with another one with which its memory is not predicted."""
    for other in beside:
        if (size := getattr(plan, other)) > 1:
            raise UnfitError(f"{axis}={getattr(plan, axis)} with {other}={size}: its memory is not predicted")


# ---- experts ---------------------------------------------------------------------------------------------

DEVIATIONS = 2.0


class DrawnRows(NamedTuple):
    """Rows of a layer on one rank, where a router draws `top` of the experts for each row."""

    sent: int  # from this rank, a row once to each rank that has some of its experts; on average
    received: int  # from all ranks, on a full rank
    pairs: int  # of a row and one of its experts, on a full rank

    @staticmethod
    def of(rows: int, experts: int, top: int, ranks: int) -> DrawnRows:
        """Draw without replacement: a row has no expert twice.

        Example: 1000 rows on each of 2 ranks, 2 of 4 experts -> 1667 sent, 1700 received, 2052 pairs.
        """
        here, every = experts // ranks, rows * ranks
        top = min(top, experts)
        reaches = 1 - math.comb(experts - here, top) / math.comb(experts, top)
        mean = top / ranks  # experts of a row that are here: a hypergeometric number
        variance = mean * (1 - 1 / ranks) * (experts - top) / max(1, experts - 1)
        return DrawnRows(
            round(every * reaches),
            _full(every, reaches, reaches * (1 - reaches), 1),
            _full(every, mean, variance, min(top, here)),
        )


def _full(rows: int, mean: float, variance: float, most: int) -> int:
    """The sum over independent rows, on a full rank. `most`: of a row."""
    return min(rows * most, round(rows * mean + DEVIATIONS * math.sqrt(rows * variance)))


def spread_by_chance(model: nn.Module, mesh: PlanMesh) -> ExpertAxis | None:
    """Leave a rank its experts, in place; None: the plan has no such axis.

    Raises:
        ValueError: the model has no stacked experts, they do not divide, or the plan has another axis, too,
            with which the memory is not predicted.
    """
    plan = mesh.plan
    if plan.expert == 1:
        return None
    refuse_axes(plan, "expert", beside=("tensor", "context"))
    if not any(map(stacked_experts, model.modules())):
        raise UnfitError(
            f"expert={plan.expert}: {type(model).__name__} has no layers of stacked experts, and the memory "
            "of lists of experts is not predicted"
        )
    layers = [layer for layer in expert_layers(model, None, plan) if layer.kind == "stacked"]
    axis = ExpertAxis(model, layers, mesh, recorded=False)
    for layer in layers:
        module = module_at(model, layer.path)
        cut_stacked(layer.path, module, axis.mesh.part("tensor"), axis.tensor, ExpertsByChance)
    return axis


class ExpertsByChance(StackedExperts):
    """The forward of a layer on this rank's experts."""

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        given = self._bound(args, named)
        if not any(isinstance(value, DTensor) for value in self._module.parameters()):
            return self._recorded(given)  # of a copy of the whole model
        rows, index, ranks = given.rows.flatten(0, -2), given.chosen, self._ranks
        count, top = index.shape
        owner = torch.where(index < 0, ranks, index.div(ranks, rounding_mode="floor"))
        goes = torch.zeros(count, ranks + 1, dtype=torch.bool, device=rows.device)
        goes = goes.scatter_(1, owner, value=True)[:, :ranks]
        drawn = DrawnRows.of(count, self._experts, top, ranks)
        rank, row = index.new_empty(drawn.sent, 2).unbind(1)
        del goes
        there = owner[row] == rank.unsqueeze(1)
        local = torch.where(there, index[row] - rank.unsqueeze(1), -1)
        exchange = RowExchange([drawn.sent], [drawn.received], self._group, self._label)
        x, i, w = exchange.there(rows[row], local, given.weight[row])
        back = exchange.back(self._fullest(x, i, w, given.names, drawn.pairs))
        return back.new_zeros(rows.shape).index_add(0, row, back).view(given.rows.shape)

    def _fullest(self, rows: Tensor, index: Tensor, weight: Tensor, names: Any, pairs: int) -> Tensor:
        """The sum over this rank's experts for each row that came: `pairs` of a row and an expert."""
        row, slot = index.new_empty(pairs, 2).unbind(1)
        given = rows[row], index[row, slot].unsqueeze(1), weight[row, slot].unsqueeze(1)
        with self._parts():
            made: Tensor = self._called(dict(zip(names, given, strict=True)))
        return made.new_zeros(rows.shape).index_add(0, row, made)


# ---- replicas ----


Pair = tuple[Tensor, Tensor]  # a parameter, and its gradient in a bucket


class DryCompression:
    """What `Compression` keeps in memory, when a step was made before.

    Args:
        named: parameters by their names in the user's model.    ranks: that exchange.
        whole: matrices are kept whole where parameters are cut.
        twice: also the errors from before a step, which may be undone.
    """

    def __init__(
        self, settings: CompressionSettings, named: Mapping[str, Tensor], ranks: int, watch: StorageWatch,
        *, whole: bool = False, twice: bool = False,
    ) -> None:  # fmt: skip
        self._ranks, self._watch = ranks, watch
        self._feedback, self._codec = settings.feedback, settings.low_rank.codec
        self._held: dict[Tensor, CompressionState] = {}
        self._live: list[list[Tensor]] = []
        self._undone: list[Tensor] = []
        with watch.having(cause="buffers"):
            for name, value in named.items():
                shape = value.shape if whole else local(value).shape
                choice = settings.choice(name, shape)
                options = {"feedback": settings.feedback, "errors": settings.errors}
                held = CompressionState(name, shape, choice, **options, seed=0)  # type: ignore[arg-type]
                if held.keeps:
                    held.error = torch.zeros(shape, dtype=held.dtype)
                    self._undone += [torch.zeros(shape, dtype=held.dtype)] * twice
                if held.rank:
                    held.factor = torch.zeros(held.rank, shape[1:].numel())
                self._held[value] = held

    def begin(
        self, pairs: Sequence[Pair], flat: Tensor, *, exact: Sequence[Tensor] = (), **_more: object
    ) -> None:
        """Average a bucket. The messages of the one before are under way until this one's are."""
        del flat
        with self._watch.having(cause="buffers"):
            self._live = [*self._live[-1:], self._sent(pairs, sum(each.numel() for each in exact))]

    def finish(self) -> None:
        """All messages have arrived."""
        self._live = []

    def reset(self) -> None:
        """None is under way."""

    def settle(self, **_: object) -> None:
        """Buffers have no values."""

    def _sent(self, pairs: Sequence[Pair], used: int) -> list[Tensor]:
        exact, ranked, made = used, 0, []
        coded: dict[Codec, int] = {}
        for parameter, gradient in pairs:
            held, numel = self._held.get(parameter), gradient.numel()
            if held is None or held.choice == "exact":
                exact += numel
            elif isinstance(held.choice, Codec):
                coded[held.choice] = coded.get(held.choice, 0) + length(numel, held.choice, 1)
            else:
                ranked += held.rank * (held.shape[0] + held.shape[1:].numel())
                if held.keeps and held.dtype != torch.float32:
                    made.append(torch.empty_like(gradient))
        if exact:
            made.append(torch.empty(exact))
        for codec, numel in coded.items():
            whole = length(numel, codec, self._ranks)
            made += [torch.empty(whole) for _ in range(3 if self._feedback else 2)]  # and sum, and error
            made.append(torch.empty(codec.nbytes(whole), dtype=torch.uint8))
        if ranked:  # as they are and in one vector, with its codes, sum and error
            made += [torch.empty(ranked) for _ in range(2 if self._codec is None else 4)]
        return made


class DrySwap(ParameterSwap):
    """What `ParameterSwap` keeps in memory.

    A run writes in the background: two writes may be under way, so two gradients are counted as there.

    Args:
        units: what comes in one after the other.    device_type: of the model.
    """

    def __init__(self, root: nn.Module, units: Iterable[nn.Module], mesh: PlanMesh, device_type: str) -> None:
        plan = mesh.plan
        kept = plan.swap == "memory" and device_type == "cpu"  # the store is in the same memory
        group = mesh.group("replica") if plan.data > 1 else None
        super().__init__(root, units, Host() if kept else _Elsewhere(), group=group)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's state, as a first step does."""
        for value, name in self._names.items():
            if value.requires_grad:
                self.norms[value] = self._norm(value)
                self._put((name, "grad"), torch.empty_like(value))
        self._written()
        self.update(optimizer, 1.0)

    def _executor(self) -> Executor:
        return _AtOnce()

    def _norm(self, _grad: Tensor) -> Tensor:
        return torch.zeros(())


class _Elsewhere(SpillStorage):
    """A disk, or the memory of the host beside that of a GPU."""

    def write(self, key: Key, tensor: Tensor) -> None:
        """Keep nothing."""

    def read(self, key: Key, tensor: Tensor) -> None:
        """Leave the values."""

    def view(self, key: Key, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        del key
        return tensor

    def close(self) -> None:
        """Nothing is kept."""


class _AtOnce(Executor):
    """Runs a call at once. What it was given stays in memory until its result is asked for."""

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        found: Future[Any] = Future()
        call(*given, **named)
        found.set_result(given)
        return found
