"""From the numbers of a model, hardware and a network to the best plan of training, with its reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from unisono.engine.base.validation import instance, text, whole
from unisono.networks import Network, find
from unisono.networks.quantities import readable_size, readable_time
from unisono.planner.choice import CAUSE_NAMES, Choice
from unisono.planner.choice_page import GIB
from unisono.planner.collectives import interconnect_of
from unisono.planner.hardware import Cluster, Hardware, HostKind, Hosts, find_cluster, find_hardware
from unisono.planner.plan_model import HostUse, PlanModel
from unisono.planner.search import PlanTree, PricedPlan, price, refused_neighbours, search
from unisono.planner.shape import TransformerShape
from unisono.planner.step_time import StepTime
from unisono.planner.training_plan import (
    LISTS,
    MOST,
    NUMBERS,
    Runtime,
    TrainingJob,
    TrainingPlan,
    fields_text,
    parse_plan,
    runtime_arguments,
)

RARE = {"context", "experts", "codec", "swap"}
"""They are shown where they take time."""


@dataclass(frozen=True)
class PlanChoice(Choice):
    """A plan of a job, priced, with its reasons. `print` shows it on a screen.

    Attributes:
        job: what it is for.  hosts: what those of each kind have, in the order of ranks; []: all are equal.
    """

    job: TrainingJob
    hosts: list[HostUse]

    NAMES: ClassVar[Mapping[str, str]] = {
        **CAUSE_NAMES,
        "matrix": "matrix products",
        "other": "other operators",
        "bubble": "pipeline bubble",
        "recomputed": "one layer again",
        "ends": "embedding, loss",
    }
    ALWAYS: ClassVar[frozenset[str]] = frozenset(set(StepTime._fields) - RARE)
    RECORDED: ClassVar[tuple[str, ...]] = (
        *Choice.RECORDED,
        "tflops_per_gpu",
        "model_tflops_per_gpu",
        "compute",
    )

    @property
    def compute(self) -> str:
        """Its type of compute."""
        return self.plan.compute or self.job.compute

    @property
    def tflops_per_gpu(self) -> float:
        """TFLOP/s of a rank; what is computed again counts. Narayanan et al., 2021, equation 3."""
        return self._tflops(self.plan.recompute)

    @property
    def model_tflops_per_gpu(self) -> float:
        """The same without what is computed again."""
        return self._tflops("none")

    def runtime_arguments(self, before: int = 1) -> dict[str, Any]:
        """The arguments of `unisono.parallel.Plan` for this plan.

        Args:
            before: pieces of your model before its first layer; stages that differ are cut by pieces.
        Raises:
            ValueError: that runtime has nothing that was priced so; the text says what it has.
        """
        return runtime_arguments(self.plan, self.job, whole(before, "before", 0))

    def record(self) -> dict[str, Any]:
        """All of it as JSON has it; seconds and bytes. docs/planner.md lists the fields."""
        job = self.job
        return {
            **super().record(),
            "bubble_seconds": self.chosen.time.bubble,
            "hosts": [each._asdict() for each in self.hosts],
            "parameters": job.shape.parameters,
            "gpus": job.ranks,
            "batch": job.batch,
            "hardware": job.hardware.name,
            "network": job.links.name,
            "efficiency": job.hardware.efficiency.source,
        }

    def _tflops(self, recompute: str) -> float:
        return self.job.shape.step_flops(self.job.batch, recompute) / self.job.ranks / self.seconds / 1e12

    def _fields(self, plan: TrainingPlan) -> dict[str, Any]:
        return msgspec.structs.asdict(plan)

    def _change(self, plan: TrainingPlan) -> str:
        return plan.changes(self.plan)

    def _title(self) -> str:
        job, name = self.job, self.job.hardware.name
        count, network = f"{job.ranks} x {name}", ""
        if job.cluster is not None:
            count = f"{job.ranks} on hosts {name}"
        elif job.links.name != name:
            network = f", {job.links.name}"
        return (
            f"{_count(job.shape.parameters)} parameters, {job.batch} sequences of "
            f"{job.shape.sequence} a step, {count}{network}, {self.compute}"
        )

    def _about(self) -> Iterator[str]:
        tokens = self.job.batch * self.job.shape.sequence
        again = f" ({self.model_tflops_per_gpu:.1f} of the model)" if self.plan.recompute != "none" else ""
        yield (
            f"{readable_time(self.seconds)} a step, {tokens / self.seconds:,.0f} tokens/s, "
            f"{self.tflops_per_gpu:.1f} TFLOP/s a GPU{again}, "
            f"{self.tflops_per_gpu * self.job.ranks / 1e3:,.4g} PFLOP/s in all"
        )
        yield f"efficiencies of {self.job.hardware.name}: {self.job.hardware.efficiency.source}"

    def _memory(self) -> str:
        state = "fits" if self.fits else "DOES NOT FIT"
        best = f"; the best of {self.candidates:,} plans" if self.candidates > 1 else ""
        return f"{_used(self)} on the fullest rank: {state}{best}"

    def _beside(self) -> Iterator[str]:
        for each in self.hosts:
            first, last = each.ranks
            layers = ",".join(f"{count}" for count in each.layers)
            rows = f"layers {layers}; micro-batches of {each.rows}"
            yield f"  ranks {first} to {last}: {each.hosts}; {rows}; {_used(each)}"


def _used(of: PlanChoice | HostUse) -> str:
    return f"{of.memory_bytes / GIB:.2f} of {of.limit_bytes / GIB:.2f} GiB"


def _count(number: int) -> str:
    if number < 1e6:
        return f"{number:,}"
    return f"{number / 1e9:.4g} billion" if number >= 1e9 else f"{number / 1e6:.4g} million"


SHOWN = 6
DETAILS = ("tail", "shard", "swap", "codec")
DEFAULT = msgspec.structs.asdict(TrainingPlan())


class NoPlanFitsError(ValueError):
    """No plan fits into the memory, or no plan can be cut so. It names the one that needs least.

    `choice` is that one with all that a choice says, or None where no plan can be cut so.
    """

    choice: PlanChoice | None = None


def plan(
    shape: TransformerShape,
    *,
    batch: int,
    gpus: int | None = None,
    hardware: Hardware | str | Path | None = None,
    hosts: Hosts | None = None,
    network: Network | str | Path | None = None,
    memory: int | None = None,
    plan: str | Mapping[str, Any] | None = None,
    fix: str | Mapping[str, Any] | None = None,
    compute: str | Sequence[str] | None = None,
    reduce: str = "f32",
    overlap: bool | None = None,
    codecs: Sequence[str] = (),
    imbalance: float = 1.0,
    dispatch: str = "experts",
    routed_hosts: int = 0,
    expert_overlap: bool = False,
    loss: str = "eager",
    autocast: bool = False,
    runtime: Runtime | None = None,
) -> PlanChoice:
    """Choose how to train a transformer: the fastest plan that fits, with its reasons. Nothing runs.

    Args:
        shape: the model.  batch: sequences of a step, of all ranks.  gpus: ranks.
        hardware: a file, or the name of one that is shipped: a100-80g, h100-80g, v100-32g ...
        hosts: in place of `gpus`, `hardware` and `network`: "4xa100-40g,2xh100-80g", a file, or pairs.
        network: as `un.simulate` takes it; None: the links of the hardware.
        memory: bytes of a rank that a plan may use; None: the hardware's, less what it reserves.
        plan: price this plan; nothing is searched. A text such as "tensor=8,pipeline=12,recompute=full", or
            the fields of `TrainingPlan`. Without `data` that follows from `gpus`; without `micro_batch` the
            fastest that fits is taken; other fields have their defaults.
        fix: search only plans with these fields, such as "sequence=no,zero=1".
        compute: bf16, fp16, f32 or fp8, or several to compare; None: the hardware's first.
        reduce: gradients are kept and reduced in "f32", or "low" for the type of compute.
        overlap: collectives of the data axis travel during compute; None: as the hardware says.
        codecs: ways to compress gradients that a search may take: "bf16", "int8", "rank4"; none unasked.
        imbalance, dispatch, routed_hosts, expert_overlap, loss, autocast: as in `TrainingJob`.
        runtime: `unisono.parallel.Plan`: search only plans that it runs.
    Raises:
        NoPlanFitsError: a ValueError that names the plan which needs least.
        ValueError, TypeError: wrong arguments.
        OSError: a file cannot be read.
    """
    if runtime is not None and not callable(runtime):
        raise TypeError(f"runtime is a {type(runtime).__name__}, expected unisono.parallel.Plan or None")
    if plan is not None and fix is not None:
        raise ValueError("plan prices one plan and fix searches: give one or the other")
    job = _job(
        shape, batch, gpus, hardware, hosts, network, memory, autocast=autocast, loss=text(loss, "loss"),
        compute=compute, reduce=reduce, overlap=overlap, codecs=_codecs(codecs), imbalance=imbalance,
        dispatch=text(dispatch, "dispatch"), routed_hosts=routed_hosts, expert_overlap=expert_overlap,
    )  # fmt: skip
    model = PlanModel(job)
    if plan is not None:
        return _choice(model, *_priced(model, _fields(plan)), runtime)
    return _choice(model, *_searched(model, {} if fix is None else _fields(fix), runtime), runtime)


def _choice(model: PlanModel, best: list[PricedPlan], candidates: int, runtime: Runtime | None) -> PlanChoice:
    """The first of these plans, with its reasons."""
    chosen, *others = best
    collectives = model.collectives(chosen.plan)
    refused = refused_neighbours(model, chosen, runtime)
    hosts = model.placement(chosen.plan)
    return PlanChoice(chosen, collectives, others, refused, candidates, model.job, hosts)


def _job(
    shape: TransformerShape,
    batch: int,
    gpus: int | None,
    hardware: Hardware | str | Path | None,
    hosts: Hosts | None,
    network: Network | str | Path | None,
    memory: int | None,
    **given: Any,
) -> TrainingJob:
    """What `plan` is asked for, checked; the hardware says what is not given."""
    instance(shape, TransformerShape, "shape")
    instance(network, (Network, str, Path, type(None)), "network")
    cluster = None if hosts is None else _cluster(hosts, hardware, network, memory)
    if cluster is not None:
        if gpus is not None and whole(gpus, "gpus") != cluster.ranks:
            raise ValueError(f"gpus is {gpus}, and the hosts have {cluster.ranks}")
        gpus, found = cluster.ranks, cluster.slowest()
        found, memory = msgspec.structs.replace(found, name=cluster.name), None
    else:
        if gpus is None or hardware is None:
            raise ValueError("give gpus and hardware, or hosts")
        found = find_hardware(hardware)
    gpus = int(whole(gpus, "gpus", 1, MOST))
    links = network if network is None or isinstance(network, Network) else find(network, gpus)
    limit = found.usable_bytes if memory is None else int(whole(memory, "memory", 1))
    found.check_limit(limit)
    computes, overlap = _computes(given.pop("compute"), found), given.pop("overlap")
    return TrainingJob(
        shape=shape,
        hardware=found,
        links=interconnect_of(found, links, gpus),
        batch=int(whole(batch, "batch")),
        ranks=gpus,
        limit_bytes=limit,
        compute=computes[0],
        computes=computes if len(computes) > 1 else (),
        overlap=found.overlap if overlap is None else overlap,
        cluster=cluster,
        **given,
    )


def _computes(compute: object, hardware: Hardware) -> tuple[str, ...]:
    if compute is None:
        return (hardware.compute,)
    if not isinstance(compute, (list, tuple)) or not compute:
        return (text(compute, "compute"),)
    found = tuple(text(each, "compute") for each in compute)
    if len(set(found)) < len(found):
        raise ValueError(f"compute is {', '.join(found)}: expected each once")
    return found


def _cluster(
    hosts: Hosts, hardware: object, network: Network | str | Path | None, memory: int | None
) -> Cluster | None:
    """The cluster, whose ranks may use `memory` at most; one kind is a cluster, too."""
    if hardware is not None or network is not None:
        raise ValueError(
            "hosts say what hardware there is, and its links: give hosts, or hardware and network"
        )
    found = find_cluster(hosts)
    if memory is None:
        return found
    limit, most = int(whole(memory, "memory", 1)), max(kind.hardware.memory_bytes for kind in found.kinds)
    if limit > most:
        have = readable_size(most)
        raise ValueError(f"memory is {readable_size(limit)}, and the largest of {found.name} has {have}")
    return Cluster(tuple(HostKind(kind.hosts, kind.hardware.limited(limit)) for kind in found.kinds))


def all_plans(
    job: TrainingJob,
    fix: str | Mapping[str, Any] = "",
    runtime: Runtime | None = None,
    like: TrainingPlan | None = None,
) -> Iterator[PricedPlan]:
    """Every plan of a job's space with its time and memory, also those that do not fit.

    `like`: of `DETAILS`, which make them many, only those of this plan and the defaults; on hosts that
    differ with equal stages and rows.
    """
    model = PlanModel(job)
    kept = [] if like is None else [(name, {getattr(like, name), DEFAULT[name]}) for name in DETAILS]
    fixed = _fields(fix)
    if like is not None and job.cluster is not None:
        fixed = {"layers": (), "rows": (), **fixed}
    for each in PlanTree(job, fixed, runtime):
        if all(getattr(each, name) in values for name, values in kept):
            yield price(model, each)


def _codecs(codecs: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(codecs, (list, tuple)):
        raise TypeError(f"codecs is {codecs!r}, expected several texts")
    found = tuple(text(codec, "codec") for codec in codecs)
    if "none" in found or len(set(found)) < len(found):
        raise ValueError(f'codecs are {", ".join(found)}: expected each once, and none beside "none"')
    return found


def _fields(plan: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(plan, str):
        return parse_plan(plan) if plan.strip() else {}
    if not isinstance(plan, Mapping):
        raise TypeError(f"a plan is a {type(plan).__name__}, expected a text or a mapping")
    fields = dict(plan)
    for name in fields:
        if name not in TrainingPlan.__struct_fields__:
            raise ValueError(
                f"plan: {name!r} is unknown, expected {', '.join(TrainingPlan.__struct_fields__)}"
            )
    for name in LISTS:  # of a plan that was JSON
        if isinstance(fields.get(name), list):
            fields[name] = tuple(fields[name])
    TrainingPlan(**fields)
    return {name: int(value) if name in NUMBERS else value for name, value in fields.items()}


def _searched(
    model: PlanModel, fixed: dict[str, Any], runtime: Runtime | None
) -> tuple[list[PricedPlan], int]:
    """The fastest plans with these fields that fit, and how many were compared."""
    found = search(model, PlanTree(model.job, fixed, runtime), SHOWN)
    if found.best:
        return found.best, found.candidates
    job, smallest = model.job, found.smallest
    if smallest is None and fixed:
        wanted = _with_defaults(fixed, job)
        problem = wanted.problem(job, runtime) or "they cannot cut the batch or the model"
        raise NoPlanFitsError(f"no plan of {job.ranks} ranks has {fields_text(fixed)}: {problem}")
    if smallest is None:
        raise NoPlanFitsError(
            f"no plan for {job.ranks} ranks and a batch of {job.batch}: data ranks have to divide the batch, "
            f"tensor ranks {job.shape.heads} heads, and {job.shape.layers} layers are cut at most once each"
        )
    refused = NoPlanFitsError(
        f"no plan fits {smallest.limit_bytes / GIB:.2f} GiB: of {found.candidates:,} the smallest needs "
        f"{smallest.memory.total / GIB:.2f} GiB, {smallest.plan}"
    )
    refused.choice = _choice(model, [smallest], found.candidates, runtime)
    raise refused


def _with_defaults(fields: Mapping[str, Any], job: TrainingJob) -> TrainingPlan:
    """The plan with these fields; `data` follows from the ranks."""
    plan = TrainingPlan(**fields)
    data = max(1, job.ranks // (plan.tensor * plan.context * plan.pipeline))
    return plan if "data" in fields else msgspec.structs.replace(plan, data=data)


def _priced(model: PlanModel, fields: dict[str, Any]) -> tuple[list[PricedPlan], int]:
    """The plan with these fields; where its micro-batch is free, all of them that fit, or the smallest."""
    job = model.job
    base = _with_defaults(fields, job)
    if problem := base.problem(job):
        raise ValueError(f"plan: {problem}")
    fixed = msgspec.structs.asdict(base)
    if "micro_batch" not in fields:
        del fixed["micro_batch"]
    plans = [price(model, each) for each in PlanTree(job, fixed)]
    fitting = [each for each in plans if not each.excess_bytes]
    best = sorted(fitting, key=lambda each: each.order)[:SHOWN]
    return best or [min(plans, key=lambda each: each.memory.total)], len(plans)
