# ruff: noqa: E501  (templates of one line)
"""Operators that people write. Each function writes one statement of a random program: see writer.py.

It returns an expression, or lines. The files beside this one have more of them, and tables.py their weights.
"""

from .writer import WORDS, Writer

SIZES = (4, 6, 8, 12, 12, 24, 8, 6, 9, 5)
POINTWISE = (
    "torch.tanh({})", "torch.relu({})", "functional.gelu({})", "torch.sigmoid({})", "functional.silu({})",
    "{} * 0.5 + 1", "{}.square() * 0.3", "-{}", "{}.abs()", "{}.clamp(-1.0, 1.5)",
    "functional.leaky_relu({}, 0.1)", "functional.elu({})", "functional.softplus({})", "{0} / (1 + {0}.abs())",
    "functional.hardtanh({})", "torch.sin({})", "{}.contiguous()", "{}.clone()", "functional.dropout({}, 0.0)",
    "torch.erf({})", "{0}.where({0} > 0, 0.1 * {0})", "functional.mish({})", "{0} * {0}.detach()",
    "torch.nn.Identity()({})", "{}.exp().log1p()", "({} + 0.1).sign() * 0.5", "1 - {}", "{}.pow(2).add(1e-6).rsqrt()",
    "functional.relu6({})", "functional.logsigmoid({})", "torch.atan2({0}, 1 + {0}.square())",
    "functional.hardswish({})", "{}.to(torch.float32).to(torch.float64).mul(0.0) + {}", "torch.nan_to_num({})",
)  # fmt: skip


def up(w: Writer) -> str:
    x, wide = w.last(), w.rng.choice(SIZES)
    layer = w.held("l", f"nn.Linear({w.shape(x)[-1]}, {wide}, bias={w.rng.random() < 0.7})")
    return f"{layer}({x})"


def down(w: Writer) -> str:
    """A layer over all features, however they lie."""
    x = w.last()
    shape = w.shape(x)
    joined = w.rng.choice((1, 1, 2, len(shape) - 1)) if len(shape) > 2 else 1
    joined = max(1, min(joined, len(shape) - 1))
    size = 1
    for each in shape[len(shape) - joined :]:
        size *= each
    layer = w.held("l", f"nn.Linear({size}, {w.rng.choice((4, 6, 8, 5))}, bias={w.rng.random() < 0.7})")
    return f"{layer}({x}{f'.flatten(-{joined})' if joined > 1 else ''})"


def mixer(w: Writer) -> str:
    """A layer over another dim than the last one."""
    x, at = w.last(), w.dim(w.last())
    layer = w.held("l", f"nn.Linear({w.shape(x)[at]}, {w.rng.choice(SIZES)})")
    return f"{layer}({x}.transpose({at}, -1))" + (f".transpose({at}, -1)" if w.rng.random() < 0.5 else "")


def again(w: Writer) -> str:
    """A layer that is called already, once more; its weight alone; or turned round."""
    x, names = w.last(), [n for n, m in w.module.named_children() if n.startswith("l")]
    layer = f"self.{w.rng.choice(names)}"
    return w.rng.choice(
        (f"{layer}({x})", f"{layer}({x})", f"{x} @ {layer}.weight", f"functional.linear({x}, {layer}.weight)")
    )


def tied(w: Writer) -> list[str] | str:
    names = [n for n, m in w.module.named_children() if n.startswith("l")]
    old, x = w.rng.choice(names), w.last()
    out, into = w.module.get_submodule(old).weight.shape  # type: ignore[union-attr,misc]
    new = w.held("l", f"nn.Linear({into}, {out}, bias={w.rng.random() < 0.5})")
    w._init.append(f"{new}.weight = self.{old}.weight")
    return f"{new}({x})"


def pointwise(w: Writer) -> str:
    return w.rng.choice(POINTWISE).replace("{0}", "{}").replace("{}", w.last())


