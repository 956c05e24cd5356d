"""What the proof says of the cuts that a caller names by modules: yes, or no and why."""

from __future__ import annotations

from .choice import Choice
from .fused import Split
from .hints import NO_SUM, NOT_NAMED
from .shapes import CaptureError

__all__ = ["check_given"]

LESS_TELLING = (NOT_NAMED, NO_SUM, "it is a dimension of the model's input", "")


def check_given(choice: Choice, kinds: dict[str, str]) -> None:
    """Raise CaptureError unless `choice` cuts the layers of `kinds`, each as it says, and no other one."""
    refused = {
        path: " and ".join(dict.fromkeys(index.why for index in choice.named(path, kind) if index.why))
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
    if not choice.named(path, kind):
        return f'{what} is no layer that can be cut by {kind}: write "whole"'
    todo = 'Write "whole" there and for the layers that share its features, or leave out cuts='
    if why == NO_SUM:
        todo = 'Write "row" for the layer that takes its features, or "column, gathered", or leave out cuts='
    return (
        f"tensor={choice.parts}: {what} cannot be cut by {kind}: {why or NO_SUM}. {todo}: then the cut "
        "follows from the program"
    )
