"""Where a program draws random numbers: ranks draw their own only between a column cut and a row cut."""

from __future__ import annotations

from unisono.torch_internals.fake import arguments_of

from .backward import Chosen, Positions, Refusal
from .cut import Cut
from .indices import mixed
from .program import Node, refs
from .rules import DRAWS
from .scopes import Scopes

__all__ = ["check_draws"]


def check_draws(choice: Chosen, cut: Cut, scopes: Scopes, positions: Positions | None = None) -> None:
    """Check that a cut draws for parts within cut regions, and for whole values outside: see generators.py.
    Modules that draw for this rank's positions go into `cut.draws`.

    Raises:
        Refusal: it does not.
        Stays: a module draws for positions, and does other things.
    """
    graph = choice.graph
    events: dict[int, list[str]] = {}
    for frame in graph.frames:
        kind = cut.modules.get(frame.path)
        if kind == "row":
            events.setdefault(frame.begin, []).append("end")
        elif kind == "column":
            events.setdefault(frame.end, []).append("begin")
    own = False
    for node in graph.nodes:
        for event in events.get(node.number, ()):
            own = event == "begin"
        if node.name in DRAWS or _drops(node):
            here = {index for number in node.outputs if number is not None for index in choice.cuts(number)}
            here |= {index for ref in refs(node.args) for index in choice.cuts(ref.value)}
            numbers = [scopes.at(node, ref.value) for ref in refs([node.args, node.named])]
            numbers += [number for number in node.outputs if number is not None]
            if positions is not None and (found := [n for n in numbers if positions.scattered(n)]):
                path = graph.module_of(node)
                if not path or any(frame.inside for frame in graph.frames if frame.path == path):
                    why = (
                        f"{node.name} draws for each position, and not in a module of its own, at {node.line}"
                    )
                    positions.stay(found[0], found[0], why)
                if path not in cut.draws:
                    cut.draws.append(path)
            elif bool(here) != own or any(
                mixed(choice.rules.dims[number], choice.chosen)
                for number in node.outputs
                if number is not None
            ):
                index = choice.first(here or choice.chosen)
                why = f"random numbers are drawn for whole values beside cut ones, at {node.line}"
                raise Refusal(index, why)


def _drops(node: Node) -> bool:
    """Whether it is attention with dropout."""
    if not node.name.startswith("aten._scaled_dot_product"):
        return False
    return any(
        given
        for argument, given in zip(arguments_of(node.op), node.args, strict=False)
        if argument.name == "dropout_p"
    )