def with_parameter(w: Writer) -> str:
    """Broadcasting with a parameter of any shape."""
    x = w.last()
    shape = [size if w.rng.random() < 0.6 else 1 for size in w.shape(x)]
    shape = shape[w.rng.randrange(len(shape)) :] if w.rng.random() < 0.8 else [1] * (len(shape) > 1)
    if w.rows and len(shape) == len(w.shape(x)):
        shape[0] = 1
    p = w.parameter(*(shape or [1]))
    forms = ("{} + {}", "{} * {}", "{1} - {0}", "torch.maximum({0}, {1})", "torch.where({1} > 0, {0}, {1})")
    forms += (
        "{0} * {1}.exp()",
        "torch.lerp({0}, {1}, 0.3)",
        "torch.addcmul({1}, {0}, {0})",
        "{0} * (1 + {1})",
    )
    return w.rng.choice(forms).replace("{}", "{0}", 1).replace("{}", "{1}", 1).format(x, p)


def prelu(w: Writer) -> str:
    x = w.last()
    return (
        f"{w.held('m', f'nn.PReLU({w.shape(x)[1]})')}({x})"
        if w.rng.random() < 0.6
        else f"{w.held('m', 'nn.PReLU()')}({x})"
    )


def with_value(w: Writer) -> str:
    """Two values, broadcast: a residual, or a gate."""
    x = w.last()
    shape = w.shape(x)
    like = [
        n
        for n in w.floats()
        if n != x and all(a in (b, 1) for a, b in zip(w.shape(n)[::-1], shape[::-1], strict=False))
    ]
    y = w.rng.choice(like)
    forms = (
        "{0} + {1}",
        "{0} * {1}",
        "{0} * torch.sigmoid({1})",
        "{0} - {1}",
        "torch.where({1} > 0, {0}, 0.5 * {0})",
    )
    forms += (
        "torch.maximum({0}, {1})",
        "{0}.masked_fill({1} < 0, 0.1)",
        "({0} > {1}) * {0}",
        "{0} / (1 + {1}.square())",
    )
    return w.rng.choice(forms).format(x, y)


# ---- other shapes of the same ----


def heads(w: Writer) -> str:
    """The last dim in two."""
    x = w.last()
    size = w.shape(x)[-1]
    at = w.rng.choice([n for n in range(1, size + 1) if size % n == 0 and (n > 1 or w.rng.random() < 0.2)])
    forms = [
        f"{x}.unflatten(-1, ({at}, {size // at}))",
        f"{x}.unflatten(-1, ({at}, -1))",
        f"{x}.unflatten(-1, (-1, {size // at}))",
    ]
    front = ", ".join(w.size(x, place) for place in range(len(w.shape(x)) - 1))
    forms += [
        f"{x}.{how}({front}, {at}, {w.rng.choice(['-1', str(size // at)])})" for how in ("view", "reshape")
    ]
    forms.append(f"{x}.reshape(*{x}.shape[:-1], {at}, -1)")
    made = w.rng.choice(forms)
    return made + w.rng.choice(["", "", ".transpose(-2, -3)", ".transpose(-1, -2)"])


def flatten(w: Writer) -> str:
    x = w.last()
    count = len(w.shape(x))
    first = w.rng.randrange(0 if not w.rows else 1, count - 1)
    last = w.rng.randrange(first + 1, count)
    sizes = [w.size(x, place) for place in range(count)]
    whole = ", ".join([*sizes[:first], "-1", *sizes[last + 1 :]])
    return w.rng.choice(
        (f"{x}.flatten({first}, {last})", f"{x}.reshape({whole})", f"torch.flatten({x}, {first}, {last})")
    )


def view(w: Writer) -> str:
    """Any sizes of as many elements."""
    x = w.last()
    shape = w.shape(x)
    left, sizes = 1, list[int]()
    for size in shape[1:]:
        left *= size
    while left > 1 and len(sizes) < 3:
        sizes.append(w.rng.choice([n for n in range(1, left + 1) if left % n == 0]))
        left //= sizes[-1]
    text = ", ".join(map(str, [*sizes, left]))
    return f"{x}.{w.rng.choice(('reshape', 'view'))}({w.size(x, 0)}, {text})"


