"""The parts of a model by its structure: the units of the data axis, and pieces that run one after the other.

Nothing here knows a model by its name. What stages of a pipeline and the tensor axis cut follows from the
recorded program; a plain `nn.Sequential`, and the caller's `pieces`, run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .graph.capture import call
from .graph.fused import KINDS, has_hooks

# of `transformers`
GIVE_LOGITS = ("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


def identity(output: Any) -> Any:
    """Return what a model returned."""
    return output


@dataclass
class ModelStructure:
    """The parts of one model.

    Attributes:
        pieces: modules that run one after the other. []: stages are cut from the recorded program.
        units: modules that run, whose parameters are gathered and reduced together.
        kinds: path of a module -> how the caller's `cuts` say that it is cut.
        output: of the model -> what the loss takes.
        spreads: the pieces are the caller's: a tuple that one returns is the arguments of the next one, and
            not one argument.
    """

    pieces: list[nn.Module] = field(default_factory=list)
    units: list[nn.Module] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    output: Callable[[Any], Any] = identity
    spreads: bool = False

    def left_out(self, model: nn.Module) -> list[str]:
        """The parameters of a model that no piece has."""
        inside = {value for piece in self.pieces for value in piece.parameters()}
        return [name for name, value in model.named_parameters() if value not in inside]


def structure_of(
    model: nn.Module,
    pieces: Sequence[nn.Module] | None,
    cuts: dict[str, str] | None,
    *,
    staged: bool = False,
    own_loss: bool = False,
) -> ModelStructure:
    """Find the parts of a model.

    Args:
        pieces: of the caller.    cuts: pattern of paths ("blocks.*.fc") -> kind of cut.
        staged: pieces run in stages, and not the model that has their modules.
        own_loss: the model computes its loss, and returns more than logits.
    """
    found = ModelStructure(units=entries(model), output=identity if own_loss else loss_input(model))
    if pieces is not None:
        outermost = pieces if staged else [part for piece in pieces for part in _parts_of(piece, model)]
        found.pieces, found.spreads = list(pieces), True
        found.units = [part for part in dict.fromkeys(outermost) if any(True for _ in part.parameters())]
    elif is_chain(model):
        found.pieces = [*model._modules.values()]  # type: ignore[list-item]  # those that stand twice, too
    for pattern, kind in (cuts or {}).items():
        found.kinds |= dict.fromkeys(_paths(model, pattern, kind), kind)
    return found


def loss_input(model: nn.Module) -> Callable[[Any], Any]:
    """What a loss takes of the output of a model: these classes of `transformers` give their logits."""
    own = any(base.__module__.startswith("transformers.models.") for base in type(model).__mro__)
    return _logits if own and type(model).__name__ in GIVE_LOGITS else identity


def _logits(output: Any) -> Any:
    found = getattr(output, "logits", None)
    return found if isinstance(found, Tensor) else output


def run_pieces(pieces: Sequence[nn.Module], inputs: Any, *, spreads: bool) -> Any:
    """Run pieces, the first one on a model's inputs. spreads: see `ModelStructure`."""
    first, *rest = pieces
    value = call(first, inputs)
    for piece in rest:
        value = piece(*value) if spreads and isinstance(value, tuple) else piece(value)
    return value


def chained(*, spreads: bool) -> Callable[[nn.Module, Sequence[nn.Module], Any], Any]:
    """What runs pieces of a model in place of it."""
    return lambda _model, pieces, inputs: run_pieces(pieces, inputs, spreads=spreads)


def is_chain(model: nn.Module) -> bool:
    """Whether a model does nothing but run its entries: an `nn.Sequential` that nobody has changed."""
    plain = type(model).forward is nn.Sequential.forward and type(model).__call__ is nn.Module.__call__
    bare = not (model._parameters or model._buffers or has_hooks(model))
    return plain and bare and bool(model._modules) and None not in model._modules.values()


def entries(module: nn.Module) -> list[nn.Module]:
    """Return the entries with parameters of the outermost `nn.Sequential`s and `nn.ModuleList`s.

    Of an entry that nothing can call, such as a list of layers in a list, its own entries.
    """
    return [*dict.fromkeys(_entries(module))]


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    within = isinstance(module, (nn.Sequential, nn.ModuleList))
    for child in module.children():
        yield from _called(child) if within else _entries(child)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """A module that can be a unit; or those in it, where nothing can call it."""
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        for child in module.children():
            yield from _called(child)
    elif any(True for _ in module.parameters()) and not writes_input(module):
        yield module


def writes_input(module: nn.Module) -> bool:
    """Whether a module begins with an activation in place, by the order of `nn.Sequential`s.

    Its input is then also what it leaves there: it is no unit, whose input is another tensor.
    """
    first = next(module.children(), None)
    if isinstance(first, nn.Sequential):
        return writes_input(first)
    return isinstance(module, nn.Sequential) and bool(getattr(first, "inplace", False))


def _parts_of(piece: nn.Module, model: nn.Module) -> Iterator[nn.Module]:
    """A piece, if the model has it; or the outermost modules of both: a wrapper runs in stages only."""
    inside = set(model.modules())
    if piece in inside:
        yield piece
        return
    for child in piece.children():
        yield from _parts_of(child, model)


def _paths(model: nn.Module, pattern: str, kind: str) -> list[str]:
    if kind not in KINDS:
        raise ValueError(f'cuts: "{pattern}" is to be cut by "{kind}"; known are {", ".join(KINDS)}')
    paths = [path for path, _ in model.named_modules() if path and fnmatchcase(path, pattern)]
    if not paths:
        raise ValueError(f'cuts: no module of {type(model).__name__} is called "{pattern}"')
    return paths


def plain_class(model: nn.Module) -> type:
    """The class that the user made; fully_shard puts one of its own before it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
