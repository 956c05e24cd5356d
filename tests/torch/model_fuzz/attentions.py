# ruff: noqa: E501  (templates of one line)
"""Statements of attention as models in the wild have it, and what lies around it."""

from .writer import Writer


def _sequence(w: Writer) -> tuple[str, int, int]:
    """A value [rows, positions, width]."""
    x = [n for n in w.floats() if len(w.shape(n)) == 3][-1]
    return (x, *w.shape(x)[1:])  # type: ignore[return-value]


def grouped(w: Writer) -> list[str]:
    """Grouped heads by expand or repeat_interleave, rotary embeddings, norms of queries and keys, a bias."""
    x, positions, width = _sequence(w)
    groups, times, size = w.rng.choice((1, 2, 2, 3, 4)), w.rng.choice((1, 2, 2, 3)), w.rng.choice((2, 4))
    heads = groups * times
    q, k, v = w.name(), w.name(), w.name()
    bias = w.rng.random() < 0.4
    layers = [w.held("l", f"nn.Linear({width}, {n * size}, bias={bias})") for n in (heads, groups, groups)]
    lines = [
        f"{name} = {layer}({x}).view({x}.shape[0], {w.size(x, 1)}, {n}, {size}).transpose(1, 2)"
        for name, layer, n in zip((q, k, v), layers, (heads, groups, groups), strict=True)
    ]
    if w.rng.random() < 0.3:
        norm = w.held("m", f"nn.RMSNorm({size})")
        lines += [f"{name} = {norm}({name})" for name in (q, k)]
    if w.rng.random() < 0.5:
        turned = w.rng.choice(
            ("rotated({}, halves=True)", "rotated({}, halves=False)", "rotated_complex({})")
        )
        lines += [f"{name} = pieces.{turned.format(name)}" for name in (q, k)]
    if times > 1:
        wide = w.rng.choice(
            (
                "{0}.repeat_interleave({1}, dim=1)",
                "{0}[:, :, None].expand({2}.shape[0], {3}, {1}, {4}, {5}).reshape({2}.shape[0], {6}, {4}, {5})",
                "{0}.unsqueeze(2).expand(-1, -1, {1}, -1, -1).flatten(1, 2)",
            )
        )
        lines += [
            f"{name} = {wide.format(name, times, x, groups, positions, size, heads)}" for name in (k, v)
        ]
    s = w.name()
    slopes = w.buffer(f"2.0 ** -torch.arange(1, {heads} + 1).double()[:, None, None]")
    far = f"(torch.arange({positions})[:, None] - torch.arange({positions}))"
    table = w.parameter(2 * positions, heads)
    lines += [
        f"{s} = {q} @ {k}.transpose(-1, -2) / {size} ** 0.5",
        *w.rng.choice(
            (
                [],
                [f"{s} = {s} - {slopes} * {far}.abs()"],
                [f"{s} = {s}.masked_fill({far}.abs() > 1, float('-inf'))"],
                [f"{s} = {s}.masked_fill(({far} < 0) | ({far} > 2), -1e4)"],
                [f"{s} = {s} + {table}[{far} + {positions}].permute(2, 0, 1)"],
                [f"{s} = torch.tanh({s} / 5) * 5"],
                [f"{s} = {w.held('l', f'nn.Linear({heads}, {heads})')}({s}.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"],
            )
        ),
        f"{s} = {w.rng.choice((f'{s}.softmax(-1)', f'functional.softmax({s}, dim=-1)', f'{s}.softmax(-1) * torch.sigmoid({s})'))}",
        f"{w.name()} = {w.held('l', f'nn.Linear({heads * size}, {width})')}(({s} @ {v}).transpose(1, 2).reshape({x}.shape[0], -1, {heads * size}))",
    ]  # fmt: skip
    return lines


def crossed(w: Writer) -> list[str]:
    """Queries of one value, keys and values of another one; or queries that are parameters."""
    x, _, width = _sequence(w)
    y = w.rng.choice([n for n in w.floats() if len(w.shape(n)) == 3 and w.shape(n)[0] == w.shape(x)[0]])
    heads, size = w.rng.choice((1, 2, 3, 4)), w.rng.choice((2, 4))
    q, kv = (
        w.held("l", f"nn.Linear({n}, {m})")
        for n, m in ((width, heads * size), (w.shape(y)[-1], 2 * heads * size))
    )
    o, k, v, r = w.held("l", f"nn.Linear({heads * size}, {width})"), w.name(), w.name(), w.name()
    latent = w.parameter(3, width)
    source = w.rng.choice((x, x, f"{latent}.expand({x}.shape[0], 3, {width})"))
    lines = [
        f"{k}, {v} = {kv}({y}).chunk(2, -1)",
        f"{k}, {v} = (each.unflatten(-1, ({heads}, {size})).transpose(1, 2) for each in ({k}, {v}))",
        f"{r} = {q}({source}).unflatten(-1, ({heads}, {size})).transpose(1, 2)",
    ]
    made = w.rng.choice(
        (
            f"functional.scaled_dot_product_attention({r}, {k}, {v})",
            f"torch.einsum('bhij,bhjd,->bhid', ({r} @ {k}.mT).softmax(-1), {v}, torch.tensor(0.5))",
            f"torch.bmm(torch.bmm({r}.flatten(0, 1), {k}.flatten(0, 1).mT).softmax(-1), {v}.flatten(0, 1)).unflatten(0, (-1, {heads}))",
            f"torch.baddbmm({r}.flatten(0, 1), ({r}.flatten(0, 1) @ {k}.flatten(0, 1).mT).softmax(-1), {v}.flatten(0, 1)).view_as({r})",
        )
    )
    return [*lines, f"{r} = {made}", f"{w.name()} = {o}({r}.transpose(1, 2).flatten(2))"]  # fmt: skip


