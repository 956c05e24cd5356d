"""The plans that the planner compares, and the job that they are for."""

from __future__ import annotations

from typing import Any

import msgspec

from unisono.engine.base.validation import flag, whole
from unisono.planner.hardware import Hardware
from unisono.planner.interconnect import Interconnect
from unisono.planner.shape import TransformerShape

__all__ = ["RECOMPUTE", "TrainingJob", "TrainingPlan", "fields_text", "parse_plan"]

RECOMPUTE = ("none", "selective", "full")
AXES = ("data", "tensor", "pipeline", "interleave", "micro_batch")
MOST = 1 << 24


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, on what.

    Attributes:
        batch: sequences of a step, of all ranks.  ranks: accelerators.
        limit_bytes: of memory that a rank may use.
        compute: the type of compute: bf16, fp16, f32.
        reduce: gradients are kept and reduced in "f32", or "low".
        overlap: gradients and gathered parameters travel during compute.
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

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022
    (arXiv:2205.05198), for sequence and selective; Rajbhandari et al., 2020 (arXiv:1910.02054), for zero.
    """

    data: int = 1
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    interleave: int = 1
    zero: int = 0
    micro_batch: int = 1
    recompute: str = "none"

    def __post_init__(self) -> None:
        for name in AXES:
            whole(getattr(self, name), name, 1, MOST)
        whole(self.zero, "zero", 0, 3)
        flag(self.sequence, "sequence")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute is {self.recompute!r}, expected {', '.join(RECOMPUTE)}")

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
        return self.data * self.tensor * self.pipeline

    def micro_batches(self, batch: int) -> int:
        """Micro-batches of each data rank."""
        return batch // (self.data * self.micro_batch)

    def problem(self, job: TrainingJob) -> str:
        """Why the job cannot be trained so, whatever memory there is; "" if it can."""
        shape = job.shape
        if self.ranks != job.ranks:
            product = f"{self.data} x {self.tensor} x {self.pipeline}"
            return f"data x tensor x pipeline = {product} = {self.ranks} ranks, and there are {job.ranks}"
        if not shape.cuts(self.tensor):
            heads = f"{shape.heads} heads, {shape.key_heads} key heads and an MLP of {shape.mlp}"
            return f"tensor={self.tensor} does not divide {heads}"
        if self.sequence and (self.tensor == 1 or shape.sequence % self.tensor):
            return f"sequence=yes needs tensor > 1 that divides {shape.sequence} tokens"
        if self.pipeline * self.interleave > shape.layers:
            stages = f"{self.pipeline} x {self.interleave} stages"
            return f"{shape.layers} layers are too few for {stages}"
        if job.batch % (self.data * self.micro_batch):
            parts = f"{self.data} data ranks with micro-batches of {self.micro_batch}"
            return f"a batch of {job.batch} cannot be cut for {parts}"
        if self.interleave > 1 and (self.pipeline == 1 or self.micro_batches(job.batch) % self.pipeline):
            count = self.micro_batches(job.batch)
            return f"interleave={self.interleave} needs a pipeline that divides the {count} micro-batches"
        if self.zero and self.data == 1:
            return f"zero={self.zero} needs data > 1"
        if self.recompute == "selective" and shape.attention == "fused":
            return "recompute=selective computes unfused attention again, and this attention is fused"
        return ""


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
        elif name == "recompute":
            found[name] = value
        elif not (value.isascii() and value.isdecimal() and len(value) <= len(str(MOST))):
            raise ValueError(f"{item}: expected a whole number from 0 to {MOST}")
        else:
            found[name] = int(value)
    TrainingPlan(**found)
    return found
