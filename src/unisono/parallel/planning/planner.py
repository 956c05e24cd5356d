"""`up.plan`: the fastest plan of a model that fits, with its reasons."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from unisono.parallel.arguments import check_arguments
from unisono.parallel.batches import cut_rows, rows_of
from unisono.parallel.costs.forecast import StepForecast
from unisono.parallel.costs.task import TrainingTask
from unisono.parallel.graph.capture import CaptureError
from unisono.parallel.graph.containers import mapped
from unisono.parallel.loss_weights import check_weigh
from unisono.parallel.optimizers import Optimizer
from unisono.parallel.plan import Plan
from unisono.planner.hardware import Hosts
from unisono.planner.planner import NoPlanFitsError
from unisono.torch.control_data import on_rank_0

from .candidates import values
from .choice import ModelChoice
from .machine import MOST_RANKS, JobHost, JobMachine, bytes_of, hosts_of, machine_of, measure
from .search import PlanSearch

UNSEEN = {"elastic": False, "sync_batch_norm": False}
MOST_ROWS = 1 << 32
MOST_MICRO_BATCHES = 1 << 14
"""That can be given: each is an action in the schedule that is priced."""


def plan(
    model: nn.Module,
    *,
    sample: Any,
    optimizer: Optimizer,
    loss: Callable[[Any, Any], Any] | None,
    batch: int | None = None,
    ranks: int | None = None,
    hosts: int | Sequence[int | JobHost] | Hosts | None = None,
    memory: int | str | None = None,
    pieces: Sequence[nn.Module] | None = None,
    weigh: Any = None,
    price: Plan | None = None,
    trial: bool = True,
    **given: Any,
) -> ModelChoice:
    """Choose how to train a model: the fastest plan that fits into a rank's memory, with its reasons.

    Nothing is trained, and the model does not change. Each plan that is tried runs a step without values: so
    its memory is known; its seconds are predicted. Of a small model on the CPU a copy runs a few rows first.
    In a job with a process group all ranks call this, and get one choice. `optimizer` is called for each plan
    that is tried.

    Args:
        model, optimizer, loss, pieces, weigh: as `parallelize` takes them.
        sample: a batch, (inputs, targets), of any number of rows; without `loss` the inputs.
        batch: rows of a step, of all ranks; None: those of the sample.
        ranks: None: those of this job; one without a process group.
        hosts: on which they are, evenly; or a list of hosts that differ: ranks, or a `JobHost`, each, in the
            order of ranks. Or hardware, as `unisono plan --hosts` takes it, which this machine need not have:
            "4xa100-80g", or a file. None: as in this job.
        memory: bytes of a rank, such as 16 << 30 or "16G"; None: nine tenths of what is free here, which the
            ranks of a host share if they compute on its CPU.
        price: give the bytes and seconds of this plan; nothing is searched.
        trial: False: no copy of the model runs. Then what its own Python takes is not in the seconds.
        given: fields of `Plan`, such as precision="bf16" or zero=3. A list is searched, as in
            precision=["f32", "bf16"] or compression=[None, Compressed("int8")].
    Raises:
        NoPlanFitsError: no plan fits; the text names the leanest.
        CaptureError: the model cannot be recorded.
        ValueError, TypeError: wrong arguments, or a plan that cannot run or is not predicted.
        OSError: a file of hosts or hardware cannot be read.
    Example: up.plan(model, sample=(ids, ids), batch=64, ranks=8, memory="16G", optimizer=AdamW, loss=fn)
    """
    check_arguments(model, Plan(), optimizer, loss, pieces, None, caller="plan")
    _check_counts(batch, ranks, trial)
    _check_given(given) if price is None else _check_priced(price, given, ranks)
    ranks = ranks if price is None else price.ranks
    places, limit = hosts_of(hosts, ranks), bytes_of(memory)
    _check_loss(sample, loss, weigh)
    rows = batch if batch is not None else rows_of(sample)
    task = TrainingTask(model, sample, rows, optimizer, loss, pieces, counts=weigh == "counted")
    types = values(given, "precision", ("f32",)) if price is None else [price.precision]
    machine = _machine(task, limit, places, ranks, types)
    try:
        choice = on_rank_0(lambda: _chosen(task, machine, price, given, trial))
    finally:
        task.restore()
    rows = max(1, task.batch // choice.plan.data // choice.plan.micro_batches)  # or all of the sample
    return replace(choice, inputs=cut_rows(task.inputs_of(sample), 0, rows))


def _machine(
    task: TrainingTask,
    limit: int | None,
    places: int | list[JobHost] | None,
    ranks: int | None,
    types: list[str],
) -> JobMachine:
    """The hosts of a job: with hardware, or as this machine."""
    if isinstance(places, list) and places[0].hardware is not None:
        task.on_gpu = True
        return machine_of(places, limit, types)
    model = task.model
    held = sum(v.nbytes for v in [*model.parameters(), *model.buffers()] if not v.is_meta)
    machine = measure(task.device_type, held)
    count = ranks or len(machine.hosts)
    if isinstance(places, list):
        count = sum(host.ranks for host in places)
    return machine.limited(limit).with_ranks(count, places)


def _chosen(
    task: TrainingTask, machine: JobMachine, price: Plan | None, given: dict[str, Any], trial: bool
) -> ModelChoice:
    axes, swap = {"context", "expert"}, "disk" if task.memory_type == "cpu" else "memory"
    search = PlanSearch(task, given, machine, trial=trial)
    if price is not None:
        return search.price(price)
    try:
        # On GPUs the seconds of these axes were not compared with runs: where another plan fits, only
        # arguments choose them. So it is with swapping, everywhere.
        return search.choose(() if machine.compute is not None else axes)
    except NoPlanFitsError:
        return search.choose({*axes, swap})


def _check_priced(price: Plan, given: dict[str, Any], ranks: int | None) -> None:
    """Refuse a plan whose memory is not predicted, and what is given beside it."""
    if not isinstance(price, Plan):
        raise TypeError(f"plan: price is a {type(price).__name__}, expected a Plan or None")
    _check_given({**given, **{field.name: getattr(price, field.name) for field in fields(price)}})
    if given:
        raise ValueError(f"plan: price is a plan, which has its {next(iter(given))}: give one or the other")
    if price.ranks > MOST_RANKS:
        raise ValueError(f"plan: price has {price.ranks} ranks, expected at most {MOST_RANKS}")
    if ranks not in (None, price.ranks):
        raise ValueError(f"plan: price has {price.ranks} ranks, and ranks is {ranks}")


def _check_loss(sample: Any, loss: Any, weigh: Any) -> None:
    check_weigh(weigh, own_loss=loss is None)
    if loss is not None and not (isinstance(sample, (tuple, list)) and len(sample) == 2):
        raise ValueError("plan: sample is a batch: (inputs, targets); without loss= the inputs alone")


def _check_counts(batch: object, ranks: object, trial: object) -> None:
    for name, value, most in (("batch", batch, MOST_ROWS), ("ranks", ranks, MOST_RANKS)):
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise ValueError(f"plan: {name} is {value!r}; it must be a whole number of 1 to {most}")
    if type(trial) is not bool:
        raise TypeError(f"plan: trial is {trial!r}, expected True or False")


def _check_given(given: dict[str, Any]) -> None:
    known = {field.name for field in fields(Plan)}
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"plan: {name} is neither an argument nor a field of Plan")
        each = value if isinstance(value, list) else [value]
        if not each:
            raise ValueError(f"plan: {name} is an empty list; write the values that are searched")
        for one in each:
            if name in UNSEEN and one != UNSEEN[name]:
                raise ValueError(f"plan: {name}={one!r}: its memory is not predicted. Write a Plan by hand")
            if name == "micro_batches" and type(one) is int and one > MOST_MICRO_BATCHES:
                raise ValueError(f"plan: micro_batches is {one}; at most {MOST_MICRO_BATCHES} are priced")
            if name == "precision" and one == "autocast":
                raise ValueError("plan: precision='autocast' is not predicted. Write a Plan by hand")
            _check_value(name, one)


def _check_value(name: str, value: Any) -> None:
    """Refuse a value that no plan has, whatever its other fields are."""
    count = value if type(value) is int and value > 0 else 2
    beside: dict[str, dict[str, Any]] = {
        "sequence": {"tensor": 2},
        "shard": {"data": count, "zero": 1},
        "expert": {"data": count},
        "local_steps": {"data": 2},
        "stages_per_rank": {"pipeline": 2, "schedule": "interleaved"},
        "cuts": {"pipeline": len(value) + 1 if isinstance(value, tuple) else 2},
        "copy_every": {"elastic": True, "zero": 1},
    }
    Plan(**{**beside.get(name, {}), name: value})


class ResolvedPlan(NamedTuple):
    """What `parallelize` trains by: a plan, the sample of a micro-batch, and what a step was said to take."""

    plan: Plan
    sample: Any
    prediction: StepForecast | None


def resolved(
    given: Any, model: nn.Module, options: dict[str, Any], prediction: StepForecast | None
) -> ResolvedPlan:
    """The plan that `parallelize` was given, chosen where it says "auto", with its forecast.

    Args:
        options: optimizer, loss, sample, pieces, weigh.    prediction: that was given; it counts first.
    """
    sample = options["sample"]
    if isinstance(given, str) and given == "auto":
        if sample is None:
            raise ValueError(
                'parallelize: "auto" chooses for a batch of all ranks: write sample=(inputs, targets)'
            )
        try:
            given, sample = plan(model, **options), None
        except CaptureError as error:
            given = _unrecorded(model, options["optimizer"], error)
    if isinstance(given, ModelChoice):
        inputs = _there(given.inputs, model) if sample is None else sample
        return ResolvedPlan(given.plan, inputs, prediction or given.forecast)
    optimizer, loss, pieces = options["optimizer"], options["loss"], options["pieces"]
    check_arguments(model, given, optimizer, loss, pieces, None)
    assert isinstance(given, Plan)
    return ResolvedPlan(given, sample, prediction)


def _unrecorded(model: nn.Module, optimizer: Optimizer, error: CaptureError) -> Plan:
    """A plan of a model that cannot be recorded: the data axis, with ZeRO 3 where replicas fill a rank."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    task = TrainingTask(model, torch.zeros(1), ranks, optimizer, None)
    held, trained, moments = task.state_bytes
    room = min(limit for limit, _ in measure(task.device_type, held).of_places(Plan()))  # the same everywhere
    fits = 2 * (held + trained + (moments or 2 * trained)) <= room  # the other half: activations
    chosen = Plan(data=ranks) if fits or ranks == 1 else Plan(data=ranks, zero=3)
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(
            f'parallelize: "auto" cannot record {type(model).__name__}, and trains it by {chosen}: {error}',
            stacklevel=2,
        )
    return chosen


def _there(inputs: Any, model: nn.Module) -> Any:
    """Inputs on the device of the model, which may have moved since the choice."""
    device = next((each.device for each in model.parameters() if not each.is_meta), None)
    return inputs if device is None else mapped(inputs, lambda tensor: tensor.to(device))
