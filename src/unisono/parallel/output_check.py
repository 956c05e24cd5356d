"""Tries the stages of a pipeline, or a context axis: what they return for a few rows is what the model does.

The caller's pieces are recorded first, and so is the model: if both run the same operators on the same
parameters, nothing is left to try. Else a copy of the model, as it was before it was cut, runs in evaluation
mode beside the plan. Dropout is off, no buffer changes, and there are no gradients. So the check sees a wrong
forward, and no wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unisono.torch.control_data import on_every_rank

from .batches import cut_rows, rows_of
from .generators import drawing
from .graph.capture import CaptureError, Recorder, Shapes, call
from .graph.containers import tensors_in
from .graph.program import Graph
from .graph.shapes import model_copy
from .mesh import PlanMesh
from .pipeline.runtime import PipelineRuntime, StepInput
from .pipeline.schedule import Schedule
from .plan import Plan
from .structure import ModelStructure, run_pieces

ROWS = 4  # of a batch
SEED = 0x5EED
TOLERANCE = 1e-3  # of the largest value; what is right differs by 1e-6, what is wrong by 1e-1
LOW = 0.05  # what low precision may differ by, as a share of the largest value
LIMIT_BYTES = 100 << 20  # of parameters: a larger model is copied where check=True asks for it

Confirm = Callable[[list[tuple[Any, Any]]], None]


class OutputCheck:
    """A copy of a model before it was cut. It is used once.

    Args:
        fill: gives a copy on the meta device its values.
        output: of the model -> what the loss takes.
        proof: of the caller's pieces, which may make the copy needless.
    """

    def __init__(
        self,
        model: nn.Module,
        fill: Callable[[nn.Module], object],
        output: Callable[[Any], Any],
        proof: _PiecesProof | None = None,
    ) -> None:
        self._output, self._proof, self._copy = output, proof, None
        if proof is not None and sum(value.nbytes for value in model.parameters()) > LIMIT_BYTES:
            return
        try:
            self._copy = model_copy(model, so="check=True cannot compare. Leave it out")
        except CaptureError:
            if proof is None:
                raise
            return
        fill(self._copy)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        plan: Plan,
        check: bool | None,
        fill: Callable[[nn.Module], object],
        structure: ModelStructure,
    ) -> OutputCheck | None:
        """What has to be compared; None: nothing, or the plan has no such axis."""
        if check and (plan.pipeline > 1 or plan.context > 1):
            return cls(model, fill, structure.output)
        if check is None and plan.pipeline > 1 and structure.spreads:
            return cls(model, fill, structure.output, _PiecesProof(model, structure))
        return None

    def run(
        self,
        model: nn.Module,
        runtime: PipelineRuntime,
        schedule: Schedule,
        confirm: Confirm,
        inputs: Any,
        mesh: PlanMesh,
    ) -> None:
        """Run both on some rows of this rank's batch. All ranks call this.

        Args:
            model: that trains; of other stages it has no parameters.
            schedule: of one micro-batch.
            confirm: proves the programs of micro-batches.
        Raises:
            ValueError: the outputs differ.
        """
        few = cut_rows(inputs, 0, min(ROWS, rows_of([inputs])))
        if (proof := self._proof) is not None:
            raise_any(proof.wrong(few, self._copy), mesh)
            if not any(on_every_rank(lambda: proof.differs, mesh.world)):
                return
        outputs: list[Any] = []

        def keep(output: Any, _targets: Any) -> Tensor:
            outputs.append(output)
            return torch.zeros((), device=mesh.axes.device_type)

        micros = [(few, ())]
        step = StepInput(micros, [1.0], keep, train=False, recorded=False)
        with torch.no_grad(), drawing(SEED, mesh.axes.device_type), _evaluating(model):
            confirm(micros)
            runtime.run(schedule, step)
        raise_any(self._difference(few, outputs[0], mesh) if outputs else None, mesh)

    def _difference(self, few: Any, found: Any, mesh: PlanMesh) -> str | None:
        assert self._copy is not None
        with torch.no_grad(), drawing(SEED, mesh.axes.device_type), _evaluating(self._copy):
            wanted = self._output(call(self._copy, few))
        pairs = [*tensors_in(wanted)], [*tensors_in(found)]
        what = ""
        if [one.shape for one in pairs[0]] != [one.shape for one in pairs[1]]:
            what = (
                f"{[list(one.shape) for one in pairs[1]]} in place of {[list(one.shape) for one in pairs[0]]}"
            )
        least = 0.0 if mesh.plan.precision == "f32" else LOW
        for number, (one, other) in enumerate(zip(*pairs, strict=True) if not what else ()):
            if not one.is_floating_point():
                continue
            far = relative_difference(one.nan_to_num(), other.to(one.dtype).nan_to_num())  # of masks, too
            if far > least:
                what = f"tensor {number} of its output differs by {far:.1e} of its largest value"
                break
        if not what:
            return None
        return (
            f"{mesh.plan} does not compute what {type(self._copy).__name__} does: {what}, on {ROWS} rows in "
            f"evaluation mode. {self._remedy}"
        )

    @property
    def _remedy(self) -> str:
        if self._proof is not None:
            return (
                "Each piece takes what the one before returns, and runs what the model does there, hooks and "
                f"parameters of its own included; or leave out pieces=. {self._proof.differs}"
            )
        return (
            "If the model draws random numbers there, leave out check=; else leave out pipeline= or context="
        )


class _PiecesProof:
    """Records a model and its pieces, without values."""

    def __init__(self, model: nn.Module, structure: ModelStructure) -> None:
        self._shapes, self._structure = Shapes(model, structure.pieces), structure
        self._left = structure.left_out(model)
        self.differs = ""

    def wrong(self, inputs: Any, copy: nn.Module | None) -> str | None:
        """What is wrong whatever values show; None: the programs are equal, or values can be compared."""
        name, pieces = type(self._shapes.model).__name__, self._shapes.also

        def model(given: Any) -> Any:
            return self._structure.output(call(self._shapes.model, given))

        def chain(given: Any) -> Any:
            return run_pieces(pieces, given, spreads=True)

        used = set(self._left)  # as far as is known
        try:
            with torch.enable_grad():
                programs = [self._program(each, inputs) for each in (model, chain)]
        except CaptureError as error:
            self.differs = str(error)
        else:
            used = {name for name in self._left if _takes(programs[0], name)}
            pairs = zip(*([*_operators(each), ("nothing",)] for each in programs), strict=False)
            there = next((f"{one[0]} there, {other[0]} here" for one, other in pairs if one != other), "")
            self.differs = there and f"The programs of {name} and of its pieces differ: {there}"
        if self.differs and used:
            return (
                f'pieces= leaves out the parameter "{min(used)}" of {name}, which its forward takes, as far '
                f"as can be seen. Give it to a piece. {self.differs}"
            )
        if self.differs and copy is None:
            return (
                f"nothing proves that pieces= compute what {name} does, and it is too large to be copied "
                f"unasked, or cannot be copied. {self.differs}. Write parallelize(..., check=True): the "
                f"first step compares both on {ROWS} rows. Or check=False, if you have compared them"
            )
        return None

    def _program(self, forward: Callable[[Any], Any], inputs: Any) -> Graph:
        return Recorder(self._shapes).run(self._shapes.model, inputs, forward)


def _operators(graph: Graph) -> list[tuple[Any, ...]]:
    nodes = [(node.name, repr((node.args, node.named)), node.grad) for node in graph.nodes]
    return [*nodes, ("result", repr(graph.result))]


def _takes(graph: Graph, name: str) -> bool:
    """Whether an operator of a program takes a parameter."""
    number = graph.names[name]
    return any(number in node.taken for node in graph.nodes)


def raise_any(wrong: str | None, mesh: PlanMesh) -> None:
    """Raise what some rank has found, on all ranks."""

    def report() -> None:
        if wrong is not None:
            raise ValueError(wrong)

    on_every_rank(report, mesh.world)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every module is in evaluation mode, and as it was afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def relative_difference(one: Tensor, other: Tensor, floor: float = 0.0) -> float:
    """The largest difference, as a share of the largest value; 0.0 within the tolerance."""
    if not one.numel() or not (one.is_floating_point() or one.is_complex()):
        return 0.0
    most = max(float(one.abs().max()), floor, 1e-30)
    deviation = float((one - other).abs().max()) / most
    return 0.0 if deviation <= TOLERANCE else deviation  # NaN: both have it, or the model is none to train
