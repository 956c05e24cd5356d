"""The inputs on which a model is recorded where no sample is given: guessed, or those of the first batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from unisono.torch_internals.fake import is_about_data

from .arguments import two
from .batches import RankBatches, cut_rows, rows_of
from .graph.capture import call, quiet
from .graph.containers import mapped
from .graph.shapes import Shapes
from .precision import LossScaler
from .run import Run
from .same_data import DataComparison
from .structure import is_chain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .model_setup import ModelSetup, SetupBeginning

__all__ = ["FirstBatchRun", "guessed", "needs_inputs"]


def needs_inputs(model: nn.Module, plan: Any, pieces: Sequence[nn.Module] | None) -> bool:
    """Whether the model has to be recorded before it is cut."""
    chained = plan.context == 1 and (pieces is not None or is_chain(model))
    return plan.tensor > 1 or (plan.pipeline > 1 and not chained)


def guessed(model: nn.Module) -> Any:
    """Inputs that fit the first layer, and with which the model runs; None: there are none."""
    inputs, weight = _guess(model), next(model.parameters(), None)
    if inputs is None:
        return None
    if weight is not None and not weight.is_meta:
        inputs = mapped(inputs, lambda tensor: tensor.to(weight.device))
    shapes = Shapes(model)
    try:
        with quiet(), shapes.mode, torch.no_grad():
            call(shapes.model, shapes.inputs(inputs))
    except Exception as error:  # noqa: BLE001  the first batch decides
        return inputs if is_about_data(error) else None
    return inputs


def _guess(model: nn.Module) -> Any:
    """Inputs that fit the first layer: token ids, or rows of its features. None: nothing fits."""
    main = getattr(model, "main_input_name", None)
    if main is not None:
        if main != "input_ids":
            return None
        ids = torch.zeros(2, 8, dtype=torch.long)
        config: Any = getattr(model, "config", None)
        more = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
        return {"input_ids": ids, **more}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return torch.zeros(2, 8, dtype=torch.long)
        if isinstance(module, nn.Linear):
            return torch.zeros(2, module.in_features)
        if next(module.parameters(recurse=False), None) is not None:
            return None
    return None


class FirstBatchRun(Run):
    """A run that is set up by its first batch. From then on it is a `Run` like any other.

    Args:
        begun: the groups of the run.
        set_up: inputs of a micro-batch -> the model ready to train.
        more: the other arguments of `Run`.
    """

    def __init__(
        self, model: nn.Module, begun: SetupBeginning, set_up: Callable[[Any], ModelSetup], *more: Any
    ) -> None:
        self.plan, self.model, self.mesh, self.epoch = more[0], model, begun.mesh, 0
        self.scaler = LossScaler.of(self.plan.precision)
        self._set_up, self._more = set_up, more
        self._data = DataComparison(self.mesh.everyone.world)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"run.{name}: {type(self.model).__name__} is recorded on the inputs of the first batch, and set "
            "up in the first step. Write parallelize(..., sample=inputs of a batch) to have it at once"
        )

    def _begin(self, inputs: Any) -> None:
        plan, *options = self._more
        rows = -(-rows_of([inputs]) // plan.micro_batches)
        built = self._set_up(cut_rows(inputs, 0, max(1, rows)))
        before = {name: vars(self)[name] for name in ("epoch", "scaler", "_data")}
        self.__class__ = Run  # type: ignore[assignment]
        for name in ("_set_up", "_more"):
            delattr(self, name)
        Run.__init__(self, built, plan, *options)
        vars(self).update(before)

    def shard(self, loader: Iterable[Any]) -> RankBatches:
        return RankBatches(loader, self.mesh.everyone.row, self._more[0].data, self._data)

    def step(self, batch: tuple[Any, Any], *, update: bool = True, watch: bool = False) -> float:
        self._begin(two(batch, own_loss=self._more[2] is None)[0])
        return self.step(batch, update=update, watch=watch)

    def evaluate(self, batch: tuple[Any, Any]) -> float:
        self._begin(two(batch, own_loss=self._more[2] is None)[0])
        return self.evaluate(batch)

    def predict(self, inputs: Any) -> Any:
        self._begin(inputs)
        return self.predict(inputs)


def _later(name: str) -> property:
    """Stands for a method or property of `Run` that needs the model: the text names it."""
    return property(lambda run: run.__getattr__(name), doc=getattr(Run, name).__doc__)


for _name in (vars(Run).keys() - vars(FirstBatchRun).keys()) - {"epochs", "close", "wait"}:
    if not _name.startswith("_"):
        setattr(FirstBatchRun, _name, _later(_name))
