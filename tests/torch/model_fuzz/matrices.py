# ruff: noqa: E501  (templates of one line)
"""Statements with linear algebra. PyTorch chooses some of its operators by what is trained."""

from .writer import Writer


def algebra(w: Writer) -> str:
    x = w.last()
    size = w.shape(x)[-1]
    table = w.held("p", f"nn.Parameter(torch.randn({size}, {w.rng.choice((3, size, size + 2))}) * 0.5)")
    square = w.held("p", f"nn.Parameter(torch.randn({size}, {size}) * 0.3)")
    eye = f"torch.eye({size})"
    return w.rng.choice(
        (
            f"{x} * torch.linalg.svdvals({table}).sum() * 0.1",
            f'{x} * torch.linalg.matrix_norm({table}, "nuc") * 0.1',
            f"{x} / (1 + torch.linalg.matrix_norm({table}, 2))",
            f"{x} * torch.linalg.eigvalsh({square} + {square}.mT)[-1]",
            f"{x} @ torch.linalg.inv(2 * {eye} + {square})",
            f"{x} @ torch.linalg.solve({eye} + {square} @ {square}.mT, {square})",
            f"{x} @ torch.linalg.cholesky({square} @ {square}.mT + {eye})",
            f"{x} @ torch.linalg.qr({square} + {eye})[0]",
            f"{x} @ torch.matrix_exp({square} - {square}.mT)",
            f"{x} + torch.linalg.slogdet({square} @ {square}.mT + {eye}).logabsdet",
            f"torch.linalg.solve_triangular({square}.tril(-1) + {eye}, {x}.unsqueeze(-1), upper=False).squeeze(-1)",
            f"{x} * torch.linalg.multi_dot(({table}.mT, {square}, {table})).diagonal().sum() * 0.1",
        )
    )
