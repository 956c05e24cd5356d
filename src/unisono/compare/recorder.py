"""Records the steps of an unchanged script, by hooks of PyTorch on all modules and optimizers of a process.

A forward of the outermost module that has parameters gives the rows of its batch, and the sums of what each
module in it returns. A backward gives the loss. A step of an optimizer gives gradients before it, and
parameters and buffers after it. Nothing is changed; a gradient costs two passes over it.
"""

from __future__ import annotations

import zlib
from functools import wraps
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.clip_grad import clip_grad_norm_
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .records import Writer, writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
_PERIOD = 65_536  # the direction of projections repeats after so many values
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


def begin() -> None:
    """Record this process from here on, if `unisono compare` has started it."""
    if (recording := writer()) is not None:
        _StepRecorder(recording)


class _StepRecorder:
    """The hooks of one process."""

    def __init__(self, to: Writer) -> None:
        self._to = to
        self._outermost: nn.Module | None = None
        self._paths: dict[nn.Module, str] = {}
        self._names: dict[Tensor, str] = {}
        self._models: list[nn.Module] = []
        draws = torch.Generator().manual_seed(0)
        self._direction = torch.randn(_PERIOD, dtype=torch.float64, generator=draws)
        self._in_backward = False
        nn.modules.module.register_module_forward_pre_hook(self._enter)
        nn.modules.module.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        torch.autograd.backward = self._noting_losses(torch.autograd.backward)
        for place in (nn.utils, nn.utils.clip_grad):
            setattr(place, "clip_grad_norm_", self._noting_norms(clip_grad_norm_))  # noqa: B010 (mypy)

    # ---- forward ----

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if self._outermost is not None or self._in_backward:  # in backward: a part is computed again
            return
        if not torch.is_grad_enabled() or not module.training:
            return
        if next(module.parameters(), None) is None:  # a loss
            return
        self._outermost = module
        self._know(module)

    def _leave(self, module: nn.Module, args: Any, named: dict[str, Any], output: Any) -> None:
        path = self._paths.get(module)
        if self._outermost is not None and path and isinstance(output, Tensor) and output.is_floating_point():
            values = output.detach().double()
            sums = [float(values.sum()), float(values.abs().sum())]
            draws = "dropout" if isinstance(module, _DROPOUTS) and module.p > 0 else type(module).__name__
            self._to.add("output", path, [*sums, draws], _type(output))
        if module is self._outermost:
            self._outermost = None
            batch = next(_tensors([*args, *named.values()]), None)
            if batch is not None:
                self._to.add("rows", "", [self._read(row)[1] for row in batch], _type(batch))

    def _know(self, model: nn.Module) -> None:
        """Name the modules and parameters of a model, and record what it begins with."""
        if model in self._paths:
            return
        if not self._models:
            backend = dist.get_backend() if dist.is_available() and dist.is_initialized() else ""
            self._to.add("seed", "", torch.initial_seed(), backend)
        number = f"{len(self._models)}:" if self._models else ""
        self._models.append(model)
        for path, module in model.named_modules():
            inner = _plain(path)  # "": the model itself, or a wrapper of it
            self._paths.setdefault(module, inner and number + inner)
        for name, parameter in model.named_parameters():
            if parameter not in self._names:
                self._names[parameter] = number + _plain(name)
                value = [*self._read(parameter), _digest(parameter)]
                self._to.add("start", self._names[parameter], value, _type(parameter))

    # ---- losses and norms ----

    def _noting_losses(self, backward: Callable[..., None]) -> Callable[..., None]:
        @wraps(backward)
        def noted(tensors: Any, *args: Any, **kwargs: Any) -> None:
            for one in [tensors] if isinstance(tensors, Tensor) else tensors:
                if isinstance(one, Tensor) and one.numel() == 1:
                    self._to.add("loss", "", float(one.detach()), _type(one))
            self._in_backward = True
            try:
                backward(tensors, *args, **kwargs)
            finally:
                self._in_backward = False

        return noted

    def _noting_norms(self, clip: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(clip)
        def noted(*args: Any, **kwargs: Any) -> Tensor:
            norm = clip(*args, **kwargs)
            self._to.add("clip", "", float(norm), _type(norm))
            return norm

        return noted

    # ---- steps ----

    def _parameters(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
        number = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield self._names.get(parameter, f"parameter {number}"), parameter
                number += 1

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for number, group in enumerate(optimizer.param_groups):
            self._to.add("rate", f"group {number}", float(group["lr"]))
        if any(map(callable, (*args, *kwargs.values()))):  # a closure computes the gradients of this step
            return
        for name, parameter in self._parameters(optimizer):
            if parameter.grad is not None:
                self._to.add("gradient", name, self._read(parameter.grad), _type(parameter.grad))

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for name, parameter in self._parameters(optimizer):
            value = [*self._read(parameter), _digest(parameter)]
            self._to.add("parameter", name, value, _type(parameter))
        for model in self._models:
            for name, buffer in model.named_buffers():
                if buffer.is_floating_point():
                    self._to.add("buffer", _plain(name), self._read(buffer), _type(buffer))
        self._to.step += 1
        if self._to.step == self._to.most_steps:
            raise SystemExit(0)

    def _read(self, tensor: Tensor) -> list[float]:
        """The norm of a tensor, and its projection on a fixed direction, which shows sign and scale."""
        values = _whole(tensor).double().cpu().flatten()
        pieces = zip(torch.split(values, _PERIOD), repeat(self._direction), strict=False)
        projection = sum(float(piece @ direction[: len(piece)]) for piece, direction in pieces)
        return [float(values.norm()), projection]


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors with rows in arguments, also within lists and dictionaries."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, (dict, list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, Tensor) and value.dim() > 0:
            yield value


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor, where a rank has a part."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _digest(tensor: Tensor) -> int:
    return zlib.crc32(_whole(tensor).contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _plain(name: str) -> str:
    """A name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        while name.startswith(wrapper):
            name = name[len(wrapper) :]
        name = name.replace(f".{wrapper}", ".")
    return "" if f"{name}." in _WRAPPERS else name
