"""Statements with tensors that forward makes: positions, masks, constants of a value's shape."""

from .writer import Writer


def made(w: Writer) -> str:
    x = w.last()
    shape = w.shape(x)
    if len(shape) < 2:
        raise ValueError
    a, b = shape[-2:]
    here = f"{x}.shape[-2]" if w.rng.random() < 0.6 else str(a)
    wide = f"{x}.size(-1)" if w.rng.random() < 0.6 else str(b)
    p = w.parameter(1)
    return w.rng.choice(
        (
            f"{x} + torch.arange({wide}, dtype=torch.float64) * 0.1",
            f"{x} + torch.arange({here})[:, None] * {p}",
            f"{x} * torch.ones_like({x}).cumsum(-1)",
            f"{x} + torch.full(({here}, 1), 0.5, dtype={x}.dtype)",
            f"{x}.masked_fill(torch.ones({here}, {wide}, dtype=torch.bool).triu(1), 0.0)",
            f"{x} * torch.eye({here}, {wide}).sum()",
            f"torch.cat([{x}, torch.zeros(*{x}.shape[:-1], 2)], -1)",
            f"torch.cat([{p}.expand(*{x}.shape[:-1], 1), {x}], dim=-1)",
            f"{x} + torch.outer(torch.arange({here}).double(), torch.linspace(0, 1, {wide})).sin()",
            f"{x} + torch.where(torch.arange({wide}) < 3, 1.0, {p})",
            f"{x} * torch.tensor([0.5, 2.0]).repeat({b})[:{b}]",
            f"{x} + torch.meshgrid(torch.arange({here}), torch.arange({wide}), indexing='ij')[0] * 0.1",
            f"{x}.new_full({x}.shape, 0.25) * {x} + {p}",
            f"{x} + torch.rand_like({x}).mul(0.0)",
            f"{x} * (torch.tensor({x}.shape[-1]) * 1.0).rsqrt()",
            f"{x} / {x}.shape[-1] ** 0.5",
            f"{x} + torch.zeros({here}, {wide}).index_fill_(1, torch.tensor([0]), 1.0)",
            f"{x} + torch.tril(torch.full(({here}, {wide}), 0.3), -1)",
            f"{x} * torch.logspace(-1, 0, {wide})",
            f"{x} + torch.empty({wide}).fill_(0.5) * {p}",
            f"{x} + torch.scalar_tensor(0.5) * {p}",
            f"{x} + torch.hann_window({wide}, dtype={x}.dtype)",
            f"torch.addmm({x}.new_zeros({wide}), {x}.flatten(0, -2), torch.eye({wide})).view_as({x})",
        )
    )
