"""`parallelize`: a model, a plan and an optimizer become a run."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .arguments import check_arguments, check_compiled, check_memory, check_on_change
from .batches import check_layouts
from .costs.forecast import StepForecast
from .costs.forecast_check import check_prediction
from .elastic.handover import Change
from .elastic.membership import RunMembership
from .elastic.run import ElasticRun
from .experts.layers import check_experts
from .first_batch import FirstBatchRun, guessed, needs_inputs
from .layouts.shard import planned
from .loss_parameters import refuse_replaced
from .loss_weights import Weigh, check_weigh
from .materialize import Init
from .model_setup import ModelSetup, SetupBeginning, begin, set_up
from .optimizer_groups import Optimizer
from .plan import Plan
from .planning.choice import ModelChoice
from .planning.planner import resolved
from .run import Run


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
    if plan.elastic:
        return _elastic(model, plan, options, optimizer, loss, weigh, on_change)
    more = plan, optimizer, loss, weigh, prediction
    begun = begin(model, plan, **options)
    if options["sample"] is None and needs_inputs(model, plan, options["pieces"]):
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


def _elastic(
    model: nn.Module,
    plan: Plan,
    options: dict[str, Any],
    optimizer: Optimizer,
    loss: Callable[[Any, Any], Any] | None,
    weigh: Weigh,
    on_change: Callable[[Change], object] | None,
) -> ElasticRun:
    """A run whose ranks change; a newcomer is alone at first."""
    check_memory(model)
    with contextlib.ExitStack() as stack:
        membership = RunMembership(plan.data)
        stack.callback(membership.close)
        here = plan.resized(membership.size)
        built = _set_up(model, here, options)
        run = ElasticRun(built, plan, optimizer, loss, weigh, membership, on_change)
        stack.pop_all()
    return run


# ---- replaced parameters ----


@contextlib.contextmanager
def replaced_parameters_raise(model: nn.Module) -> Iterator[None]:
    """What is a parameter of `model` before the block, and none after it, raises RuntimeError in backward.

    Example: w = model.head.weight before; a loss with w.pow(2) under Plan(data=2, zero=3).
    """
    before = [(name, weakref.ref(value), dict(vars(value))) for name, value in model.named_parameters()]
    yield
    named = dict(model.named_parameters(remove_duplicate=False))
    now = {id(parameter) for parameter in named.values()}
    for name, reference, attributes in before:
        parameter, new = reference(), named.get(name)
        for attribute, value in attributes.items() if new is not None and new is not parameter else ():
            if not hasattr(new, attribute):
                setattr(new, attribute, value)
        if parameter is not None and parameter.requires_grad and id(parameter) not in now:
            parameter.register_hook(partial(refuse_replaced, name))
