"""A measured proposal for each parameter's gradient: exact, 16 bits, or low rank. Needs PyTorch.

The three classes are those of Ramesh et al., Zero-Shot Text-to-Image Generation, 2021, appendix. What is
measured here: one step is made for one parameter alone, with its gradient and with what would be sent of it,
and the loss is that of another batch than the gradient's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.codecs.codec import Codec

__all__ = ["GradientSensitivity", "Proposal", "proposal"]

_ITERATIONS = 4  # of the randomised SVD: four are exact to what decides here
_SEED = 0
_NOISE = 2e-6  # of the loss: a smaller decrease is rounding


class GradientSensitivity(NamedTuple):
    """What was seen of a parameter.

    Attributes:
        choice: the proposal: a rank, the codec, or "exact".  why: in a few words.
        captured: rank -> share of the gradient's squared norm in its best approximation.
        kept: rank -> share of the loss's decrease that a step with the approximation keeps; may exceed 1.
            Empty where the exact step did not lower the loss.
        rounding: relative error of the gradient in the codec (Frobenius norm).
        nbytes: sent for it exactly, and by the proposal.
    """

    name: str
    shape: tuple[int, ...]
    choice: int | str
    why: str
    captured: dict[int, float]
    kept: dict[int, float]
    rounding: float
    nbytes: tuple[int, int]


class Proposal(Mapping[str, "int | str"]):
    """Parameter -> a rank, a codec's name or "exact". `print` shows what was measured.

    `up.PowerSGD(rank=proposal)` and `up.Compressed(codec, rule=proposal)` take it; so does a dict of it that
    was changed by hand.

    Attributes:
        rows: what was measured, parameter by parameter.
    """

    def __init__(self, rows: Sequence[GradientSensitivity]) -> None:
        self.rows = list(rows)
        self._choices = {row.name: row.choice for row in self.rows}

    def __getitem__(self, name: str) -> int | str:
        return self._choices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    def __str__(self) -> str:
        """One line for each parameter, and the sum."""
        ranks = sorted({rank for row in self.rows for rank in row.captured})
        width = max([len(row.name) for row in self.rows] + [9])
        asked = "/".join(map(str, ranks))
        head = f"{'parameter':{width}}  {'shape':14}{'choice':>8}{'bytes':>10}{'sent':>9}  "
        lines = [head + f"{f'kept at {asked}':24}{f'captured at {asked}':24}{'16 bits':>8}  why"]
        for row in self.rows:
            shape = " x ".join(map(str, row.shape)) or "1"
            shares = [
                "/".join(f"{one[r]:.2f}" if r in one else "-" for r in ranks)
                for one in (row.kept, row.captured)
            ]
            lines.append(
                f"{row.name:{width}}  {shape:14}{row.choice!s:>8}{row.nbytes[0]:10}{row.nbytes[1]:9}  "
                f"{shares[0]:24}{shares[1]:24}{row.rounding:8.4f}  {row.why}"
            )
        before, after = (sum(row.nbytes[at] for row in self.rows) for at in (0, 1))
        share = after / before if before else 1.0
        lines.append(f"{'in all':{width}}  {'':14}{'':8}{before:10}{after:9}  {share:.3f} of the bytes")
        return "\n".join(lines)

    __repr__ = __str__


class _LossProbe:
    """The model, its gradients, and the loss after a step of one parameter."""

    def __init__(self, model: nn.Module, batches: list[Any], loss: Callable[..., Tensor] | None) -> None:
        self._model, self._loss, self._last = model, loss, batches[-1]
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("the model has no parameter that is trained")
        self.named = dict(named)
        sums: dict[str, Tensor] = {}
        learnt_from = batches[:-1] or batches
        for batch in learnt_from:
            found = torch.autograd.grad(self._of(batch), list(self.named.values()), allow_unused=True)
            for name, grad in zip(self.named, found, strict=True):
                if grad is not None:
                    sums[name] = sums[name] + grad if name in sums else grad
        self.gradients = {name: total.float() / len(learnt_from) for name, total in sums.items()}
        self.base = self._value()
        if not math.isfinite(self.base):
            raise ValueError(f"the loss is {self.base}: nothing can be measured")

    def decrease(self, name: str, step: Tensor) -> float:
        """How much lower the loss is with `step` subtracted from one parameter, which then is as before."""
        parameter = self.named[name]
        before = parameter.detach().clone()
        try:
            with torch.no_grad():
                parameter.sub_(step.to(parameter.dtype))
            return self.base - self._value()
        finally:
            with torch.no_grad():
                parameter.copy_(before)

    def _of(self, batch: Any) -> Tensor:
        if self._loss is None:
            result: Tensor = self._model(batch)
        else:
            inputs, targets = batch
            result = self._loss(self._model(inputs), targets)
        if getattr(result, "shape", (0,)) not in ((), (1,)):
            what = "model(batch)" if self._loss is None else "loss(model(inputs), targets)"
            raise TypeError(f"{what} is no loss: expected a tensor of one element")
        return result.reshape(())

    @torch.no_grad()
    def _value(self) -> float:
        return float(self._of(self._last))


class SensitivityLimits(NamedTuple):
    """What decides; see `un.codecs.classify`."""

    ranks: tuple[int, ...]
    least: float
    codec: Codec
    rounding: float
    small: int
    saving: float
    step: float


def proposal(
    model: nn.Module, batches: list[Any], loss: Callable[..., Tensor] | None, limits: SensitivityLimits
) -> Proposal:
    """Measure every parameter that is trained."""
    with torch.random.fork_rng(devices=[]):  # the randomised SVD, and dropout, draw from it
        torch.manual_seed(_SEED)
        probe = _LossProbe(model, batches, loss)
        return Proposal([_sensitivity(probe, name, limits) for name in probe.named])


def _sensitivity(probe: _LossProbe, name: str, limits: SensitivityLimits) -> GradientSensitivity:
    shape = tuple(probe.named[name].shape)
    numel = math.prod(shape)
    gradient = probe.gradients.get(name)
    if gradient is None or not bool(gradient.any()):
        return GradientSensitivity(name, shape, "exact", "no gradient", {}, {}, 0.0, (4 * numel, 4 * numel))
    if numel < limits.small:
        return GradientSensitivity(name, shape, "exact", "small", {}, {}, 0.0, (4 * numel, 4 * numel))
    length = float(gradient.norm())
    flat = gradient.detach().cpu().contiguous()
    rounded = limits.codec.decode(limits.codec.encode(flat), flat.shape).to(gradient.device)
    rounding = float((gradient - rounded).norm()) / length
    captured, kept = _low_rank_shares(probe, name, gradient, limits) if len(shape) > 1 else ({}, {})
    decides = kept or captured
    enough = [rank for rank, share in decides.items() if share >= limits.least]
    if enough:
        rank = min(enough)
        sent = 2 * rank * (shape[0] + numel // shape[0])
        why = f"{'keeps' if kept else 'captures'} {decides[rank]:.0%} at rank {rank}"
        return GradientSensitivity(name, shape, rank, why, captured, kept, rounding, (4 * numel, sent))
    if rounding <= limits.rounding:
        sent = limits.codec.nbytes(numel)
        why = "needs more than rank " + str(max(decides)) if decides else "no matrix for low rank"
        return GradientSensitivity(
            name, shape, limits.codec.name, why, captured, kept, rounding, (4 * numel, sent)
        )
    why = f"{limits.codec.name} changes it by {rounding:.1%}"
    return GradientSensitivity(name, shape, "exact", why, captured, kept, rounding, (4 * numel, 4 * numel))


def _low_rank_shares(
    probe: _LossProbe, name: str, gradient: Tensor, limits: SensitivityLimits
) -> tuple[dict[int, float], dict[int, float]]:
    """(captured, kept) at each rank that saves enough bytes."""
    matrix = gradient.reshape(gradient.shape[0], -1)
    rows, columns = matrix.shape
    ranks = [r for r in limits.ranks if 2 * r * (rows + columns) * limits.saving < 4 * rows * columns]
    if not ranks:
        return {}, {}
    most = min(max(ranks) + 6, rows, columns)
    left, _, _ = torch.svd_lowrank(matrix, q=most, niter=_ITERATIONS)
    length = float(matrix.norm())
    weights = float(probe.named[name].detach().norm()) or math.sqrt(matrix.numel())
    scale = limits.step * weights / length
    whole = probe.decrease(name, scale * gradient)
    captured, kept = {}, {}
    for rank in ranks:
        basis = left[:, :rank]
        low = basis @ (basis.t() @ matrix)
        captured[rank] = (float(low.norm()) / length) ** 2
        if whole > _NOISE * abs(probe.base):
            kept[rank] = probe.decrease(name, scale * low.view(gradient.shape)) / whole
    return captured, kept
