# ruff: noqa: E501  (templates of one line)
"""Statements with integers and truth values in between."""

from .writer import WORDS, Writer


def counted(w: Writer) -> str | list[str]:
    """From floats to integers or truth values, and back."""
    x, at = w.last(), w.dim(w.last())
    size, n = w.shape(x)[at], w.name()
    table = w.held("e", f"nn.Embedding({WORDS}, {w.rng.choice((4, 6))})")
    wide = w.held("e", f"nn.Embedding({w.shape(x)[-1]}, {w.shape(x)[-1]})")
    edges = w.buffer("torch.linspace(-1, 1, 5)")
    codes = w.parameter(5, w.shape(x)[-1])
    return w.rng.choice(
        (
            f"{x} * (({x} > 0) & ({x} < 1)).to({x}.dtype)",
            f"{x} * ({x} > 0).cumsum({at})",
            f"{x} * ({x} > 0).any({at}, keepdim=True)",
            f"{x} + ({x}.abs() * 3).long().remainder(4) * 0.1",
            f"{x} + torch.bucketize({x}.detach(), {edges}) * 0.1",
            f"{table}(torch.bucketize({x}.detach().sum(-1), {edges}))",
            f"{x} + {wide}({x}.argmax(-1))",
            f"{x} * functional.one_hot({x}.argmax({at}), {size}).movedim(-1, {at})",
            f"{x}.where(({x} > 0).logical_not() | ({x} < -1), 0.5 * {x})",
            f"{x} + ({x} > 0).int().argmax({at}, keepdim=True) * 0.1",
            f"{x} * ({x}.argsort({at}).argsort({at}) < 2)",
            f"{x} * torch.arange({x}.shape[-1]).eq({x}.argmax(-1, keepdim=True))",
            f"{x} + ({x}.floor() - {x}).detach()",
            f"{x} + ({x} > {x}.mean({at}, keepdim=True)).double().mean({at}, keepdim=True)",
            [f"{n} = torch.cdist({x}, {codes}).argmin(-1)", f"{w.name()} = {x} + ({codes}[{n}] - {x}).detach() + 0.1 * {codes}[{n}]"],
            [f"{n} = ({x} > 0).long().sum(-1)", f"{w.name()} = {x} * {n}.unsqueeze(-1)"],
            [f"{n} = {x} > 0", f"{w.name()} = torch.where({n}, {x}, torch.zeros_like({x})).sum({at}, keepdim=True) / {n}.sum({at}, keepdim=True).clamp(min=1)"],
            [f"{n} = {x} > 0", f"{w.name()} = torch.where({n}.all({at}, keepdim=True) ^ {n}, {x}, -{x})"],
        )
    )  # fmt: skip


def words(w: Writer) -> str | list[str]:
    """Token ids: masks of padding, positions that skip it, shifted ones, tables that are tied."""
    ids = w.rng.choice(w.integers())
    if len(w.shape(ids)) != 2:
        raise ValueError
    width, n = w.rng.choice((4, 6, 8)), w.name()
    size = w.shape(ids)[1]
    table = w.held(
        "e", f"nn.Embedding({WORDS}, {width}{w.rng.choice(('', ', padding_idx=0', ', padding_idx=-1'))})"
    )
    places = w.held("e", f"nn.Embedding({size + 1}, {width})")
    o = w.name()
    forms: list[str | list[str]] = [
        [f"{n} = {table}({ids})", f"{o} = {n} * ({ids} != 0).unsqueeze(-1)"],
        [f"{n} = ({ids} != 0).long().cumsum(1) * ({ids} != 0)", f"{o} = {table}({ids}) + {places}({n})"],
        [f"{n} = {table}({ids}.roll(1, 1))", f"{o} = {n}"],
        [f"{n} = {table}(functional.pad({ids}, (1, 0), value=3)[:, :-1])", f"{o} = {n} + {table}({ids})"],
        [f"{n} = {table}({ids})", f"{o} = ({n} * ({ids} > 2)[..., None]).sum(1) / ({ids} > 2).sum(1, keepdim=True).clamp(min=1)"],
        [f"{n} = functional.one_hot({ids}, {WORDS}).double()", f"{o} = {n} @ {table}.weight"],
        [f"{n} = {table}({ids}) + {places}.weight[1:{ids}.shape[1] + 1]", f"{o} = torch.tanh({n}) @ {table}.weight.T"],
        [f"{n} = {table}({ids}) + {places}(torch.arange({ids}.size(1)).expand_as({ids}))", f"{o} = functional.linear({n}, {table}.weight)"],
        [f"{n} = {table}({ids} // 2)", f"{o} = torch.cat([{n}, {table}({ids} % 5)], -1)"],
        [f"{n} = {table}({ids})", f"{o} = {n}[torch.arange({ids}.shape[0]), ({ids} != 0).sum(1) - 1]"],
        [f"{n} = {table}(torch.where({ids} == 1, 2, {ids}))", f"{o} = {n}.masked_fill(({ids} == 1)[..., None], 0.1)"],
        [f"{n} = {table}.weight.index_select(0, {ids}.flatten()).view(*{ids}.shape, -1)", f"{o} = {n}"],
        [f"{n} = functional.embedding_bag({ids}, {table}.weight, mode='sum')", f"{o} = {n}"],
    ]  # fmt: skip
    return w.rng.choice(forms)
