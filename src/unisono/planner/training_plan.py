"""The plans that the planner compares, and the job that they are for."""

from __future__ import annotations

from typing import Any

import msgspec

from unisono.engine.base.validation import flag, positive, whole
from unisono.planner.hardware import Hardware
from unisono.planner.interconnect import Interconnect
from unisono.planner.shape import TransformerShape

__all__ = [
    "MOST_TAIL",
    "RECOMPUTE",
    "SCHEDULES",
    "SWAPS",
    "TrainingJob",
    "TrainingPlan",
    "codec_rank",
    "fields_text",
    "parse_plan",
]

RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("1f1b", "zb-h1")
SWAPS = ("none", "moments", "states")
CODECS = ("none", "bf16", "int8")
AXES = ("data", "context", "tensor", "pipeline", "expert", "interleave", "micro_batch")
CHOICES = {"recompute": RECOMPUTE, "schedule": SCHEDULES, "swap": SWAPS}
MOST = 1 << 24
MOST_TAIL = 8
"""Larger ones are not searched."""


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, on what.

    Attributes:
        batch: sequences of a step, of all ranks.  ranks: accelerators.
        limit_bytes: of memory that a rank may use.
        compute: the type of compute: bf16, fp16, f32.
        reduce: gradients are kept and reduced in "f32", or "low".
        overlap: gradients and gathered parameters travel during compute.
        codecs: ways to compress gradients that a search may take beside "none".
        imbalance: rows of the fullest rank's experts over the mean of all ranks.
    """

    shape: TransformerShape
    hardware: Hardware
    links: Interconnect
    batch: int
    ranks: int
    limit_bytes: int
    compute: str
    reduce: str
    overlap: bool
    codecs: tuple[str, ...] = ()
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        whole(self.batch, "batch", 1, MOST)
        whole(self.ranks, "gpus", 1, MOST)
        whole(self.limit_bytes, "memory", 1)
        flag(self.overlap, "overlap")
        if self.compute not in self.hardware.flops:
            known = ", ".join(self.hardware.flops)
            raise ValueError(
                f"{self.hardware.name} has no rate for {self.compute!r}, expected one of {known}"
            )
        if self.reduce not in ("f32", "low"):
            raise ValueError(f"reduce is {self.reduce!r}, expected f32 or low")
        for codec in self.codecs:
            codec_rank(codec)
        if positive(self.imbalance, "imbalance") < 1:
            raise ValueError(f"imbalance is {self.imbalance}, expected 1 or more")

    @property
    def width(self) -> int:
        """Bytes of a value that is computed with."""
        return 4 if self.compute == "f32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient."""
        return self.width if self.reduce == "low" else 4

    @property
    def moment_bytes(self) -> int:
        """Bytes of Adam's two moments, and of the f32 copy of a 16-bit parameter."""
        return 8 if self.compute == "f32" else 12


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train.

    Attributes:
        data, tensor, pipeline: sizes of the axes.
        sequence: tensor ranks also cut norms and dropout by tokens.
        interleave: stages on each pipeline rank.  micro_batch: sequences of a micro-batch.
        zero: what data ranks share: 1 moments, 2 also gradients, 3 also parameters.
        recompute: what backward computes again: "none", "selective" (scores of unfused attention), "full".
        context: ranks that share each sequence. They share what data ranks share.
        expert: data ranks over which the experts of a layer are spread.
        shard: data ranks that share (hybrid sharding); the others are replicas. 0: all of them.
        schedule: "1f1b", which is the interleaved one where interleave > 1, or "zb-h1".
        tail: layers that the last rank of a pipeline has fewer than those in the middle; 0: stages are equal.
        swap: what is in host memory while it is not needed: "moments", or "states": also parameters and
            gradients.
        codec: gradients are summed as "bf16", "int8", or factors of a low rank, such as "rank4".

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022
    (arXiv:2205.05198), for sequence and selective; Rajbhandari et al., 2020 (arXiv:1910.02054), for zero; Qi
    et al., 2023 (arXiv:2401.10241), for zb-h1; Vogels et al., 2019 (arXiv:1905.13727), for low ranks.
    """

    data: int = 1
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    interleave: int = 1
    zero: int = 0
    micro_batch: int = 1
    recompute: str = "none"
    context: int = 1
    expert: int = 1
    shard: int = 0
    schedule: str = "1f1b"
    tail: int = 0
    swap: str = "none"
    codec: str = "none"

    def __post_init__(self) -> None:
        for name in AXES:
            whole(getattr(self, name), name, 1, MOST)
        for name in ("shard", "tail"):
            whole(getattr(self, name), name, 0, MOST)
        whole(self.zero, "zero", 0, 3)
        flag(self.sequence, "sequence")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected {', '.join(allowed)}")
        codec_rank(self.codec)

    def __str__(self) -> str:
        shown = ("data", "tensor", "pipeline", "micro_batch")
        values = zip(self.__struct_fields__, self.__struct_defaults__, strict=True)
        return self._text([name for name, value in values if name in shown or getattr(self, name) != value])

    def changes(self, other: TrainingPlan) -> str:
        """The fields in which it differs from another plan, such as "data=8,zero=1"."""
        return self._text(
            [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]
        )

    def _text(self, names: list[str]) -> str:
        return fields_text({name: getattr(self, name) for name in names})

    @property
    def ranks(self) -> int:
        """Ranks that it needs."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def copies(self) -> int:
        """Ranks that have the same part of the model, without ZeRO."""
        return self.data * self.context

    @property
    def sharers(self) -> int:
        """Copies that share what ZeRO shares."""
        return (self.shard or self.data) * self.context

    @property
    def expert_sharers(self) -> int:
        """The same for experts, of which there are fewer copies."""
        return max(1, self.sharers // self.expert)

    def micro_batches(self, batch: int) -> int:
        """Micro-batches of each data rank."""
        return batch // (self.data * self.micro_batch)

    def problem(self, job: TrainingJob) -> str:
        """Why the job cannot be trained so, whatever memory there is; "" if it can."""
        return (
            self._axes_problem(job)
            or self._expert_problem(job)
            or self._stages_problem(job)
            or self._sharing_problem(job)
        )

    def _axes_problem(self, job: TrainingJob) -> str:
        shape = job.shape
        if self.ranks != job.ranks:
            axes = ["data", *["context"] * (self.context > 1), "tensor", "pipeline"]
            product = " x ".join(str(getattr(self, axis)) for axis in axes)
            return f"{' x '.join(axes)} = {product} = {self.ranks} ranks, and there are {job.ranks}"
        if not shape.cuts(self.tensor):
            heads = f"{shape.heads} heads, {shape.key_heads} key heads and an MLP of {shape.mlp}"
            return f"tensor={self.tensor} does not divide {heads}"
        if self.context > 1 and shape.sequence % (2 * self.context):
            return f"context={self.context} cannot cut {shape.sequence} tokens into {2 * self.context} parts"
        if self.sequence and (self.tensor == 1 or shape.sequence // self.context % self.tensor):
            return f"sequence=yes needs tensor > 1 that divides {shape.sequence // self.context} tokens"
        if job.batch % (self.data * self.micro_batch):
            parts = f"{self.data} data ranks with micro-batches of {self.micro_batch}"
            return f"a batch of {job.batch} cannot be cut for {parts}"
        if self.recompute == "selective" and shape.attention == "fused":
            return "recompute=selective computes unfused attention again, and this attention is fused"
        return ""

    def _expert_problem(self, job: TrainingJob) -> str:
        if self.expert == 1:
            return ""
        if job.shape.experts is None:
            return f"expert={self.expert}: this model has no experts"
        if self.data % self.expert:
            return f"expert={self.expert} does not divide data={self.data}"
        if job.shape.experts.count % self.expert:
            return f"expert={self.expert} does not divide {job.shape.experts.count} experts"
        if self.zero and self.sharers % self.expert and self.expert % self.sharers:
            return f"neither of {self.sharers} ranks that share and expert={self.expert} divides the other"
        return ""

    def _stages_problem(self, job: TrainingJob) -> str:
        layers, count = job.shape.layers, self.micro_batches(job.batch)
        if self.pipeline * self.interleave > layers:
            return f"{layers} layers are too few for {self.pipeline} x {self.interleave} stages"
        if self.interleave > 1 and (self.pipeline == 1 or count % self.pipeline):
            return f"interleave={self.interleave} needs a pipeline that divides the {count} micro-batches"
        if self.schedule == "zb-h1":
            if self.pipeline == 1 or self.interleave > 1 or count < self.pipeline:
                return f"schedule=zb-h1 needs a pipeline, of at most the {count} micro-batches, interleave=1"
            if self.zero > 1 or self.recompute != "none":
                return "schedule=zb-h1 computes gradients of weights later: it needs zero < 2, recompute=none"
        if self.tail:
            middle = -(-(layers + self.tail) // (self.pipeline * self.interleave)) * self.interleave
            spare = middle * self.pipeline - layers - self.tail
            if (
                self.pipeline == 1
                or max(self.tail, spare) >= middle
                or self.tail <= (spare + self.tail + 1) // 2
            ):
                return f"tail={self.tail} needs a pipeline whose last rank then has fewer of {layers} layers"
        return ""

    def _sharing_problem(self, job: TrainingJob) -> str:
        if self.zero and self.copies == 1:
            return f"zero={self.zero} needs data > 1"
        if self.shard and (not self.zero or self.shard == 1 or self.data % self.shard):
            return f"shard={self.shard} needs zero > 0, and more than one rank, which divide data={self.data}"
        if self.swap != "none" and job.hardware.host is None:
            return f"swap={self.swap}: the file of {job.hardware.name} has no [host]"
        if self.swap == "states" and (self.zero or self.ranks > self.data or self.expert > 1):
            return "swap=states needs zero=0 and no axis but data"
        if self.codec == "none":
            return ""
        if self.zero or self.copies == 1 or self.expert > 1 or self.swap == "states":
            return (
                f"codec={self.codec} needs copies of whole gradients: data > 1, zero=0, no expert, no states"
            )
        if job.gradient_bytes != 4:
            return f"codec={self.codec} takes gradients in f32"
        return ""


def codec_rank(codec: str) -> int:
    """The rank of a codec of factors; 0: it has none. Example: codec_rank("rank4") == 4.

    Raises:
        ValueError: there is no such codec.
    """
    number = codec.removeprefix("rank")
    if codec.startswith("rank") and number.isascii() and number.isdecimal() and 0 < int(number) <= 1024:
        return int(number)
    if codec not in CODECS:
        raise ValueError(f"codec is {codec!r}, expected {', '.join(CODECS)}, or rank1 to rank1024")
    return 0


def fields_text(fields: dict[str, Any]) -> str:
    """The text of some fields, as `parse_plan` reads it."""
    texts = {True: "yes", False: "no"}
    return ",".join(f"{name}={texts[v] if isinstance(v, bool) else v}" for name, v in fields.items())


def parse_plan(text: str) -> dict[str, Any]:
    """The fields that a text names. Example: "tensor=8,recompute=full" -> {"tensor": 8, "recompute": "full"}.

    Raises:
        ValueError: a field is unknown, twice there, or has no such value.
    """
    found: dict[str, Any] = {}
    for item in text.split(","):
        name, _, value = (each.strip() for each in item.partition("="))
        if name not in TrainingPlan.__struct_fields__:
            raise ValueError(
                f"{item!r}: expected FIELD=VALUE with {', '.join(TrainingPlan.__struct_fields__)}"
            )
        if name in found:
            raise ValueError(f"{name} is there twice")
        if name == "sequence":
            if value not in ("yes", "no"):
                raise ValueError(f"{item}: expected yes or no")
            found[name] = value == "yes"
        elif name in (*CHOICES, "codec"):
            found[name] = value
        elif not (value.isascii() and value.isdecimal() and len(value) <= len(str(MOST))):
            raise ValueError(f"{item}: expected a whole number from 0 to {MOST}")
        else:
            found[name] = int(value)
    TrainingPlan(**found)
    return found
