# ruff: noqa: E501  (templates of one line)
"""Statements about modules: how they are called, what goes between them, what happens around a call."""

from .writer import Writer


def _deep(w: Writer) -> tuple[str, int]:
    """A value with at least two dims, and its width."""
    x = w.last()
    if len(w.shape(x)) < 2:
        raise ValueError
    return x, w.shape(x)[-1]


def _alike(w: Writer, x: str) -> str:
    """A value of the same shape."""
    return w.rng.choice([n for n in w.floats() if w.shape(n) == w.shape(x)])


def keywords(w: Writer) -> str:
    """A call with keyword arguments, some of them None."""
    x, width = _deep(w)
    y, gate = _alike(w, x), w.held("m", f"pieces.Gate({width})")
    return w.rng.choice(
        (
            f"{gate}({x})",
            f"{gate}(x={x}, mask=None)",
            f"{gate}({x}, None, other={y})",
            f"{gate}({x}, {y} > 0, scale=0.5)",
            f"{gate}(mask={y} < 0.5, other={y}, x={x})",
            f"{gate}({x}, other={gate}({y}, scale=2.0))",
        )
    )


def containers(w: Writer) -> list[str]:
    """A dict, a list or a tuple of tensors from one module to the next."""
    x, width = _deep(w)
    kind = w.rng.choice(("dict", "list", "tuple"))
    halves, joined = w.held("m", f"pieces.Halves({width}, '{kind}')"), w.held("m", f"pieces.Joined({width})")
    lines = [f"both = {halves}({x})"]
    changes = {
        "dict": ('both["first"] = both["first"] * 0.5', 'both = {**both, "other": None}'),
        "list": ("both[0] = both[0] * 0.5", "both = [*both]"),
        "tuple": ("both = both._replace(second=both.first)", "both = both[::-1]"),
    }
    if w.rng.random() < 0.5:
        lines.append(w.rng.choice(changes[kind]))
    lines.append(f"{w.name()} = {joined}(both)")
    if w.rng.random() < 0.4:
        lines.append(f"{w.name()} = {joined}({halves}({_alike(w, x)}))")
    return lines


def elsewhere(w: Writer) -> str:
    """A module that is called several times, with its tensors in other places."""
    x, width = _deep(w)
    y, blend = _alike(w, x), w.held("m", f"pieces.Blend({width})")
    return w.rng.choice(
        (
            f"{blend}({x}) + {blend}(None, {y})",
            f"{blend}({blend}({x}, {y}))",
            f"{blend}(None, y=torch.relu({blend}({y})))",
            f"{blend}({x}, {y}) * {blend}({y}, {x})",
            f"{blend}({x}, {blend}(None, {blend}({y})))",
        )
    )


def pieced(w: Writer) -> str:
    """Larger modules that people write."""
    x, width = _deep(w)
    cell = w.rng.choice(("RNN", "GRU", "LSTM"))
    made = w.rng.choice(
        (
            f"pieces.Residual({width}, {w.rng.randrange(3)})",
            f"pieces.Recurrent({width}, '{cell}')",
            f"pieces.Mixture({width}, {w.rng.choice((2, 3, 4))})",
            f"pieces.Bank({width})",
        )
    )
    more = w.rng.choice((', "a"', ', "a", "a"', "", "")) if "Bank" in made else ""
    return f"{w.held('m', made)}({x}{more})"


def experts(w: Writer) -> str:
    """A mixture whose rows the values choose."""
    x, width = _deep(w)
    return f"{w.held('m', f'pieces.Experts({width})')}({x})"


def around(w: Writer) -> str:
    """Hooks, parametrizations, recomputation, other parameters."""
    x, width = _deep(w)
    wide = w.rng.choice((width, width, 4, 6, 8))
    linear = f"nn.Linear({width}, {wide}, bias={w.rng.random() < 0.6})"
    square, inner = (
        f"nn.Linear({width}, {width})",
        f"nn.Linear({width}, 12), nn.GELU(), nn.Linear(12, {width})",
    )
    made, call = w.rng.choice(
        (
            (f"pieces.hooked({linear}, 'output')", "{0}({1})"),
            (f"pieces.hooked({linear}, 'input')", "{0}({1})"),
            (f"pieces.hooked(nn.Sequential({inner}), 'both')", "{0}({1})"),
            (f"pieces.hooked(nn.Sequential({inner}), 'named')", "{0}({1})"),
            (f"pieces.normed({linear}, 'weight_norm')", "{0}({1})"),
            (f"pieces.normed({linear}, 'spectral_norm')", "{0}({1})"),
            (f"pieces.normed({square}, 'orthogonal')", "{0}({1})"),
            (f"pieces.symmetric({square})", "{0}({1})"),
            (f"nn.Sequential({linear}, nn.Tanh())", "pieces.again({0}, {1})"),
            (f"pieces.Gate({width})", "pieces.again({0}, {1}, None)"),
            (linear, "pieces.called({0}, {1}, 0.5)"),
            (f"nn.Sequential({inner})", "pieces.called({0}, {1}, torch.tensor(0.5))"),
        )
    )
    return call.format(w.held("m", made), x)


def outside(w: Writer) -> str:
    """A child's parameters in the hands of its parent."""
    x, width = _deep(w)
    names = [n for n, m in w.module.named_children() if n.startswith("l") and hasattr(m, "weight")]
    layer = f"self.{w.rng.choice(names)}"
    out, _ = w.module.get_submodule(layer[5:]).weight.shape  # type: ignore[union-attr,misc]
    forms = [
        f"functional.linear({x}, {layer}.weight * 0.5)",
        f"functional.linear({x}, {layer}.weight, {layer}.bias)",
        f"{x} @ ({layer}.weight.T / {layer}.weight.norm())",
        f"{layer}({x}) / {layer}.weight.norm(dim=1)",
        f"functional.linear(functional.normalize({x} + 0.1, dim=-1), functional.normalize({layer}.weight, dim=-1))",
        f"{x} @ {layer}.weight.detach().T + {layer}({x})",
        f"functional.linear({x}, {layer}.weight.softmax(0))",
    ]
    if width == out:
        forms = [f"{x} @ {layer}.weight", f"({x} - {layer}.bias) @ {layer}.weight", f"{x} + {layer}.bias"]
    return w.rng.choice(forms)


def gradient(w: Writer) -> str | list[str]:
    """Gradients of the program's own: a Function, a gradient in forward, what no gradient goes through."""
    x, width = _deep(w)
    layer = w.held("l", f"nn.Linear({width}, {w.rng.choice((width, 6))})")
    y, z = w.name(), w.name()
    forms: list[str | list[str]] = [
        f"pieces.scaled({x}, 0.5)",
        f"pieces.scaled({layer}({x}), 2.0)",
        f"pieces.slope({layer}, {x})",
        f"{x} + (torch.round({x} * 4) / 4 - {x}).detach()",
        ["with torch.no_grad():", f"    {y} = {layer}({x})", f"{z} = {layer}({x}) - 0.5 * {y}"],
        f"{layer}({x}.detach())",
        f"{layer}({x}) * torch.softmax({layer}({x}), -1).detach()",
    ]
    return w.rng.choice(forms)
