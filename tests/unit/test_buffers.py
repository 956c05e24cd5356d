"""What is seen of an array: the same however one looks, and nothing of what has no plain memory."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loops import each
from unisono.engine.memory.buffers import DTYPES, view

torch = pytest.importorskip("torch")
FIRST_VIEWS = Path(__file__).parent / "programs" / "first_views_of_two_threads.py"


@each("name", DTYPES)
def test_a_tensor_of_every_dtype(name: str) -> None:
    x = torch.zeros(3, 4, dtype=getattr(torch, name))
    assert view(x) == (x.data_ptr(), 12, DTYPES.index(name))


@each(
    "x",
    [
        torch.zeros(4, 5)[1:3],
        torch.zeros(4, 5)[2, 1:],
        torch.zeros(1, 5).t(),
        torch.zeros(7, 1)[::1],
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(3, 0, 2).permute(2, 0, 1),
        torch.nn.Parameter(torch.zeros(3)),
        torch.zeros(3, requires_grad=True),
    ],
)
def test_tensors_that_lie_row_after_row(x: Any) -> None:
    assert view(x) == (x.data_ptr(), x.numel(), DTYPES.index("float32"))


@each(
    ("x", "said"),
    [
        (torch.zeros(4, 5).t(), "not contiguous"),
        (torch.zeros(6)[::2], "not contiguous"),
        (torch.zeros(1).expand(4), "not contiguous"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "lazy conjugate"),
        (torch.zeros(1, dtype=torch.complex64).conj().imag, "lazy"),
        (torch.zeros(3, device="meta"), "is on meta"),
        (torch.zeros(3).to_sparse(), "layout"),
    ],
)
def test_tensors_whose_memory_is_not_what_they_say(x: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"gradient .*{said}|gradient is .*{said}"):
        view(x, name="gradient")


def test_a_dtype_that_cannot_be_reduced() -> None:
    with pytest.raises(TypeError, match="float8_e4m3fn is not one of"):
        view(torch.zeros(2).to(torch.float8_e4m3fn))


def test_a_tensor_that_is_only_traced_has_no_memory() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.zeros(3)
        with pytest.raises((ValueError, RuntimeError)):
            view(x)


def test_what_is_written_reaches_the_tensor() -> None:
    x = torch.arange(6, dtype=torch.int32)[2:5]
    address, numel, _ = view(x)
    assert address == x.data_ptr() and numel == 3
    assert np.array_equal(x.numpy(), [2, 3, 4])


def test_the_first_looks_at_arrays_may_be_of_two_threads() -> None:
    ended = subprocess.run([sys.executable, str(FIRST_VIEWS)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
