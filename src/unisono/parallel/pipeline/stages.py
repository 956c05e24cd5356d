"""Stages: what each one has, pieces or parts of a program, and the part of the model that this rank keeps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import UnfitError
from unisono.parallel.graph.capture import call
from unisono.parallel.graph.containers import cast, mapped, tensors_in
from unisono.parallel.graph.executor import ForwardCall
from unisono.parallel.graph.stage_program import StageProgram, even_cuts
from unisono.parallel.layouts.shard import whole_value
from unisono.parallel.model_buffers import buffers_kept
from unisono.parallel.plan import Plan
from unisono.parallel.structure import ModelStructure, plain_class, run_pieces
from unisono.torch.control_data import on_rank_0
from unisono.torch_internals.random_draws import StandIn
from unisono.torch_internals.training import module_at


class PipelineStages(nn.Module):
    """The stages of one rank. Called with the number of the stage, what comes, the model's inputs, and what
    runs the stage on these; nothing: it runs itself.

    Args:
        exact: the stage whose floating outputs are cast to f32, because the loss takes them; None: none is.
    """

    def __init__(self, stages: dict[int, nn.Module], exact: int | None = None) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(stage): module for stage, module in stages.items()})
        self._exact = exact

    def forward(
        self, stage: int, came: Sequence[Tensor], inputs: Any, call: ForwardCall | None = None
    ) -> Any:
        module = self.stages[str(stage)]
        output = module(came, inputs) if call is None else call.run(module, came, inputs)
        output = mapped(output, whole_value)  # the next stage has other ranks
        return cast(output, torch.float32) if stage == self._exact else output


class PieceStage(nn.Module):
    """Pieces, one after the other. The first stage takes the model's inputs, the others what comes.

    Args:
        spreads: a tuple is the arguments of the next piece, and not one argument.
        unused: modules that no piece runs, for weights and checkpoints.
    Raises:
        TypeError: what goes to the next stage is neither a tensor nor a tuple of tensors.
    """

    def __init__(
        self,
        pieces: Sequence[nn.Module],
        *,
        first: bool,
        last: bool,
        spreads: bool,
        unused: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        self.pieces, self.unused = nn.ModuleList(pieces), nn.ModuleList(unused)
        self._first, self._last, self._spreads = first, last, spreads

    def forward(self, came: Sequence[Tensor], inputs: Any) -> Any:
        if not self._first:
            inputs = tuple(came) if self._spreads else (came[0] if len(came) == 1 else tuple(came),)
        value = run_pieces([*self.pieces], inputs, spreads=self._spreads)
        return value if self._last else self._sent(value)

    def _sent(self, value: Any) -> Any:
        parts = value if type(value) is tuple else (value,)
        single = len(parts) == 1 and value is parts and not self._spreads  # the next stage would get a tensor
        if single or not all(isinstance(part, Tensor) for part in parts):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise TypeError(
                f"a stage ends with a {type(self.pieces[-1]).__name__}, which returned a "
                f"{type(value).__name__} ({kinds}): what goes to the next stage is a tensor, or a tuple of "
                "several. Let stages begin elsewhere: Plan(cuts=...)"
            )
        return value


class ProgramStage(nn.Module):
    """What one stage of a program has of the model. The program runs it, see graph/executor.py.

    The first stage also keeps the parameters that no stage needs, for weights and checkpoints.

    Args:
        first: the program of the sample.
        model: the user's, cut on the tensor axis if the plan has one.
    """

    def __init__(self, first: StageProgram, stage: int, model: nn.Module) -> None:
        super().__init__()
        here = first.stages[stage]
        self._where: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self.called = nn.ModuleList(dict.fromkeys(self._where[path] for path in here.calls))
        self.bare = nn.Module()  # has parameters that operators take, and no module that the stage calls
        inside = {
            id(parameter): (module, leaf)
            for module in self.called.modules()
            for leaf, parameter in module.named_parameters(recurse=False)
        }
        unused = first.unused if stage == 0 else frozenset()
        named = {name: self._slot(name) for name in sorted(here.parameters | unused)}
        self._bare = {
            name: f"p{number}"
            for number, (name, (owner, leaf)) in enumerate(named.items())
            if owner is not None and id(owner._parameters[leaf]) not in inside
        }
        # where parameters are that a called module has; the one that names a tied one may be in another stage
        self._inside = {
            name: inside[id(owner._parameters[leaf])]
            for name, (owner, leaf) in named.items()
            if owner is not None and name not in self._bare
        }
        self.take_bare()

    def _slot(self, name: str) -> tuple[nn.Module | None, str]:
        """The module that has a parameter; None: others stand for the one that had it."""
        path, _, leaf = name.rpartition(".")
        owner = self._where.get(path)
        return (owner if owner is not None and owner._parameters.get(leaf) is not None else None), leaf

    @property
    def owners(self) -> list[nn.Module]:
        """The modules that have the bare parameters."""
        return [owner for name in self._bare if (owner := self._slot(name)[0]) is not None]

    def take_bare(self) -> None:
        """Have the bare parameters as they are now in their modules."""
        for name, short in self._bare.items():
            owner, leaf = self._slot(name)
            assert owner is not None
            self.bare.register_parameter(short, owner._parameters[leaf])

    def return_bare(self) -> None:
        """Put what stands for bare parameters now into their modules."""
        for name, short in self._bare.items():
            owner, leaf = self._slot(name)
            assert owner is not None
            owner._parameters[leaf] = self.bare._parameters[short]

    def module(self, path: str) -> nn.Module:
        """The module of a path."""
        return self._where[path]

    def held(self, name: str) -> Any:
        """A parameter or buffer as it is now."""
        if name in self._bare:
            return getattr(self.bare, self._bare[name])
        path, _, leaf = name.rpartition(".")
        return getattr(*self._inside.get(name, (self._where.get(path), leaf)))


def stages_of(structure: ModelStructure, starts: Sequence[int], model: nn.Module) -> list[PieceStage]:
    """The stages of a model in pieces. starts: the first piece of each stage but the first.

    Raises:
        ValueError: a module with buffers would be in two stages, each with its own; or pieces leave out a
            parameter of a module around them.
    """
    unused = {name.rpartition(".")[0]: name for name in structure.left_out(model)}
    around = next((n for at, n in unused.items() if _holds(model, at, structure.pieces)), None)
    if around is not None:
        raise ValueError(
            f'pieces= leaves out the parameter "{around}" of {type(model).__name__}, which has pieces within '
            "the module of that parameter. Give it to a piece of your own"
        )
    own = set(model.parameters())
    for piece in structure.pieces:
        for name, value in piece.named_parameters():
            if value not in own:
                raise ValueError(
                    f'pieces= has a {type(piece).__name__} with the parameter "{name}", which is not of '
                    f"{type(model).__name__} and would not train. Make its module a part of the model"
                )
    pieces, bounds = structure.pieces, [*itertools.pairwise([0, *starts, len(structure.pieces)])]
    homes: dict[nn.Module, int] = {}
    for stage, (first, stop) in enumerate(bounds):
        for module in (part for piece in pieces[first:stop] for part in piece.modules()):
            if homes.setdefault(module, stage) != stage and any(True for _ in module.buffers(recurse=False)):
                raise ValueError(
                    f"a {type(module).__name__} with buffers runs in stages {homes[module]} and {stage}, "
                    "which would each have its own. Let stages begin elsewhere, Plan(cuts=...), or use two"
                )
    last = len(bounds) - 1
    return [
        PieceStage(
            pieces[first:stop],
            first=stage == 0,
            last=stage == last,
            spreads=structure.spreads,
            unused=[module_at(model, path) for path in unused] if stage == 0 else (),
        )
        for stage, (first, stop) in enumerate(bounds)
    ]


def _holds(model: nn.Module, path: str, pieces: Sequence[nn.Module]) -> bool:
    """Whether a module has modules that run in pieces."""
    inside = {module for piece in pieces for module in piece.modules()}
    return not inside.isdisjoint(module_at(model, path).modules())


def first_pieces(structure: ModelStructure, plan: Plan, sample: Any, *, on_meta: bool) -> Sequence[int]:
    """The first piece of each stage but the first. Pieces are measured while no rank needs another one."""
    if on_meta and sample is not None and plan.cuts is None:
        raise ValueError(
            "sample= runs the pieces to measure them, and a model on the meta device has nothing to run. "
            "Leave it out, and parameters are counted; or say where stages begin: Plan(cuts=...)"
        )
    starts = plan.cuts or _balanced(structure, plan.stages, sample)
    check_starts(starts, len(structure.pieces))
    return starts


def check_starts(starts: Sequence[int], pieces: int) -> None:
    """Raise ValueError where stages begin at pieces that a model does not have."""
    if starts and not 0 < starts[0] <= starts[-1] < pieces:
        raise UnfitError(f"cuts={tuple(starts)} do not fit a model of {pieces} pieces")


def check_no_cuts(plan: Plan, model: nn.Module) -> None:
    """Raise ValueError for `cuts` of a model whose stages are cut from its program."""
    if plan.cuts is not None:
        raise UnfitError(
            f"cuts={plan.cuts} counts pieces, and {type(model).__name__} has none: its stages are cut from "
            "its program. Leave cuts out, or write parallelize(..., pieces=[first, second, ...])"
        )


def _balanced(structure: ModelStructure, stages: int, sample: Any) -> tuple[int, ...]:
    """The first piece of each stage, by parameters; with a sample rank 0 measures for all."""
    if sample is None:
        return balance(counted_costs(structure.pieces), stages)
    return balance(on_rank_0(lambda: measure_costs(structure, sample)), stages)


def counted_costs(pieces: Sequence[nn.Module]) -> list[float]:
    """What pieces cost by their parameters."""
    return [1.0 + sum(parameter.numel() for parameter in piece.parameters()) for piece in pieces]


def balance(costs: Sequence[float], stages: int, slow: Sequence[float] = ()) -> tuple[int, ...]:
    """Cut pieces into `stages` runs whose largest cost is smallest; return the first piece of each but the
    first.

    Args:
        slow: of each stage, by what its costs are multiplied; (): by 1.
    Example: costs 1 1 1 3, 2 stages -> (3,); costs 1 1 1 1 with slow 1 3 -> (3,).
    """
    slow = slow or (1.0,) * stages
    if len(costs) < stages:
        raise UnfitError(f"the model has {len(costs)} pieces, too few for {stages} stages")
    sums = [0.0, *itertools.accumulate(costs)]

    def cost(first: int, stop: int, stage: int) -> tuple[float, float]:
        found = (sums[stop] - sums[first]) * slow[stage]
        return found, found * found  # the sum of squares

    return even_cuts(len(costs), stages, cost)


def measure_costs(structure: ModelStructure, inputs: Any, rounds: int = 3) -> list[float]:
    """Run forward and backward of each piece on `inputs` of the first; return seconds for each, the least of
    `rounds`. Buffers keep their values.
    """
    pieces = structure.pieces
    costs = [float("inf")] * len(pieces)
    with torch.random.fork_rng(), buffers_kept(module for piece in pieces for module in piece.modules()):
        for _ in range(rounds):
            value = inputs
            for index, piece in enumerate(pieces):
                start = time.perf_counter()
                wanted = [t for t in (*piece.parameters(), *tensors_in(value)) if t.requires_grad]
                if index and not (structure.spreads and isinstance(value, tuple)):
                    value = (value,)
                value = call(piece, value)
                outputs = [t for t in tensors_in(value) if t.requires_grad]
                if outputs and wanted:
                    given = [torch.ones_like(t) for t in outputs]
                    torch.autograd.grad(outputs, wanted, given, allow_unused=True)
                costs[index] = min(costs[index], time.perf_counter() - start)
                value = mapped(value, lambda t: t.detach().requires_grad_(t.requires_grad))
    return costs


def forget(model: nn.Module, kept: Iterable[nn.Module]) -> None:
    """Free the parameters of modules of `model` that are in none of `kept`: these move to the meta device."""
    inside = {module for top in kept for module in top.modules()}
    for module in model.modules():
        if module in inside:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            StandIn.drawn_on = parameter.device if not parameter.is_meta else StandIn.drawn_on
            gone = StandIn(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
            module.register_parameter(name, gone)


def refuse_calls(model: nn.Module, kept: Iterable[nn.Module]) -> None:
    """Let no program call the model of a pipeline, or a module whose parameters other stages have."""
    inside = {module for top in kept for module in top.modules()}

    def refuse(module: nn.Module, _args: Any) -> None:
        raise RuntimeError(
            f"{plain_class(module).__name__} was called outside a step, and has parameters on other stages "
            "of the pipeline. Call run.predict(inputs) or run.evaluate(batch) on all ranks; gradients "
            "outside a step, as of inputs, need a plan without pipeline="
        )

    for module in model.modules():
        if module is model or (module not in inside and module._parameters):
            module.register_forward_pre_hook(refuse, prepend=True)
