"""Adam with 4 bytes of state a parameter: the mean of gradients in 1-6-9, that of their squares in 0-6-10.

The formats are those in which DALL-E kept them (Ramesh et al., Zero-Shot Text-to-Image Generation, 2021,
appendix on mixed-precision training). docs/codecs.md defines them and says why the variance does not
get stuck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unisono import _native, codecs
from unisono.engine.base.validation import flag, whole
from unisono.torch_internals.training import offsets

from .gradients import gradient, local

__all__ = ["CompressedAdam"]

_CODES = ("exp_avg", "exp_avg_sq")
_MASK = 2**64 - 1
# spread parameters and steps over the seeds
_ODD = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_LARGEST = 1023 * 2.0**22, 4094.0  # 1-6-9, 0-6-10
_HARMLESS = 63.9  # while no gradient is larger, no mean square gets above 4094


class CompressedAdam(torch.optim.Optimizer):
    """AdamW, or Adam, whose state takes 4 bytes a parameter in place of 8.

    One pass over a parameter decodes, updates and encodes. Parameters and gradients are float32, in CPU
    memory. The step uses unrounded means; only the stored state is rounded. It works on parameters
    that ZeRO has cut (DTensor), in `up.parallelize` and its checkpoints. The state of a parameter
    is `step` (f32), `exp_avg` and `exp_avg_sq` (int16, the bits of the codes:
    `un.codecs.decode(state["exp_avg"], "1-6-9")`).

    Args:
        params: parameters, or groups of them, as of any optimizer.
        lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.
        decoupled: the decay shrinks parameters, as AdamW does; False: it is added to gradients, as Adam does.
        rounding: of the mean: "stochastic" or "nearest". The variance is always rounded stochastically: to
            the nearest it would stop up to a half away from where it goes to, since a step moves it by only
            (1 - beta2) of the way.
        seed: of the random bits. The same seed gives the same training, bit for bit; replicas need the
            same one.
    Raises:
        TypeError, ValueError: wrong arguments, or parameters that are not float32 in CPU memory.
        ValueError: from `step`, a state is not of its parameter's shape: it is of another model.
        OverflowError: from `step`, a mean square of gradients would exceed 4094, the largest 0-6-10, or a
            mean 2^32. Nothing was changed on this rank. Of a parameter that ZeRO has cut, only the rank with
            that part raises; the others have made the step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled: bool = True,
        rounding: str = "stochastic",
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled": decoupled,
            "rounding": rounding,
            "seed": seed,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see torch.optim.Optimizer."""
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            _check_place(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; see torch.optim.Optimizer, which would leave codes as floats."""
        for index, state in state_dict["state"].items():
            for key in _CODES:
                if key in state and state[key].dtype != torch.int16:
                    raise ValueError(
                        f"{key} of parameter {index} is {state[key].dtype}, expected int16: "
                        "the state is of another optimizer"
                    )
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({key: state[key].to(torch.int16) for key in _CODES if key in state})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step; return what `closure`, which is called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        index, pieces = 0, []
        for group in self.param_groups:
            _check(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    pieces.append(_ParameterUpdate(index, parameter, _gradient(parameter), group))
                index += 1
        for piece in pieces:
            self._check_state(piece)
        overflowed = [piece.place for piece in pieces if self._overflows(piece)]
        if overflowed:
            raise OverflowError(
                f"gradients of parameter {overflowed[0]} ({len(overflowed)} in all) are too large for the "
                "compressed state, whose mean square goes up to 4094: divide the loss, or clip gradients"
            )
        for piece in pieces:
            self._update(piece)
        return loss

    def _check_state(self, piece: _ParameterUpdate) -> None:
        """Make the state of a new parameter; the kernel, which gets addresses, trusts that of an old one."""
        parameter, state = piece.parameter, self.state[piece.parameter]
        if not state:
            state["step"] = torch.zeros(())
            for key in _CODES:
                state[key] = torch.zeros_like(
                    parameter, dtype=torch.int16, memory_format=torch.contiguous_format
                )
        wanted = local(parameter).shape
        for key in _CODES:
            codes = local(state[key])
            if codes.shape != wanted or codes.dtype != torch.int16 or codes.device.type != "cpu":
                raise ValueError(
                    f"{key} of parameter {piece.place} is {codes.dtype} {list(codes.shape)} on "
                    f"{codes.device}, expected int16 {list(wanted)} on cpu: the state is of another model"
                )

    def _overflows(self, piece: _ParameterUpdate) -> bool:
        """Whether a step would make a finite mean that its format does not hold."""
        group, grad = piece.group, piece.gradient
        if grad.numel() == 0:
            return False
        if group["weight_decay"] and not group["decoupled"]:
            grad = grad.add(local(piece.parameter), alpha=float(group["weight_decay"]))
        low, high = (float(end) for end in torch.aminmax(grad))
        if -low <= _HARMLESS and high <= _HARMLESS:  # not so where one is NaN
            return False
        state, (beta1, beta2) = self.state[piece.parameter], group["betas"]
        mean, variance = (
            codecs.decode(local(state[key]).contiguous(), name)
            for key, name in zip(_CODES, ("1-6-9", "0-6-10"), strict=True)
        )
        mean.lerp_(grad, 1 - beta1)
        variance.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        return any(
            bool((found.isfinite() & (found.abs() > largest)).any())
            for found, largest in zip((mean, variance), _LARGEST, strict=True)
        )

    def _update(self, piece: _ParameterUpdate) -> None:
        """One parameter's step."""
        parameter, group, state = piece.parameter, piece.group, self.state[piece.parameter]
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        held = [local(tensor) for tensor in (parameter, *(state[key] for key in _CODES))]
        values, mean, variance = flat = [tensor.contiguous() for tensor in held]
        # _overflows has found what the kernel counts, except a sum that another order of rounding lifts above
        # 4094: this becomes 4094
        _native.adam(
            values.data_ptr(), piece.gradient.data_ptr(), mean.data_ptr(), variance.data_ptr(),
            values.numel(),
            beta1=beta1, beta2=beta2, eps=group["eps"],
            decay=0.0 if group["decoupled"] else decay,
            shrink=1.0 - lr * decay if group["decoupled"] else 1.0,
            rate=lr / (1.0 - beta1**step),
            root_correction=1.0 / math.sqrt(1.0 - beta2**step),
            stochastic_mean=group["rounding"] == "stochastic",
            seed=(group["seed"] + piece.place * _ODD[0] + step * _ODD[1]) & _MASK,
            first=_first(parameter),
        )  # fmt: skip
        for tensor, written in zip(held, flat, strict=True):
            if written is not tensor:
                tensor.copy_(written)
        # autograd sees no writes by address; a backward of a graph that saved the old values must fail
        torch.autograd.graph.increment_version([parameter, held[0]])


class _ParameterUpdate(NamedTuple):
    """What a step does to one parameter, checked."""

    place: int  # among all parameters of the optimizer
    parameter: Tensor
    gradient: Tensor
    group: dict[str, Any]


def _first(parameter: Tensor) -> int:
    """The place of this rank's first value in the whole parameter: each value has its own random bits."""
    if not isinstance(parameter, DTensor):
        return 0
    first = 0
    for size, offset in zip(parameter.shape, offsets(parameter), strict=True):
        first = first * size + offset
    return first


def _gradient(parameter: Tensor) -> Tensor:
    part = gradient(parameter)
    assert part is not None
    if part.layout != torch.strided:
        raise TypeError(f"a gradient has layout {part.layout}; CompressedAdam takes dense ones")
    if part.dtype != torch.float32 or part.shape != local(parameter).shape:
        raise TypeError(
            f"a gradient is {part.dtype} {list(part.shape)}, expected float32 of its parameter's shape"
        )
    return part.contiguous()


def _check_place(parameter: Tensor) -> None:
    if (
        parameter.dtype != torch.float32
        or parameter.device.type != "cpu"
        or parameter.layout != torch.strided
    ):
        raise TypeError(
            f"a parameter is {parameter.dtype} on {parameter.device}; CompressedAdam takes dense float32 in "
            "CPU memory"
        )


def _check(options: dict[str, Any]) -> None:
    """Check the options of a group."""
    _number(options["lr"], "lr", 0, math.inf)
    _number(options["weight_decay"], "weight_decay", 0, math.inf)
    _number(options["eps"], "eps", 1e-12, math.inf)
    if not isinstance(options["betas"], (tuple, list)) or len(options["betas"]) != 2:
        raise TypeError(f"betas is {options['betas']!r}, expected two numbers")
    for place, beta in enumerate(options["betas"]):
        _number(beta, f"betas[{place}]", 0, math.nextafter(1, 0))
    flag(options["decoupled"], "decoupled")
    options["seed"] = whole(options["seed"], "seed", 0, _MASK)
    if options["rounding"] not in ("stochastic", "nearest"):
        raise ValueError(f"rounding is {options['rounding']!r}, expected 'stochastic' or 'nearest'")


def _number(value: Any, name: str, least: float, most: float) -> None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}, expected a number") from None
    except OverflowError:  # a whole number that f64 does not hold
        number = math.inf
    if not least <= number <= most or math.isinf(number):
        raise ValueError(f"{name} is {number}, expected {least}..{most}")