def permute(w: Writer) -> str:
    x = w.last()
    order = list(range(len(w.shape(x))))
    moving = order[1:] if w.rows else order
    w.rng.shuffle(moving)
    order = [0, *moving] if w.rows else moving
    a, b = w.dim(x), w.dim(x)
    forms = (
        f"{x}.permute({', '.join(map(str, order))})",
        f"{x}.transpose({a}, {b})",
        f"torch.movedim({x}, {a}, {b})",
        f"{x}.swapaxes({a}, {b})",
    )
    return w.rng.choice((*forms, f"{x}.mT"))


def squeeze(w: Writer) -> str:
    x, at = w.last(), w.dim(w.last())
    count = w.rng.choice((2, 3, w.shape(x)[at]))
    shape = ["-1"] * len(w.shape(x))
    shape[at] = str(count)
    forms = (
        f"{x}.unsqueeze({at})",
        f"{x}.squeeze()",
        f"{x}.squeeze({at})",
        f"{x}[:, None]",
        f"{x}[..., None]",
        f"{x}.expand({', '.join(shape)})",
    )
    more = (
        f"{x}.unsqueeze({at}).expand_as({x}.unsqueeze({at}))",
        f"{x}.repeat_interleave(2, {at})",
        f"{x}.expand(2, {', '.join(['-1'] * len(shape))})",
    )
    times = ["1"] * len(shape)
    times[at] = "2"
    return w.rng.choice((*forms, *more, f"{x}.repeat({', '.join(times)})", f"{x}.tile(2)"))


def cut(w: Writer) -> list[str]:
    """chunk, split, unbind, slices; and the parts together again."""
    x, at = w.last(), w.dim(w.last())
    size, kept = w.shape(x)[at], w.rng.random()
    parts = 2 if size % 2 == 0 else 3
    a, b = w.name(), w.name()
    if kept < 0.3:
        first = [
            f"{a}, {b} = {x}.{how}, {at})"
            for how in ("chunk(2", f"split({(size + 1) // 2}", "tensor_split(2")
        ]
        lines = [w.rng.choice(first)]
    elif kept < 0.45:
        middle = w.rng.randrange(1, size)
        lines = [f"{a}, {b} = {x}.split([{middle}, {size - middle}], {at})"]
    elif kept < 0.55 and size == parts:
        others = "" if parts == 2 else ", _"
        lines = [f"{a}, {b}{others} = {x}.unbind({at})"]
    elif kept < 0.65:
        before = ":, " * at if at >= 0 else "..., "
        after = "" if at >= 0 else ", :" * (-1 - at)
        middle = w.rng.randrange(1, size)
        lines = [f"{a}, {b} = {x}[{before}:{middle}{after}], {x}[{before}{middle}:{after}]"]
    elif kept < 0.75:
        a3 = w.name()
        lines = [f"{a}, {b}, {a3} = {x}.chunk(3, {at})"]
        return [
            *lines,
            f"{w.name()} = {w.rng.choice((f'{a} * {b} + {a3}', f'torch.cat([{a3}, {a}, {b}], {at})', f'torch.tanh({b}) * {a3}'))}",
        ]
    else:
        lines = [
            f"{a}, {b} = {x}.narrow({at}, 0, {max(1, size // 2)}), {x}.narrow({at}, {size // 2}, {size - size // 2})"
        ]
    forms = (
        f"{a} * torch.sigmoid({b})",
        f"torch.cat([-{b}, {a}], {at})",
        f"torch.stack([{a}, {b}], {at})",
        f"{a} + {b}",
        f"torch.cat([{a}, {b}, {a}], {at})",
    )
    return [*lines, f"{w.name()} = {w.rng.choice(forms)}"]


