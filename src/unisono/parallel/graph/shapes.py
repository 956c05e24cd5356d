"""Copies of models without values, on which programs run, and the error of one that cannot be recorded."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import UnfitError
from unisono.torch_internals.fake import fake_mode, without_values

from .containers import mapped
from .model_copy import model_copy

__all__ = ["CaptureError", "Shapes", "check_collective"]


class CaptureError(UnfitError):
    """A model cannot be recorded; the text names the file and the line.

    Attributes:
        final: no other sample would help: the model does not run one program.
    """

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final

    def __reduce__(self) -> Any:
        return _capture_error, (str(self), self.final)


def _capture_error(text: str, final: bool) -> CaptureError:
    return CaptureError(text, final=final)


def check_collective(op: Any) -> None:
    """Refuse an operator of torch.distributed, such as of a contrastive loss over all ranks.

    Ranks that share a model have the same rows, and those of a pipeline run other parts of it. So what such a
    program gathers is not the batch. Data ranks run the model's own forward, and may call what they like.
    """
    if op.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        raise CaptureError(
            f"calls {op.overloadpacket.__name__.strip('_')} of torch.distributed, whose ranks have the same "
            "rows under this plan (use data= and zero=)",
            final=True,
        )


class Shapes:
    """A copy of a model without values, and the mode under which it runs.

    Args:
        model: with its values or on the meta device; it stays as it is. Or such a copy.
        also: anything that refers to modules of `model`, such as a list of them; copied with it.
    Attributes:
        set_once: attributes (path, name) that a first run changes, and a second one does not; it runs the
            same program.
    Raises:
        CaptureError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module | Shapes, also: Any = None) -> None:
        self.mode = fake_mode()
        self.set_once: set[tuple[str, str]] = set()
        # what a closure of the program may refer to, which no copy of the model changes. A run replaces
        # parameters, whose memory ends then
        self.originals: dict[int, tuple[weakref.ref[Tensor], str]]
        self.on_meta: bool  # the model was on the meta device
        if isinstance(model, Shapes):
            self.originals, self.on_meta = model.originals, model.on_meta
            self._copy(model.model, model.also)
        else:
            named = [*model.named_parameters(), *model.named_buffers()]
            self.originals = {id(value): (weakref.ref(value), name) for name, value in named}
            self.on_meta = any(value.is_meta for _, value in named)
            self._copy(model, also)

    def _copy(self, model: nn.Module, also: Any) -> None:
        # id of the blank of a tensor -> the blank, kept so that its id stays its own, and where it is
        self.attributes: dict[int, tuple[Tensor, tuple[str, str]]] = {}
        memo: dict[int, Any] = {}
        for path, module in model.named_modules():
            held = [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]
            for leaf, value in held:
                if isinstance(value, Tensor) and id(value) not in memo:
                    blank = memo[id(value)] = self.blank(value)
                    self.attributes[id(blank)] = blank, (path, leaf)
        try:
            made: tuple[nn.Module, Any] = model_copy((model, also), memo)
        except Exception as error:
            raise CaptureError(
                f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), so what it does "
                "cannot be recorded"
            ) from error
        self.model, self.also = made

    def original(self, tensor: Tensor) -> str | None:
        """The name of a parameter or buffer of the model that was copied; None: it is none of them."""
        found = self.originals.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def blank(self, value: Tensor) -> Tensor:
        """A tensor like `value`, without values; where the model is to be in place of the meta device."""
        return without_values(self.mode, value, _home() if value.is_meta else value.device)

    def inputs(self, sample: Any) -> Any:
        """The sample, without its values; where the model is to be if it was on the meta device."""
        made = mapped(sample, self.blank)
        return mapped(made, lambda tensor: tensor.to(_home())) if self.on_meta else made


def _home() -> torch.device:
    """The default device, on which a model on the meta device is to be: operators that name it do so, too."""
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default
