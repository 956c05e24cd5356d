"""What the search for a cut is told: where cuts pay, and the cuts that a caller names by modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from unisono.torch_internals.training import module_at

from .fused import Split
from .indices import Index, roots
from .shapes import CaptureError

if TYPE_CHECKING:
    from .choice import Choice

__all__ = ["KINDS", "NOT_NAMED", "NO_SUM", "Hints", "check_given", "named_indices", "of_parts"]

KINDS = ("column", "column, gathered", "row", "vocabulary", "whole")
NOT_NAMED = "cuts= does not name it"
NO_SUM = "no layer sums over it afterwards"
LESS_TELLING = (NOT_NAMED, NO_SUM, "it is a dimension of the model's input", "")


class Hints(NamedTuple):
    """Where cuts pay: embeddings to cut by rows, and layers whose output is gathered.

    kinds: the caller's cuts, path -> kind; nothing else is cut. None: the program decides.
    """

    vocabulary: frozenset[str]
    gathered: frozenset[str]
    kinds: dict[str, str] | None = None


def of_parts(model: nn.Module, kinds: dict[str, str]) -> dict[str, str]:
    """Path -> kind, of the layers that stand for a fused one in `model`, in place of the one."""
    found: dict[str, str] = {}
    for path, kind in kinds.items():
        module = module_at(model, path)
        names = [f"{path}.{name}" for name in module.names] if isinstance(module, Split) else [path]
        found |= dict.fromkeys(names, kind)
    return found


def named_indices(choice: Choice, path: str, kind: str) -> set[Index]:
    """The indices of what this kind cuts of a layer; empty: it is no such layer, or never runs."""
    layer, number = choice.layer(path), choice.weight(path)
    table = isinstance(choice.modules[path], nn.Embedding)
    if layer is None or number is None or (kind == "vocabulary" and not table):
        return set()
    dim = 0 if kind == "vocabulary" else layer.input_dim if kind == "row" else layer.output_dim
    return set() if dim is None else roots([choice.rules.dims[number][dim]])


def check_given(choice: Choice, kinds: dict[str, str]) -> None:
    """Raise CaptureError unless `choice` cuts the layers of `kinds`, each as it says, and no other one."""
    refused = {
        path: " and ".join(
            dict.fromkeys(index.why for index in named_indices(choice, path, kind) if index.why)
        )
        for path, kind in kinds.items()
        if choice.cut.modules.get(path) != kind
    }
    if refused:
        path = min(refused, key=lambda path: refused[path] in LESS_TELLING)
        raise CaptureError(_text(choice, path, kinds[path], refused[path]), final=True)
    for path, kind in choice.cut.modules.items():
        if path not in kinds:
            above = path.rpartition(".")[0]
            known = above if isinstance(choice.modules[above], Split) else path
            raise CaptureError(
                f'cuts= does not name "{known}", which shares features with a layer that it names, and so is '
                f'cut, too. Write cuts={{..., "{known}": "{kind}"}}',
                final=True,
            )


def _text(choice: Choice, path: str, kind: str, why: str) -> str:
    """Why a layer cannot be cut as the caller says, and what to write."""
    what = f'"{path}" ({type(choice.modules[path]).__name__})'
    if not choice.runs(path):
        return f'the model does not call {what}, so it cannot be cut by {kind}: write "whole"'
    if not named_indices(choice, path, kind):
        return f'{what} is no layer that can be cut by {kind}: write "whole"'
    todo = 'Write "whole" there and for the layers that share its features, or leave out cuts='
    if why == NO_SUM:
        todo = 'Write "row" for the layer that takes its features, or "column, gathered", or leave out cuts='
    return (
        f"tensor={choice.parts}: {what} cannot be cut by {kind}: {why or NO_SUM}. {todo}: then the cut "
        "follows from the program"
    )