def pick(w: Writer) -> str:
    """A part of one dim."""
    x, at = w.last(), w.dim(w.last())
    size = w.shape(x)[at]
    front, i = ":, " * (at % len(w.shape(x))), w.rng.randrange(size)
    places = w.buffer(f"torch.tensor({[w.rng.randrange(size) for _ in range(w.rng.choice((size, 2, 4)))]})")
    forms = (
        f"{x}.select({at}, {i})",
        f"{x}[{front}{i}]",
        f"{x}[{front}{i}:]",
        f"{x}[{front}::2]",
        f"{x}[{front}-{max(i, 1)}:]",
        f"{x}.index_select({at}, {places})",
    )
    return w.rng.choice(
        (
            *forms,
            f"{x}[{front}{places}]",
            f"{x}.roll({i}, {at})",
            f"{x}.flip({at})",
            f"{x}[{front}[0, -1]]",
            f"{x}.take_along_dim({x}.argsort({at}), {at})",
        )
    )


def pad(w: Writer) -> str:
    x, at = w.last(), w.dim(w.last())
    pads = [0] * (2 * (len(w.shape(x)) - at % len(w.shape(x))))
    pads[-2:] = [w.rng.choice((0, 1, 2)), w.rng.choice((1, 2, -1))]
    return w.rng.choice(
        (
            f"functional.pad({x}, {tuple(pads)})",
            f"functional.pad({x}, {tuple(pads)}, value=0.5)",
            f"torch.cat([{x}, torch.zeros_like({x})], {at})",
            f"torch.cat([{x}.new_ones({w.size(x, 0)}, *{x}.shape[1:]), {x}], {at})",
        )
    )


def join(w: Writer) -> str:
    """Two values side by side."""
    x, at = w.last(), w.dim(w.last())
    shape = w.shape(x)
    at %= len(shape)
    like = [
        n
        for n in w.floats()
        if len(w.shape(n)) == len(shape)
        and all(a == b for d, (a, b) in enumerate(zip(w.shape(n), shape, strict=True)) if d != at)
    ]
    y = w.rng.choice(like)
    return w.rng.choice(
        (f"torch.cat([{x}, {y}], {at})", f"torch.stack([{x}, {y}], {at})", f"torch.cat(({y}, {x}), dim={at})")
    )


# ---- over a dim ----


def reduce(w: Writer) -> str:
    x, at = w.last(), w.dim(w.last())
    keeps = w.rng.random() < 0.6
    name = w.rng.choice(
        (
            "sum",
            "mean",
            "amax",
            "amin",
            "logsumexp",
            "var",
            "std",
            "prod",
            "norm",
            "argmax",
            "max",
            "min",
            "median",
            "any",
            "all",
            "count",
        )
    )
    dims = str(at)
    if w.rng.random() < 0.25 and name in ("sum", "mean", "amax", "amin", "logsumexp", "var"):
        dims = f"({at}, -1)"
    made = f"{x}.{name}({'dim=' if w.rng.random() < 0.5 else ''}{dims}, keepdim={keeps})"
    if name in ("max", "min", "median"):
        made = f"{x}.{name}({at}, keepdim={keeps})" + w.rng.choice(
            ("[0]", ".values", ".indices.to(torch.float64) * 0.1")
        )
    if name in ("var", "std"):
        made = f"({x} * 1.0).{name}({dims}, keepdim={keeps})"
    if name == "norm":
        made = f"torch.linalg.vector_norm({x} + 0.1, dim={at}, keepdim={keeps})"
    if name == "argmax":
        made += ".to(torch.float64) * 0.1"
    if name in ("any", "all"):
        made = f"({x} > 0).{name}({at}, keepdim={keeps}).to(torch.float64)"
    if name == "count":
        made = f"({x} > 0).sum({at}, keepdim={keeps}) * 0.1"
    return w.rng.choice((made, f"{x} - {made}", f"{x} * {made}")) if keeps else made


