# ruff: noqa: E501  (templates of one line)
"""Statements that write in place: on views, on detached values, into results that are given."""

from .writer import Writer


def overwritten(w: Writer) -> list[str]:
    x, y, z = w.last(), w.name(), w.name()
    at = w.dim(w.last())
    size = w.shape(x)[at]
    half, front = max(1, size // 2), ":, " * (at % len(w.shape(x)))
    p = w.parameter(w.shape(x)[-1])
    return w.rng.choice(
        (
            [f"{y} = {x}.detach().clone()", f"{y}[{front}0] = 0.0", f"{z} = {x} + {y}"],
            [f"{y} = {x} * 1.0", f"{z} = {y}.narrow({at}, 0, {half})", f"{z}.mul_({p})", f"{w.name()} = {y} + 1"],
            [f"{y} = {x} * 1.0", f"for part in {y}.split(1, {at}):", "    part.sub_(0.1)"],
            [f"{y} = torch.empty_like({x})", f"{y}.copy_({x})", f"{y}.clamp_(-1.0, 1.0)"],
            [f"{y} = {x}.new_zeros({', '.join(w.size(x, d) for d in range(len(w.shape(x))))})", f"{y}[{front}{half}:] = {x}[{front}{half}:]"],
            [f"{y} = torch.empty_like({x})", "with torch.no_grad():", f"    torch.mul({x}, 2.0, out={y})", f"{z} = {x} + 0.1 * {y}"],
            [f"{y} = {x}.clone()", f"{y}.scatter_add_({at}, {x}.argsort({at}), {x})"],
            [f"{y} = {x}.clone()", f"{y}.index_add_({at}, torch.arange({size}), {x} * {p})"],
            [f"{y} = {x}.clone()", f"{y}.index_fill_({at}, torch.tensor([0]), 0.5)"],
            [f"{y} = {x}.clone()", f"{y}.index_put_((torch.arange({w.shape(x)[0]}),), {p}, accumulate=True)"],
            [f"{y} = {x} + 0", f"{y}[{x} > 0.5] = 0.1"],
            [f"{y} = {x} + 0", f"{y}[..., ::2], {y}[..., 1::2] = {x}[..., 1::2] * 2, {x}[..., ::2]"],
            [f"{y} = {x}.clone()", f"{z} = {y}.view({w.size(x, 0)}, -1)", f"{z}[:, 0] = 0.0", f"{w.name()} = {y} * 2"],
            [f"{y} = {x}.clone()", f"{z} = {y}.detach()", f"{z}.add_(0.1)", f"{w.name()} = {y} + {z}"],
            [f"{y} = {x}.expand(2, *{x}.shape).contiguous()", f"{y}[0] += 1", f"{z} = {y}[0] * {y}[1]"],
            [f"{y} = {x}.clone()", f"{y}.transpose({at}, -1)[..., 0] = {p}.sum()"],
            [f"{y} = {x}.clone().fill_diagonal_(0.5) if {x}.dim() == 2 else {x}.clone()", f"{y}.neg_()"],
            [f"{y} = torch.zeros_like({x})", f"for place in range({half}):", f"    {y} = {y} + {x}.select({at}, place).unsqueeze({at})"],
            [f"{y} = {x}.clone()", f"{y}.select({at}, 0).zero_()", f"{y}.select({at}, -1).fill_(1.0)", f"{z} = {y}"],
            [f"{y} = torch.tanh({x})", f"{y}.data.mul_(0.5)", f"{z} = {y} + 0.1"],
            [f"{y} = {x}.unsqueeze(0).squeeze(0) * {p}", f"{y}.swapaxes({at}, -1).lerp_({x}.swapaxes({at}, -1), 0.3)"],
            [f"{y}, {z} = {x}.clone().chunk(2, {at})", f"{y} = {y} * 2", f"{w.name()} = torch.cat([{y}, {z}], {at})"],
        )
    )  # fmt: skip
