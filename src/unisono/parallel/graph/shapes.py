"""Runs of models without values: the copies that run, and the error of one that cannot be recorded.

Functions that a model keeps, such as lambdas and hooks, refer to the copy's modules: copy.deepcopy takes a
function as it is, and what its closure refers to is the model that was copied.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import UnfitError
from unisono.torch_internals.fake import fake_mode, without_values

from .containers import mapped


class CaptureError(UnfitError):
    """A model cannot be recorded; the text names the file and the line.

    Attributes:
        final: no other sample would help: the model does not run one program.
    """

    def __init__(self, text: str, *, final: bool = False) -> None:
        super().__init__(text)
        self.final = final

    def __reduce__(self) -> Any:
        return functools.partial(CaptureError, final=self.final), (str(self),)


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
        self.model, self.also = model_copy((model, also), memo)

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


# ---- copies ----


def model_copy(
    model: Any, memo: dict[int, Any] | None = None, so: str = "what it does cannot be recorded"
) -> Any:
    """A deep copy of a model, or of a tuple of a model and modules of its own.

    Args:
        memo: id of an object -> what the copy has in its place, as for copy.deepcopy.
        so: what follows where it cannot be copied, for the text of the error.
    Raises:
        CaptureError: it cannot be copied.
    """
    known: dict[int, Any] = {} if memo is None else memo
    try:
        made = copy.deepcopy(model, known)
    except Exception as error:
        name = type(model[0] if isinstance(model, tuple) else model).__name__
        raise CaptureError(f"{name} cannot be copied ({type(error).__name__}: {error}), so {so}") from error
    functions = _CopiedFunctions(known)
    for part in made if isinstance(made, tuple) else (made,):
        for module in part.modules() if isinstance(part, nn.Module) else ():
            functions.move_in(vars(module))
            for table in filter(lambda held: isinstance(held, dict), vars(module).values()):
                functions.move_in(table)  # such as that of hooks, to which their handles refer
    return made


class _CopiedFunctions:
    """Functions for the copy. memo: id of a module -> its copy."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._made: dict[int, FunctionType] = {}
        self._open: set[int] = set()  # containers that are walked now: one may hold itself

    def move_in(self, table: dict[Any, Any]) -> None:
        """Change the functions of a table that belongs to the copy."""
        for key, value in table.items():
            table[key] = self.moved(value)

    def moved(self, thing: Any) -> Any:
        """`thing` with copies in place of the modules that it refers to; itself where it has none."""
        if isinstance(thing, nn.Module):
            return self._memo.get(id(thing), thing)
        if isinstance(thing, MethodType):
            owner = self.moved(thing.__self__)
            return thing if owner is thing.__self__ else MethodType(thing.__func__, owner)
        if isinstance(thing, FunctionType):
            return self._function(thing)
        if type(thing) not in (list, tuple, dict) or id(thing) in self._open:
            return thing
        self._open.add(id(thing))
        old = [*(thing.values() if isinstance(thing, dict) else thing)]
        new = [self.moved(part) for part in old]
        self._open.remove(id(thing))
        if all(one is other for one, other in zip(new, old, strict=True)):
            return thing
        return type(thing)(zip(thing, new, strict=True) if isinstance(thing, dict) else new)

    def _function(self, function: FunctionType) -> FunctionType:
        if id(function) in self._made:
            return self._made[id(function)]
        cells = tuple(CellType() for _ in function.__closure__ or ())
        made = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells or None
        )
        self._made[id(function)] = made  # it may refer to itself
        made.__kwdefaults__, made.__dict__ = function.__kwdefaults__, {**function.__dict__}
        made.__qualname__, made.__module__, made.__doc__ = (
            function.__qualname__, function.__module__, function.__doc__
        )  # fmt: skip
        made.__defaults__ = self.moved(function.__defaults__)
        changed = made.__defaults__ is not function.__defaults__
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            try:
                held = old.cell_contents
            except ValueError:  # an empty cell
                continue
            cell.cell_contents = self.moved(held)
            changed |= cell.cell_contents is not held and cell.cell_contents is not made
        if not changed:
            self._made[id(function)] = function
        return self._made[id(function)]


# ---- Hugging Face's search for packed texts ----
# Their decoders read from the positions whether a row has several texts, and make a mask if so. On shapes
# there is nothing to read, so they make one in any case: a dry run would have a mask, and grouped heads
# repeated, which a run has not.


MODULE, SEARCH = "transformers.masking_utils", "find_packed_sequence_indices"


def may_be_packed(inputs: Any) -> bool:
    """Whether inputs say where the texts of a row begin."""
    return isinstance(inputs, Mapping) and inputs.get("position_ids") is not None


def searches_packed_texts() -> bool:
    """Whether a model of this process may search."""
    return hasattr(sys.modules.get(MODULE), SEARCH)


@contextmanager
def single_texts(single: bool) -> Iterator[None]:
    """Have the search find nothing where each row is a single text."""
    masks: Any = sys.modules.get(MODULE)
    if not single or not searches_packed_texts():
        yield
        return
    search = getattr(masks, SEARCH)
    setattr(masks, SEARCH, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(masks, SEARCH, search)