def along(w: Writer) -> str:
    """What keeps the shape, and goes along a dim."""
    x, at = w.last(), w.dim(w.last())
    size = w.shape(x)[at]
    forms = [
        f"{x}.softmax({at})",
        f"functional.log_softmax({x}, dim={at})",
        f"{x}.cumsum({at})",
        f"functional.normalize({x} + 0.1, dim={at})",
        f"{x}.sort({at})[0]",
        f"{x}.sort({at}, descending=True).values",
        f"{x}.topk({min(2, size)}, {at})[0]",
        f"{x}.topk({size}, dim={at}).indices * 0.1",
        f"functional.one_hot({x}.argmax({at}), {size}) * 0.5",
        f"{x}.cumprod({at})",
        f"{x}.logcumsumexp({at})",
        f"{x}.gather({at}, {x}.argsort({at}))",
        f"{x}.cummax({at})[0]",
        f"torch.gather({x}, {at}, ({x} > 0).long())",
        f"functional.glu({x}, {at})",
        f"functional.softmin({x}, dim={at})",
        f"{x}.diff(dim={at})",
        f"{x}.scatter({at}, {x}.argsort({at}), {x} * 2)",
    ]
    return w.rng.choice(forms)


def norm(w: Writer) -> str:
    x = w.last()
    shape = w.shape(x)
    last, channels = shape[-1], shape[1]
    count = w.rng.choice([n for n in range(1, channels + 1) if channels % n == 0])
    affine = w.rng.random() < 0.6
    made = w.rng.choice(
        (
            f"nn.LayerNorm({last}, elementwise_affine={affine})",
            f"nn.RMSNorm({last})",
            f"nn.GroupNorm({count}, {channels}, affine={affine})",
            f"nn.LayerNorm({shape[-2:]})",
            f"nn.InstanceNorm1d({channels}, affine={affine})",
            f"nn.BatchNorm1d({channels}, affine={affine})",
            f"nn.RMSNorm({last}, eps=1e-5)",
            "nn.LocalResponseNorm(2)",
        )
    )
    if w.rng.random() < 0.2:
        groups = w.rng.choice([n for n in range(1, last + 1) if last % n == 0])
        layer = w.held("m", f"nn.GroupNorm({groups}, {last}, affine={affine})")
        return f"{layer}({x}.transpose(1, -1)).transpose(1, -1)"
    return f"{w.held('m', made)}({x})"


def mask(w: Writer) -> str:
    x = w.last()
    a, b = w.shape(x)[-2:]
    causal = w.buffer(f"torch.ones({a}, {b}).tril().bool()")
    last = w.buffer(f"torch.arange({b}) % 2 == 0")
    forms = (
        f"{x}.tril()",
        f"{x}.triu(1)",
        f"{x}.masked_fill({causal}, 0.0)",
        f"torch.where({causal}, {x}, -1.0)",
        f"{x} * {last}",
        f"{x}.masked_fill(~{last}, 0.5)",
        f"{x} * torch.arange({b}, dtype={x}.dtype)",
        f"{x} + torch.linspace(0, 1, {x}.shape[-1])",
        f"{x} * torch.ones({a}, {b})",
        f"{x} + torch.eye({a}, {b})",
        f"torch.where(torch.arange({x}.shape[-2])[:, None] > 1, {x}, 0.3)",
        f"{x} * torch.full_like({x}, 0.5)",
        f"{x} + {x}.new_zeros({x}.shape[-1])",
        f"{x} * torch.tensor(0.5)",
    )
    return w.rng.choice(forms)


# ---- products ----


