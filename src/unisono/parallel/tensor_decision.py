"""How the tensor axis cuts a model: proved from its recorded program, and with `cuts` as they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from unisono.errors import UnfitError
from unisono.torch.control_data import on_rank_0

from .graph.capture import CaptureError, Shapes
from .graph.cut import Cut
from .graph.proof import prove
from .plan import Plan
from .programs import Prover
from .structure import ModelStructure, chained


class TensorDecision(Prover):
    """How the tensor axis cuts a model. All ranks get the same cut.

    It keeps a copy of the model, which has no values and stays as it is, to prove the cut for other inputs.

    Args:
        structure: with the caller's cuts; those that are all "whole" are exceptions from the automatic one.
        sample: inputs like those of a batch.
        opened: modules that span stages of a pipeline, where all is whole; None: stages are pieces.
    Attributes:
        cut: what to do.
        of_all: the cut is right whichever parameters are trained, and not only for what is frozen now.
    Raises:
        CaptureError: there is no such cut; the text says what to write.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: ModelStructure,
        plan: Plan,
        sample: Any,
        opened: frozenset[str] | None = None,
    ) -> None:
        self._structure = structure
        self._pieces = structure.pieces if plan.pipeline > 1 and opened is None else None
        self._opened = opened or frozenset()
        self._sequence, self._parts, self._name = plan.sequence, plan.tensor, type(model).__name__
        self.shapes = shapes = Shapes(model, self._pieces)
        frozen = self._thaw()

        def found() -> tuple[Cut, bool, set[tuple[str, str]]]:
            with torch.enable_grad():
                return *self._widest(sample, frozen), shapes.set_once

        self.cut, self.of_all, self.left_out = on_rank_0(found)
        self.of_sample = self.cut
        _require(frozen, self.of_all)

    def _thaw(self) -> list[nn.Parameter]:
        """Count every parameter of the copy as trained; return those that are frozen."""
        frozen = [
            p
            for p in self.shapes.model.parameters()
            if not p.requires_grad and (p.is_floating_point() or p.is_complex())
        ]
        _require(frozen, True)
        return frozen

    def _widest(self, sample: Any, frozen: Sequence[nn.Parameter]) -> tuple[Cut, bool]:
        """The cut, and whether it is right for all parameters: it is, unless frozen ones allow more."""
        found: Cut | CaptureError
        try:
            found = self._prove(sample)
        except CaptureError as error:
            found = error
        if frozen:
            _require(frozen, False)
            now = self._prove(sample)
            if isinstance(found, CaptureError) or (now.dims, now.modules) != (found.dims, found.modules):
                return now, False
        if isinstance(found, CaptureError):
            raise found
        return found, True

    def _prove(self, sample: Any, only: Cut | None = None) -> Cut:
        forward = None if self._pieces is None else chained(spreads=self._structure.spreads)
        try:
            return prove(
                self.shapes,
                sample,
                self._parts,
                forward=forward,
                kinds=self._structure.kinds,
                opened=self._opened,
                only=only,
                sequence=self._sequence,
            )
        except UnfitError:
            raise
        except Exception as error:  # of rank 0 alone, for whose cut the others wait
            raise CaptureError(unforeseen(self._name, error), final=True) from error

    def watch(self, inputs: Any, _targets: Any, _loss: object) -> Callable[[], object]:
        """Why the cut does not hold."""

        def problem() -> UnfitError | None:
            try:
                self.prove(inputs)
            except UnfitError as error:
                return error
            return None

        return problem

    def prove(self, batch: Any, _targets: Any = (), _loss: object = None) -> Cut:
        """Prove the cut for these inputs, and for the settings of the copy."""
        try:
            again = self._prove(batch, self.cut)
        except CaptureError as error:
            if error.final:
                raise
            raise CaptureError(
                f"{error}. The sample ran; write sample= with the inputs of a batch"
            ) from error
        missing = [name for name in self.cut.dims if name not in again.dims]
        if not again.same(self.cut, gradients=torch.is_grad_enabled()):
            what = missing[0] if missing else next(iter({**self.cut.sizes, **again.sizes}), "the model")
            why = next((why for name, why in again.whole if name in missing), "other sizes or other layers")
            raise UnfitError(
                f"tensor={self._parts}: this batch runs another program of {self._name} than the sample, "
                f'and cuts "{what}" otherwise: {why}. Write parallelize(..., sample=inputs), with the inputs '
                "of a batch"
            )
        self.cut.learn(again)
        return self.cut


def unforeseen(model: str, error: Exception) -> str:
    """The text of an error that no rule foresaw while the program of `model` was recorded or cut."""
    return (
        f"the program of {model} cannot be recorded or cut: {type(error).__name__}: "
        f"{str(error).strip()[:300]}. Use data= and zero="
    )


def _require(parameters: Sequence[nn.Parameter], gradients: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(gradients)
