"""The job that plans are for: what is trained, on what."""

from __future__ import annotations

import msgspec

from unisono.engine.base.validation import flag, positive, text, whole
from unisono.planner.cluster import Cluster
from unisono.planner.hardware import Hardware
from unisono.planner.interconnect import Interconnect
from unisono.planner.shape import TransformerShape

__all__ = ["MOST", "TrainingJob", "codec_rank"]

CODECS = ("none", "bf16", "int8")
DISPATCHES = ("experts", "hosts")
LOSSES = ("eager", "fused")
MOST = 1 << 24


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, on what.

    Attributes:
        batch: sequences of a step, of all ranks.  ranks: accelerators.
        limit_bytes: of memory that a rank may use.
        compute: the type of compute: bf16, fp16, f32, fp8.
        computes: the types that are searched, where they are several; `compute` is the first one.
        reduce: gradients are kept and reduced in "f32", or "low".
        overlap: gradients and gathered parameters travel during compute.
        codecs: ways to compress gradients that a search may take beside "none".
        imbalance: rows of the fullest rank's experts over the mean of all ranks.
        dispatch: rows of a token go to each of its "experts", or once to each of the "hosts" that have some.
        routed_hosts: hosts at most that a token's experts are on; 0: any.
        expert_overlap: rows of one micro-batch travel while another one is computed.
        loss: cross entropy as PyTorch's operators compute it, "eager", or in one kernel, "fused", which keeps
            the logits in f32 and nothing else.
        autocast: parameters are f32, and so are the sums between layers, as under `torch.autocast`.
        cluster: the hosts, where they differ; `hardware` and `links` are then what all have in common.
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
    computes: tuple[str, ...] = ()
    dispatch: str = "experts"
    routed_hosts: int = 0
    expert_overlap: bool = False
    loss: str = "eager"
    autocast: bool = False
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        whole(self.batch, "batch", 1, MOST)
        whole(self.ranks, "gpus", 1, MOST)
        whole(self.limit_bytes, "memory", 1)
        flag(self.overlap, "overlap")
        for compute in (self.compute, *self.computes):
            if compute not in self.hardware.flops:
                known = ", ".join(self.hardware.flops)
                raise ValueError(f"{self.hardware.name} has no rate for {compute!r}, expected one of {known}")
        if self.dispatch not in DISPATCHES:
            raise ValueError(f"dispatch is {self.dispatch!r}, expected {' or '.join(DISPATCHES)}")
        if self.loss not in LOSSES:
            raise ValueError(f"loss is {self.loss!r}, expected {' or '.join(LOSSES)}")
        whole(self.routed_hosts, "routed_hosts", 0, MOST)
        flag(self.expert_overlap, "expert_overlap")
        flag(self.autocast, "autocast")
        if self.routed_hosts and self.dispatch != "hosts":
            raise ValueError(f"routed_hosts={self.routed_hosts} needs dispatch=hosts")
        if self.reduce not in ("f32", "low"):
            raise ValueError(f"reduce is {self.reduce!r}, expected f32 or low")
        for codec in self.codecs:
            codec_rank(codec)
        if not 1 <= positive(self.imbalance, "imbalance") <= MOST:
            raise ValueError(f"imbalance is {self.imbalance}, expected 1 or more, at most {MOST}")

    @property
    def width(self) -> int:
        """Bytes of a value that is computed with; under fp8 only inputs of matrix products are narrower."""
        return 4 if self.compute == "f32" else 2

    @property
    def residual_width(self) -> int:
        """Bytes of a value between layers."""
        return 4 if self.autocast else self.width

    @property
    def logit_bytes(self) -> int:
        """Bytes of a logit at the peak of the loss.

        Eager: logits and their log-softmax in the type of compute, which autocast copies to f32, and one
        gradient in f32; in f32 two gradients. 12 bytes in 16 bits, and 16 in f32.
        """
        return 4 if self.loss == "fused" else 2 * self.width + 8

    @property
    def product_width(self) -> int:
        """Bytes of an input of a matrix product of a layer."""
        return 1 if self.compute == "fp8" else self.width

    @property
    def copy_bytes(self) -> int:
        """Bytes of copies of an element of a layer's matrix beside it: under fp8 as it is, and transposed.

        Source: NVIDIA, Transformer Engine: products of 8-bit inputs on Hopper take both from rows only.
        """
        return 2 if self.compute == "fp8" else 0

    def typed(self, compute: str) -> TrainingJob:
        """The job with one type of compute; "": its own."""
        if not compute or (compute == self.compute and not self.computes):
            return self
        return msgspec.structs.replace(self, compute=compute, computes=())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient."""
        return self.width if self.reduce == "low" else 4

    @property
    def moment_bytes(self) -> int:
        """Bytes of Adam's two moments, and of the f32 copy of a 16-bit parameter."""
        return 8 if self.compute == "f32" else 12


def codec_rank(codec: str) -> int:
    """The rank of a codec of factors; 0: it has none. Example: codec_rank("rank4") == 4.

    Raises:
        ValueError: there is no such codec.
    """
    number = text(codec, "codec").removeprefix("rank")
    if codec.startswith("rank") and number.isascii() and number.isdecimal() and 0 < int(number) <= 1024:
        return int(number)
    if codec not in CODECS:
        raise ValueError(f"codec is {codec!r}, expected {', '.join(CODECS)}, or rank1 to rank1024")
    return 0