def product(w: Writer) -> str:
    x, wide = w.last(), w.rng.choice(SIZES)
    shape = w.shape(x)
    names = "abcdefg"[: len(shape)]
    k = shape[-1]
    if w.rng.random() < 0.5:
        weight = w.parameter(k, wide)
        return w.rng.choice(
            (
                f"{x} @ {weight}",
                f"torch.einsum('{names},{names[-1]}z->{names[:-1]}z', {x}, {weight})",
                f"torch.tensordot({x}, {weight}, dims=1)",
                f"torch.matmul({x}, {weight})",
            )
        )
    if w.rng.random() < 0.5 and len(shape) > 2:
        weight = w.parameter(shape[-2], k, wide)
        return w.rng.choice(
            (
                f"torch.einsum('{names},{names[-2:]}z->{names[:-1]}z', {x}, {weight})",
                f"torch.einsum('{names},{names[-2:]}z->{names[:-2]}z', {x}, {weight})",
                f"({x}.unsqueeze(-2) @ {weight}).squeeze(-2)",
                f"torch.einsum('{names},{names[-2:]}z->{names[:-2]}z{names[-2]}', {x}, {weight})",
            )
        )
    return w.rng.choice(
        (
            f"{x} @ {x}.mT",
            f"{x}.mT @ {x}",
            f"{x}[..., :, None] * {x}[..., None, :]",
            f"torch.einsum('{names},{names}->{names[:-1]}', {x}, {x})",
            f"torch.einsum('{names},{names[:-1]}z->{names[:-2]}z{names[-1]}', {x}, {x})",
            f"torch.einsum('{names},{names}->{names[0]}{names[-1]}', {x}, {x})",
        )
    )


def between(w: Writer) -> str:
    """A product of two values."""
    x = w.last()
    shape = w.shape(x)
    y = w.rng.choice(
        [n for n in w.floats() if len(w.shape(n)) == len(shape) and w.shape(n)[:-2] == shape[:-2]]
    )
    forms = [
        (f"{x} @ {y}", shape[-1] == w.shape(y)[-2]),
        (f"{x} @ {y}.mT", shape[-1] == w.shape(y)[-1]),
        (f"{x}.mT @ {y}", shape[-2] == w.shape(y)[-2]),
    ]
    return w.rng.choice([form for form, fits in forms if fits])


def _attended(w: Writer, values: tuple[str, str, str], count: int, positions: int, *, grouped: bool) -> str:
    q, k, v = values
    more = w.rng.choice(
        [
            "",
            ", is_causal=True",
            f", attn_mask={w.buffer(f'torch.ones({positions}, {positions}).tril().bool()')}",
            f", attn_mask={w.parameter(count, positions, positions)}",
            f", attn_mask={w.parameter(positions, positions)}",
        ]
    )
    if grouped or w.rng.random() < 0.6:
        return f"functional.scaled_dot_product_attention({q}, {k}, {v}{more}{', enable_gqa=True' * grouped})"
    return w.rng.choice(
        (
            f"(({q} @ {k}.mT) * 0.5).softmax(-1) @ {v}",
            f"torch.einsum('bhij,bhjd->bhid', torch.einsum('bhid,bhjd->bhij', {q}, {k}).softmax(-1), {v})",
            f"torch.relu({q}) @ (torch.relu({k}).mT @ {v})",
        )
    )


