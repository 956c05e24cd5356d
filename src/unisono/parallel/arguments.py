"""Checks what a run is given before a byte moves: arguments, an optimizer, a batch, what is frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from unisono.torch_internals.training import is_compiled

from .graph.containers import tensors_in
from .plan import Plan


def check_arguments(
    model: object,
    plan: object,
    optimizer: object,
    loss: object,
    pieces: object,
    cuts: object,
    *,
    caller: str = "parallelize",
) -> None:
    """Raise TypeError for a value of another type, before a byte moves. `caller`: whose error it is."""
    wanted = {
        "model": (isinstance(model, nn.Module), model, "an nn.Module"),
        "plan": (isinstance(plan, Plan), plan, 'a Plan, what up.plan chose, or "auto"'),
        "optimizer": (
            callable(optimizer),
            optimizer,
            "a function that makes one: lambda params: AdamW(params)",
        ),
        "loss": (loss is None or callable(loss), loss, "a function of (output, targets), or None"),
        "pieces": (pieces is None or _are_modules(pieces), pieces, "a list of modules"),
        "cuts": (cuts is None or isinstance(cuts, dict), cuts, "a dict, pattern of paths -> kind"),
    }
    for name, (right, value, what) in wanted.items():
        if not right:
            raise TypeError(f"{caller}: {name} is a {type(value).__name__}, expected {what}")


def _are_modules(pieces: object) -> bool:
    return isinstance(pieces, Sequence) and all(isinstance(piece, nn.Module) for piece in pieces)


def check_on_change(on_change: object, plan: Plan) -> None:
    """Raise TypeError or ValueError for a function that would never be called."""
    if on_change is None:
        return
    if not callable(on_change):
        raise TypeError(f"parallelize: on_change is a {type(on_change).__name__}, expected a function")
    if not plan.elastic:
        raise ValueError("parallelize: on_change is for runs whose ranks change: write Plan(elastic=True)")


def check_compiled(model: nn.Module, plan: Plan) -> None:
    """Raise ValueError for a compiled model that a run would not train as the user means."""
    if "_orig_mod" in dict(model.named_children()):  # what torch.compile(model) returns
        raise ValueError(
            "parallelize: torch.compile(model) has other names of parameters, which checkpoints and weights "
            "would have, too. Write model.compile(...), with the same arguments, and give the model"
        )
    compiled = [path for path, module in model.named_modules() if is_compiled(module)]
    if compiled and plan.swap is not None:
        raise ValueError(
            f"Plan(swap={plan.swap!r}) frees parameters between uses, which compiled code does not see: "
            f'"{compiled[0] or type(model).__name__}" is compiled. Leave out compile, or swap'
        )
    if plan.pipeline > 1 and is_compiled(model):
        raise ValueError(
            f"Plan(pipeline={plan.pipeline}) runs the model's layers stage by stage, and never the compiled "
            "model itself. Compile the layers: for layer in model.layers: layer.compile()"
        )


def check_memory(model: nn.Module) -> None:
    """Raise ValueError for a model on a device whose memory an elastic run does not hand over."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"Plan(elastic=True) needs a model in CPU memory, and {name!r} is on {value.device}: "
                "newcomers get the state from memory"
            )


def two(batch: object, *, own_loss: bool = False) -> tuple[Any, Any]:
    """Return inputs and targets.

    Args:
        own_loss: the model computes its loss: a batch is its inputs, whose labels are the targets.
    """
    if own_loss:
        labels = batch.get("labels", ()) if isinstance(batch, Mapping) else getattr(batch, "labels", ())
        return batch, labels
    if not isinstance(batch, (tuple, list)):
        raise TypeError(f"a batch is (inputs, targets), not a {type(batch).__name__}")
    if len(batch) != 2:
        raise TypeError(f"a batch is (inputs, targets), not a {type(batch).__name__} of {len(batch)}")
    return batch[0], batch[1]


def check_gradients(inputs: object, plan: Plan) -> None:
    """Raise ValueError for inputs that require gradients, which a plan would leave in parts or on no rank."""
    for name in ("pipeline", "context", "tensor"):
        parts = getattr(plan, name)
        if parts > 1 and any(tensor.requires_grad for tensor in tensors_in(inputs)):
            raise ValueError(
                f"an input of the batch requires a gradient, and no rank of {name}={parts} has all of it. "
                "Give x.detach(), or use data= and zero= for a loss that differentiates by inputs"
            )


def check_trained(
    named: Mapping[str, nn.Parameter], trained: Mapping[str, nn.Parameter], why: str, *, follows: bool
) -> None:
    """Raise RuntimeError if parameters were frozen or unfrozen after the run was made.

    Args:
        why: this plan does not follow.
        follows: the data axis follows a parameter that is frozen later.
    """
    for name, parameter in named.items():
        was = name in trained
        if parameter.requires_grad == was or (was and follows):
            continue
        before, now = ("trained", "frozen") if was else ("frozen", "trained")
        raise RuntimeError(
            f"{name!r} was {before} when this run was made, and is {now} now. {why}. Or save a checkpoint, "
            f"make a new model where it is {now}, a new run by up.parallelize, and load"
        )


def raise_changed(name: str | None) -> None:
    """Raise what an evaluation with side effects ends with, on all ranks.

    Args:
        name: a buffer that changed on this rank; None: on another rank.
    """
    what = f"buffer {name!r}" if name else "a buffer of another rank"
    raise RuntimeError(f"the evaluation has changed {what}. Call run.model.eval() before run.evaluate")


def raise_written(name: str | None, lost: str) -> None:
    """Raise, on all ranks, the error of a step whose forward has written what one process keeps otherwise.

    Args:
        name: a buffer that changed in both forwards of a unit.    lost: why a parameter is wrong now.
    """
    if lost:
        raise RuntimeError(lost)
    what = f"buffer {name!r}" if name else "a buffer of another rank"
    raise RuntimeError(
        f"recompute= runs each unit's forward again in backward, and has changed {what} twice. Leave out "
        "recompute, or use a layer without such buffers, such as GroupNorm or LayerNorm"
    )
