"""PyTorch's variables that attach hooks to every group: TORCH_DIST_NAN_CHECK, TORCH_FR_BUFFER_SIZE."""

from pathlib import Path

import pytest

import suite
from unisono.torch_internals.hooks import have_hooks


@pytest.mark.skipif(not have_hooks(), reason="process groups of this PyTorch have no hooks")
@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_a_nan_is_found_and_calls_are_recorded(forks: suite.Forks, tmp_path: Path, backend: str) -> None:
    """NaN passed without a word where Gloo raises."""
    job = ("programs.variables_of_hooks", 2, [backend])
    for printed in forks.run(tmp_path, {backend: job})[backend]:
        assert "fine" in printed, printed
