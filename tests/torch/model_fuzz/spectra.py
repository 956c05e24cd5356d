# ruff: noqa: E501  (templates of one line)
"""Statements with complex numbers and Fourier transforms."""

from .writer import Writer


def spectrum(w: Writer) -> str:
    x, at = w.last(), w.dim(w.last())
    shape = w.shape(x)
    size = shape[at]
    bins = size // 2 + 1
    p = w.held("p", f"nn.Parameter(torch.randn({bins}{', 1' * (len(shape) - 1 - at % len(shape))}) * 0.5)")
    narrow, square = shape[-1] // 2, f"torch.randn({shape[-1]}, 6, dtype=torch.complex128)"
    c = w.held("p", f"nn.Parameter(torch.randn({narrow + 1}, dtype=torch.complex128) * 0.5)")
    turn = w.held("p", f"nn.Parameter(torch.randn({narrow}, dtype=torch.complex128))")
    weight = w.held("p", f"nn.Parameter({square} * 0.5)")
    return w.rng.choice(
        (
            f"torch.fft.rfft({x}, dim={at}).abs()",
            f"torch.fft.irfft(torch.fft.rfft({x}, dim={at}) * {p}, n={size}, dim={at})",
            f"torch.fft.irfft(torch.fft.rfft({x}) * {c}, n={shape[-1]})",
            f"torch.fft.fft(torch.fft.fft({x}, dim=-1), dim={at}).real * 0.1",
            f"torch.fft.fft2({x}).real * 0.1",
            f"torch.view_as_real(torch.fft.fft({x}, dim={at})).flatten(-2)",
            f"torch.view_as_real(torch.view_as_complex({x}.unflatten(-1, (-1, 2)).contiguous()) * {turn}).flatten(-2)",
            f"torch.complex({x}, {x} * 0.5).abs()",
            f"torch.polar({x}.abs() + 0.1, {x}).imag",
            f"(torch.complex({x}, 1 - {x}).conj() * {x}).real",
            f"torch.complex({x}, torch.ones_like({x})).angle()",
            f"(torch.complex({x}, -{x}).sum({at}, keepdim=True) * {x}).imag",
            f"(torch.complex({x}, {x}) @ {weight}).abs()",
            f"torch.fft.fftshift({x}, dim={at})",
            f"pieces.rotated_complex({x})",
        )
    )
