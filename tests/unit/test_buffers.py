"""What is seen of an array: the same however one looks, and nothing of what has no plain memory."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loops import each
from unisono import _native
from unisono.engine.memory.buffers import DTYPES, REDUCIBLE, view

torch = pytest.importorskip("torch")
FIRST_VIEWS = Path(__file__).parent / "programs" / "first_views_of_two_threads.py"


TORCH_DTYPES = {
    str(each).removeprefix("torch.") for each in vars(torch).values() if type(each) is torch.dtype
}


@each("name", sorted(TORCH_DTYPES & set(DTYPES)))
def test_a_tensor_of_every_dtype(name: str) -> None:
    dtype = getattr(torch, name)
    x = torch.zeros(3, 4 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    assert view(x) == (x.data_ptr(), 12, DTYPES.index(name))
    assert _native.view(x, True) in (None, view(x))  # None: Python reads it


def test_every_dtype_of_torch_is_known_by_its_own_name_or_refused() -> None:
    assert {name for name in TORCH_DTYPES - set(DTYPES) if not name.startswith(("qint", "quint"))} == set()
    assert set(REDUCIBLE) < TORCH_DTYPES


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
    ],
)
def test_tensors_whose_memory_is_not_what_they_say(x: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"gradient .*{said}|gradient is .*{said}"):
        view(x, name="gradient")


class OwnDispatch(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class OwnArithmetic(np.ndarray[Any, Any]):
    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented


def wrappers() -> Iterator[tuple[Any, str]]:
    ones, two = torch.ones(3), [torch.ones(2), torch.ones(3)]
    yield torch.zeros(2, dtype=torch.complex64).conj(), "lazy conjugate"
    yield torch.zeros(1, dtype=torch.complex64).conj().imag, "lazy"
    yield torch.zeros(3, device="meta"), "no memory"
    yield ones.to_sparse(), "layout"
    yield torch.eye(3).to_sparse_csr(), "layout"
    yield torch.nested.nested_tensor(two), "nested"
    yield torch.nested.nested_tensor(two, layout=torch.jagged), "nested"
    yield torch.masked.masked_tensor(ones, ones > 0), "get_mask"
    yield torch._efficientzerotensor(3), "no memory"
    yield torch._to_functional_tensor(ones), "no memory"
    yield ones.as_subclass(OwnDispatch), "OwnDispatch"
    yield torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8), "int_repr"
    yield np.ma.array([1.0, 2.0], mask=[0, 1]), "mask would be lost"
    yield np.ma.masked, "mask would be lost"
    yield np.ones(3).view(OwnArithmetic), "np.asarray"
    yield np.array([1, "a"], object), "object"


def test_arrays_whose_values_are_not_their_bytes_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of prototypes
        for x, said in wrappers():
            for writable in (False, True):
                assert _native.view(x, writable) is None, type(x)
                with pytest.raises(TypeError, match=said):
                    view(x, writable)


def test_dtypes_without_a_code_are_their_bytes() -> None:
    for x in (np.zeros(3, np.longdouble), np.zeros(3, "M8[s]"), np.zeros(2, "i4,f4"), np.array(["ab"])):
        assert view(x) == (x.ctypes.data, x.nbytes, DTYPES.index("bits8"))
    for name in ("uint16", "uint32", "uint64"):
        x = np.zeros(3, name)
        assert view(x) == (x.ctypes.data, 3, DTYPES.index(name))


class OldExporter:
    """Of a time when DLPack could not say that memory is read-only."""

    def __init__(self) -> None:
        self.x = np.zeros(3)

    def __dlpack__(self, **options: Any) -> Any:
        if options.keys() - {"stream"}:
            raise TypeError("unexpected keyword")
        return self.x.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.x.__dlpack_device__()


def test_an_older_exporter_of_dlpack_is_not_read_only() -> None:
    old = OldExporter()
    assert view(old) == (old.x.ctypes.data, 3, DTYPES.index("float64"))


def test_inside_functions_of_torch_func_a_tensor_has_no_memory() -> None:
    def refused(x: Any) -> Any:
        with pytest.raises(TypeError, match="no memory"):
            view(x)
        return x.sum()

    torch.func.vmap(refused)(torch.ones(2, 3))
    torch.func.grad(refused)(torch.ones(3))


def test_subclasses_without_a_meaning_of_their_own_are_their_bytes(tmp_path: Path) -> None:
    class Named(torch.Tensor):
        pass

    x = torch.ones(3).as_subclass(Named)
    assert view(x) == (x.data_ptr(), 3, DTYPES.index("float32"))
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(3,))
    for array in (mapped, np.ones((1, 3), np.float32).view(np.matrix)):
        assert view(array) == (array.ctypes.data, 3, DTYPES.index("float32"))


def test_a_tensor_that_is_only_traced_has_no_memory() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.zeros(3)
        with pytest.raises(TypeError, match="FakeTensor"):
            view(x)


def test_what_is_written_reaches_the_tensor() -> None:
    x = torch.arange(6, dtype=torch.int32)[2:5]
    address, numel, _ = view(x)
    assert address == x.data_ptr() and numel == 3
    assert np.array_equal(x.numpy(), [2, 3, 4])


def test_the_first_looks_at_arrays_may_be_of_two_threads() -> None:
    ended = subprocess.run([sys.executable, str(FIRST_VIEWS)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