def gated(w: Writer) -> list[str]:
    """Gated units, by chunk and by two layers; over features or over positions."""
    x, n, h = w.last(), w.name(), w.name()
    width, wide = w.shape(x)[-1], w.rng.choice((4, 6, 8))
    both = w.held("l", f"nn.Linear({width}, {2 * wide}, bias={w.rng.random() < 0.5})")
    down = w.held("l", f"nn.Linear({wide}, {width}, bias={w.rng.random() < 0.5})")
    gate = w.held("l", f"nn.Linear({width}, {wide})")
    mixed = w.held("l", f"nn.Linear({w.shape(x)[-2]}, {w.shape(x)[-2]})")
    return w.rng.choice(
        (
            [f"{n}, {h} = {both}({x}).chunk(2, dim=-1)", f"{w.name()} = {x} + {down}(functional.silu({n}) * {h})"],
            [f"{n} = {both}({x})", f"{w.name()} = {down}({n}[..., :{wide}] * functional.gelu({n}[..., {wide}:]))"],
            [f"{n} = functional.glu({both}({x}), -1)", f"{w.name()} = {down}({n})"],
            [f"{n} = {both}({x}).unflatten(-1, ({wide}, 2))", f"{w.name()} = {down}({n}[..., 0] * {n}[..., 1].sigmoid())"],
            [f"{n} = {both}({x}).unflatten(-1, (2, {wide}))", f"{w.name()} = {down}({n}.select(-2, 0) * {n}.select(-2, 1).sigmoid()) + {x}"],
            [f"{n} = {gate}({x})", f"{h} = {both}({x})[..., ::2]", f"{w.name()} = {down}(torch.sigmoid({n}) * {h})"],
            [f"{n}, {h} = {both}({x}).chunk(2, -1)", f"{h} = {mixed}({h}.transpose(-1, -2)).transpose(-1, -2)", f"{w.name()} = {down}({n} * {h})"],
            [f"{n} = {gate}({x})", f"{h} = {n}.abs().sum(-1, keepdim=True)", f"{w.name()} = {down}({n} / (1 + {h})) + {x}"],
        )
    )  # fmt: skip


def scanned(w: Writer) -> list[str]:
    """Positions one after the other, or added up: linear attention, a state space, shifted mixes, a decay."""
    x, positions, width = _sequence(w)
    n, h, s = w.name(), w.name(), w.name()
    layer, other = (w.held("l", f"nn.Linear({width}, {width})") for _ in range(2))
    p = w.parameter(width)
    return w.rng.choice(
        (
            [f"{n} = functional.elu({layer}({x})) + 1", f"{w.name()} = ({n} * {other}({x})).cumsum(1) / {n}.cumsum(1)"],
            [f"{s} = torch.zeros({x}.shape[0], {width})", f"{n} = []", f"for place in range({positions}):", f"    {s} = {s} * torch.sigmoid({p}) + {x}[:, place]", f"    {n}.append({layer}({s}))", f"{n} = torch.stack({n}, dim=1)"],
            [f"{n} = functional.pad({x}, (0, 0, 1, -1))", f"{w.name()} = {layer}({x} * {p} + {n} * (1 - {p}))"],
            [f"{n} = {layer}({x})[:, :, :, None] * {other}({x})[:, :, None, :]", f"{w.name()} = ({n}.cumsum(1) @ {x}.unsqueeze(-1)).squeeze(-1) * 0.1"],
            [f"{n} = {layer}({x}).unflatten(1, (2, -1))", f"{h} = ({n} @ {n}.mT).softmax(-1) @ {n}", f"{w.name()} = {other}({h}.flatten(1, 2))"],
            [f"{n} = torch.roll({layer}({x}), shifts=-1, dims=1)", f"{w.name()} = {other}({n}) + {x}"],
            [f"{n} = torch.einsum('bti,ij,btj->bt', {x}, {w.parameter(width, width)}, {layer}({x}))", f"{w.name()} = {x} * {n}.softmax(-1)[..., None]"],
            [f"{n} = torch.einsum('btd,bsd,bse->bte', {layer}({x}), {other}({x}), {x}) * 0.1", f"{w.name()} = {n} + {x}"],
            [f"{n} = {layer}({x}[:, 0]).unsqueeze(1)", f"{w.name()} = torch.cat([{n}, {x}[:, 1:]], 1)"],
            [f"{n} = torch.cat([{p}.expand({x}.shape[0], 1, {width}), {x}], 1)", f"{w.name()} = {layer}({n})[:, 1:]"],
            [f"{n} = torch.bmm({p}.expand({x}.shape[0], 1, {width}), {layer}({x}).mT)", f"{w.name()} = {n}.softmax(-1).mT * {x}"],
        )
    )  # fmt: skip