def attention(w: Writer) -> list[str]:
    """Queries, keys and values by layers; heads, perhaps grouped; perhaps a mask."""
    x = [n for n in w.floats() if len(w.shape(n)) == 3][-1]
    _, positions, width = w.shape(x)
    count = w.rng.choice((2, 4, 6, 3, 1))
    size, groups = w.rng.choice((2, 4)), w.rng.choice([n for n in range(1, count + 1) if count % n == 0])
    groups = count if w.rng.random() < 0.5 else groups
    q, k, v, o = w.name(), w.name(), w.name(), w.name()
    bias = w.rng.random() < 0.5
    fused = w.rng.random() < 0.4
    names: list[str]
    if fused:
        layer = w.held("l", f"nn.Linear({width}, {(count + 2 * groups) * size}, bias={bias})")
        how = (
            f"split([{count * size}, {groups * size}, {groups * size}], -1)"
            if groups != count
            else "chunk(3, -1)"
        )
        lines = [f"{q}, {k}, {v} = {layer}({x}).{how}"]
        names = [q, k, v]
    else:
        layers = [
            w.held("l", f"nn.Linear({width}, {n * size}, bias={bias})") for n in (count, groups, groups)
        ]
        names, lines = [f"{layer}({x})" for layer in layers], []
    shaped = w.rng.choice(
        (
            ".unflatten(-1, ({}, {})).transpose(1, 2)",
            ".view({2}.shape[0], -1, {}, {}).transpose(1, 2)",
            ".view({2}.shape[0], {2}.shape[1], -1, {1}).transpose(1, 2)",
            ".unflatten(-1, (-1, {1})).transpose(1, 2)",
        )
    )
    for name, made, heads_ in zip((q, k, v), names, (count, groups, groups), strict=True):
        lines.append(
            f"{name} = {made}{shaped.replace('{}', '{0}', 1).replace('{}', '{1}', 1).format(heads_, size, x)}"
        )
    if groups != count and w.rng.random() < 0.5:
        lines += [f"{name} = {name}.repeat_interleave({count // groups}, 1)" for name in (k, v)]
        groups = count
    made = _attended(w, (q, k, v), count, positions, grouped=groups != count)
    ends = w.rng.choice(
        (
            ".transpose(1, 2).flatten(2)",
            f".transpose(1, 2).reshape({x}.shape[0], {positions}, {count * size})",
            f".transpose(1, 2).contiguous().view({x}.shape[0], -1, {count * size})",
        )
    )
    lines.append(f"{o} = {made}{ends}")
    if w.rng.random() < 0.8:
        lines.append(f"{w.name()} = {w.held('l', f'nn.Linear({count * size}, {width})')}({o})")
    return lines


def modules(w: Writer) -> str:
    """Larger layers of PyTorch."""
    x = [n for n in w.floats() if len(w.shape(n)) == 3][-1]
    width = w.shape(x)[-1]
    heads_ = w.rng.choice([n for n in range(1, width + 1) if width % n == 0])
    made, call = w.rng.choice((
        (f"nn.MultiheadAttention({width}, {heads_}, batch_first=True)", "{0}({1}, {1}, {1}, need_weights=False)[0]"),
        (f"nn.MultiheadAttention({width}, {heads_}, batch_first=True, bias=False)", "{0}({1}, {1}, {1})[0]"),
        (f"nn.LSTM({width}, 4, batch_first=True)", "{0}({1})[0]"),
        (f"nn.GRU({width}, 6, batch_first=True)", "{0}({1})[0]"),
        (f"nn.TransformerEncoderLayer({width}, {heads_}, 12, dropout=0.0, batch_first=True)", "{0}({1})"),
        (f"nn.Bilinear({width}, {width}, 4)", "{0}({1}, {1})"),
        (f"nn.Sequential(nn.Linear({width}, 12), nn.GELU(), nn.Linear(12, {width}))", "{0}({1})"),
        (f"nn.Sequential(nn.LayerNorm({width}), nn.Linear({width}, 8), nn.Dropout(0.0), nn.ReLU(), nn.Linear(8, {width}))", "{1} + {0}({1})"),
    ))  # fmt: skip
    return call.format(w.held("m", made), x)


def convolution(w: Writer) -> str:
    """Along the last dims; channels are dim 1."""
    x = w.last()
    shape = w.shape(x)
    if len(shape) not in (3, 4):
        raise ValueError
    kind, channels = f"nn.Conv{len(shape) - 2}d", shape[1]
    out, bias = w.rng.choice(SIZES), w.rng.random() < 0.6
    groups = w.rng.choice([n for n in range(1, channels + 1) if channels % n == 0])
    made = w.rng.choice((
        f"{kind}({channels}, {out}, 3, padding=1, bias={bias})", f"{kind}({channels}, {out}, 1, bias={bias})",
        f"{kind}({channels}, {channels}, 3, padding=1, groups={channels}, bias={bias})",
        f"{kind}({channels}, {groups * 2}, 1, groups={groups}, bias={bias})", f"nn.AdaptiveAvgPool{len(shape) - 2}d(2)",
        f"nn.ConvTranspose{len(shape) - 2}d({channels}, {out}, 2, bias={bias})", f"nn.MaxPool{len(shape) - 2}d(2)",
        f"nn.AvgPool{len(shape) - 2}d(2)", "nn.Upsample(scale_factor=2)", f"nn.ReflectionPad{len(shape) - 2}d(1)",
    ))  # fmt: skip
    return f"{w.held('c', made)}({x})"


