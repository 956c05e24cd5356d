"""`parallelize`: a model, a plan and an optimizer become a run.

Where a plan needs the model's program and no sample is given, the inputs on which it is recorded are guessed,
or are those of the first batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from unisono.torch_internals.fake import is_about_data

from .arguments import check_arguments, check_compiled, check_memory, check_on_change, two
from .batches import DataComparison, RankBatches, check_layouts, cut_rows, rows_of
from .build import SetupBeginning, begin, set_up
from .costs.forecast import StepForecast, check_prediction
from .elastic.handover import Change
from .elastic.membership import RunMembership
from .elastic.run import ElasticRun
from .experts.layers import check_experts
from .graph.capture import call, quiet
from .graph.containers import mapped
from .graph.shapes import Shapes
from .layouts.shard import planned
from .loss_check import replaced_parameters_raise
from .loss_weights import Weigh, check_weigh
from .materialize import Init
from .model_setup import ModelSetup
from .optimizers import Optimizer
from .plan import Plan
from .planning.choice import ModelChoice
from .planning.planner import resolved
from .precision import LossScaler
from .run import Run
from .structure import is_chain


def parallelize(
    model: nn.Module,
    plan: Plan | ModelChoice | str,
    *,
    optimizer: Optimizer,
    loss: Callable[[Any, Any], Any] | None,
    pieces: Sequence[nn.Module] | None = None,
    cuts: dict[str, str] | None = None,
    sample: Any = None,
    seed: int | None = None,
    init: Init | None = None,
    check: bool | None = None,
    experts: dict[str, str] | None = None,
    weigh: Weigh = None,
    on_change: Callable[[Change], object] | None = None,
    prediction: StepForecast | None = None,
) -> Run:
    """Make `model` train by `plan`. All ranks call this; all get rank 0's parameters.

    A model built under `with torch.device("meta"):` gets its values here, each rank's part on that rank.

    Args:
        plan: or what `up.plan` chose, or "auto": choose for `sample`, which is a batch, (inputs, targets).
        optimizer: makes one or several from this rank's parameters, a list with the attribute `named`.
        loss: (output, targets) -> the mean over rows of a micro-batch. Hugging Face's GPT-2 and Llama-like
            models give their logits. None: the model computes its loss, and a batch is its inputs, such as a
            dict with "labels".
        pieces: for pipelines, the modules in order, in place of stages that are cut from the program. Each
            takes the output of the one before; a tuple is its arguments. They compute what the model does.
        cuts: for the tensor axis, pattern of paths -> "column", "column, gathered", "row", "vocabulary",
            proved in place of the cut that the program chooses; or -> "whole", exceptions from it.
        sample: inputs of one micro-batch. The tensor axis and stages are cut from the program that they run,
            and the pieces' cost is measured on them. None: inputs that fit the first layer; where there are
            none, the run is set up by its first batch, and has no `optimizer` before.
        seed: of a model on the meta device; None: one that rank 0's generator draws.
        init: fills one module's own parameters and buffers, after the module's own initialisation.
        check: try the expert axis in the first step: copies of the model train on a few rows, both ways.
            None: if the model has less than 100 MB of parameters; else its layers have to be known.
            False: never. True: compare also what stages, or a context axis, return with what a copy does.
        experts: for the expert axis, pattern of paths -> "stacked" (a module called with rows, indices of
            experts and weights), "list" (an nn.ModuleList of experts), or "whole" (they stay on every rank),
            beside what is recognised. Without that axis: layers that tensor, pipeline and context take as one
            operator, because they pick rows by values.
        weigh: targets of a micro-batch -> the number of labels over which its loss is a mean. "tokens": all
            that are not ignored. "rows": it is a mean over rows. None: likewise, and ignored labels that are
            unevenly spread are an error. "counted": the loss returns (sum, count).
        on_change: under Plan(elastic=True): called on all ranks after each change of their number.
        prediction: of a step; rank 0 tells once if the first steps differ by 20 %, as a ForecastWarning.
            None: that of what `up.plan` chose.
    Raises:
        ValueError: model and plan do not fit; the text names the module, and says what to write. If a trial
            finds it, the first step raises it.
        TypeError: an argument is of another type.
    """
    given = {"optimizer": optimizer, "loss": loss, "sample": sample, "pieces": pieces, "weigh": weigh}
    plan, sample, prediction = resolved(plan, model, given, prediction)
    check_arguments(model, plan, optimizer, loss, pieces, cuts)
    options: Any = {"pieces": pieces, "cuts": cuts, "sample": sample, "seed": seed, "init": init}
    options |= {"check": check, "experts": experts, "own_loss": loss is None, "weigh": weigh}
    return _run(model, plan, options, optimizer, loss, weigh, on_change, prediction)


def _run(
    model: nn.Module,
    plan: Plan,
    options: dict[str, Any],
    optimizer: Optimizer,
    loss: Callable[[Any, Any], Any] | None,
    weigh: Weigh,
    on_change: Callable[[Change], object] | None,
    prediction: StepForecast | None,
) -> Run:
    check_layouts(options["sample"])
    check_weigh(weigh, own_loss=loss is None)
    check_experts(options["experts"], plan)
    check_compiled(model, plan)
    check_on_change(on_change, plan)
    check_prediction(prediction, elastic=plan.elastic)
    if plan.tf32:
        torch.set_float32_matmul_precision("high")
    if plan.elastic:  # ranks change; a newcomer is alone at first
        check_memory(model)
        with contextlib.ExitStack() as stack:
            membership = RunMembership(plan.data)
            stack.callback(membership.close)
            built = _set_up(model, plan.resized(membership.size), options)
            run = ElasticRun(built, plan, optimizer, loss, weigh, membership, on_change)
            stack.pop_all()
        return run
    more = plan, optimizer, loss, weigh, prediction
    begun = begin(model, plan, **options)
    if options["sample"] is None and needs_inputs(model, plan, options["pieces"]):
        with planned(plan):
            options["sample"] = guessed(model)
        if options["sample"] is None:
            return FirstBatchRun(
                model, begun, lambda inputs: _set_up(model, plan, options | {"sample": inputs}, begun), *more
            )
    return Run(_set_up(model, plan, options, begun), *more)


def _set_up(
    model: nn.Module, plan: Plan, options: dict[str, Any], begun: SetupBeginning | None = None
) -> ModelSetup:
    with replaced_parameters_raise(model), planned(plan):
        return set_up(model, plan, begun, **options)


# ---- set up by the first batch ----


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


for _name in (vars(Run).keys() - vars(FirstBatchRun).keys()) - {
    "epochs", "close", "wait", "backward", "update",
}:  # fmt: skip
    if not _name.startswith("_"):
        setattr(FirstBatchRun, _name, _later(_name))
