# ruff: noqa: E501  (templates of one line)
"""Statements that read and write values by index, along a dim of any place."""

from .writer import Writer


def _front(w: Writer, x: str, at: int) -> str:
    return ":, " * (at % len(w.shape(x)))


def _places(w: Writer, size: int, count: int) -> str:
    return w.buffer(f"torch.tensor({[w.rng.randrange(size) for _ in range(count)]})")


def scattered(w: Writer) -> str:
    """Writes to places: scatter, index_add, index_put and their kin."""
    x, at = w.last(), w.dim(w.last())
    size, count = w.shape(x)[at], w.rng.choice((2, 4, 6))
    front, places = _front(w, x, at), _places(w, size, size)
    wide, into = _places(w, count, size), [str(w.size(x, d)) for d in range(len(w.shape(x)))]
    into[at] = str(count)
    zeros = f"{x}.new_zeros({', '.join(into)})"
    order = f"{x}.argsort({at})"
    return w.rng.choice(
        (
            f"{zeros}.index_add({at}, {wide}, {x})",
            f"{x}.index_add({at}, {places}, {x}, alpha=0.5)",
            f"{x}.index_copy({at}, torch.arange({size} - 1, -1, -1), {x} * 2)",
            f"{x}.index_fill({at}, {places}[:1], 0.5)",
            f"torch.zeros_like({x}).scatter_add({at}, {order}, {x})",
            f"{x}.scatter_reduce({at}, {order}, {x}, 'amax')",
            f"{x}.scatter_reduce({at}, torch.zeros_like({order}), {x}, 'mean', include_self=False)",
            f"torch.zeros_like({x}).scatter({at}, {x}.topk(1, {at}).indices, 1.0) * {x}",
            f"{x}.masked_scatter({x} > 0.5, {x}.flip({at}))",
            f"{x}.index_put((torch.arange({w.shape(x)[0]}),), torch.tensor(0.5), accumulate=True)",
            f"torch.select_scatter({x}, {x}.sum({at}), {at}, 0)",
            f"torch.slice_scatter({x}, {x}.narrow({at}, 0, 1), {at}, 0, 1)",
            f"torch.where(torch.zeros_like({x}).scatter({at}, {order}, {x}) > 0, {x}, 0.1)",
            f"{x}[{front}{places}].index_add({at}, {places}, {x})",
        )
    )


def gathered(w: Writer) -> str:
    """Reads of places: by tensors of indices, of positions, of pairs."""
    x, at = w.last(), w.dim(w.last())
    shape = w.shape(x)
    size, front, places = shape[at], _front(w, x, at), _places(w, shape[at], w.rng.choice((2, 4, 6)))
    grid = w.buffer(f"torch.tensor({[[w.rng.randrange(size) for _ in range(3)] for _ in range(2)]})")
    return w.rng.choice(
        (
            f"{x}[{front}{grid}]",
            f"{x}[torch.arange({x}.shape[0]), {x}.sum(-1).flatten(1).argmax(1) * 0]",
            f"{x}[..., torch.arange({shape[-1]} - 1, -1, -1)]",
            f"{x}.gather({at}, {x}.argmax({at}, keepdim=True))",
            f"{x}.gather({at}, {x}.topk({min(2, size)}, {at}).indices)",
            f"{x}.unfold({at}, {min(2, size)}, 1)",
            f"{x}.unfold({at}, {min(3, size)}, {min(3, size)}).mean(-1)",
            f"{x}[..., torch.triu_indices({shape[-2]}, {shape[-1]})[0], torch.triu_indices({shape[-2]}, {shape[-1]})[1]]",
            f"{x}.index_select({at}, {places}).mean({at}, keepdim=True) + {x}",
            f"torch.take_along_dim({x}, {x}.argsort({at}, descending=True), dim={at})",
            f"{x}.diagonal(dim1=-2, dim2=-1)",
            f"torch.diag_embed({x})",
            f"{x}.kthvalue(1, {at}, keepdim=True).values * {x}",
            f"{x}.narrow({at}, {size} // 2, {size} - {size} // 2)",
            f"torch.stack({x}.unbind({at}), 0).sum(0)",
            f"torch.cat({x}.split(1, {at})[::-1], {at})",
            f"torch.einsum('...i->...', {x})",
            f"{x}.cumsum({at}) / torch.arange(1, {size} + 1, dtype={x}.dtype).view({', '.join(['-1', *['1'] * (len(shape) - 1 - at % len(shape))])})",
            f"torch.trapezoid({x}, dim={at})",
            f"{x}.std_mean(dim={at}, keepdim=True)[1] + {x}" if size > 1 else f"{x} + 1",
            f"torch.aminmax({x}, dim={at}, keepdim=True)[0] + {x}",
            f"{x}.renorm(2, {at}, 1.0)",
            f"{x}.quantile(0.5, dim={at}, keepdim=True) * {x}",
            f"torch.cdist({x}, {x})",
        )
    )