def embedding(w: Writer) -> str:
    """Token ids, or places, in a table."""
    ids = w.rng.choice(w.integers())
    width = w.rng.choice((4, 6, 8, 12))
    more = w.rng.choice(("", "", ", padding_idx=0", ", sparse=True"))
    table = w.held("e", f"nn.Embedding({WORDS}, {width}{more})")
    return w.rng.choice(
        (
            f"{table}({ids})",
            f"{table}({ids})",
            f"functional.embedding({ids}, {table}.weight)",
            f"{w.held('e', f'nn.EmbeddingBag({WORDS}, {width})')}({ids})",
            f"{table}.weight[{ids}]",
            f"{table}({ids}) + {w.held('e', f'nn.Embedding({w.shape(ids)[1]}, {width})')}(torch.arange({ids}.shape[1]))",
        )
    )


def head(w: Writer) -> str:
    """Logits by a table."""
    x = w.last()
    names = [n for n, m in w.module.named_children() if n.startswith("e")]
    table = f"self.{w.rng.choice(names)}.weight"
    return w.rng.choice((f"functional.linear({x}, {table})", f"{x} @ {table}.T", f"{x} @ {table}.mT"))


def written(w: Writer) -> list[str]:
    """In place, also through views."""
    x, y = w.last(), w.name()
    at = w.dim(x)
    size = w.shape(x)[at]
    half, front = max(1, size // 2), ":, " * (at % len(w.shape(x)))
    first = f"{y} = {x} * 1.0" if w.rng.random() < 0.7 else f"{y} = torch.zeros_like({x}) + {x}"
    forms = [
        [f"{y}[{front}:{half}] = 0.5"],
        [f"{y}.add_({w.parameter(w.shape(x)[-1])})"],
        [f"{y}[{front}0].mul_(2.0)"],
        [f"{y}.relu_()"],
        [f"{y} += {x}"],
        [f"{y}.masked_fill_({x} > 0, 0.1)"],
        [f"{y}.transpose({at}, -1).mul_({w.parameter(size)})"],
        [f"{y}[{front}{half}:] *= 0.5", f"{y} = {y} + 1"],
        [f"{y}.flatten(1)[:, ::2] *= 0.5"],
        [f"{y}.copy_({x} * {w.parameter(1)})"],
        [f"{y}.select({at}, 0).copy_({x}.sum({at}))"],
        [f"{y}.view({y}.shape[0], -1).tanh_()"],
    ]
    more = w.name()
    forms += [
        [f"{more} = {y}.unsqueeze(0)", f"{y}.mul_(0.5)", f"{w.name()} = {more}.squeeze(0) + {y}"],
        [
            f"{more} = torch.empty_like({y})",
            f"{more}[{front}:{half}] = {y}[{front}:{half}]",
            f"{more}[{front}{half}:] = {y}[{front}{half}:] * 2",
        ],
    ]
    return [first, *w.rng.choice(forms)]


def recorded(w: Writer) -> list[str]:
    """A buffer that forward writes."""
    x = w.last()
    last = w.shape(x)[-1]
    b = w.buffer(f"torch.zeros({last})")
    dims = tuple(range(len(w.shape(x)) - 1))
    made = f"{x}.detach().mean({dims})"
    return [
        w.rng.choice(
            (
                f"{b}.mul_(0.9).add_({made}, alpha=0.1)",
                f"{b} += {made}",
                f"{b}.copy_({made})",
                f"{b} = 0.9 * {b} + 0.1 * {made}",
            )
        ),
        f"{w.name()} = {x} + {b}",
    ]
