"""`un.empty`: an array like any other, in memory that others can map."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import unisono as un
from effort import HANG_S
from loops import each

NAME = "/memfd:unisono-arrays"
PROGRAM = Path(__file__).parent / "programs" / "shared_memory_of_arrays.py"


def run(*words: str) -> None:
    subprocess.run([sys.executable, str(PROGRAM), *words], check=True, timeout=HANG_S)


def held_bytes() -> int:
    """What the file behind this process's shared arrays takes."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(link).startswith(NAME):
                return os.stat(link).st_blocks * 512
        except FileNotFoundError:
            continue
    return 0


@each("dtype", [np.float32, "int8", bool, np.complex128, ml_dtypes.bfloat16, "S5", "(2,)f4", "(2,3)i8"])
@each("shape", [7, (), (3, 4), [2, 0, 5], np.zeros((2, 3)).shape])
def test_empty_returns_an_ordinary_array(shape: object, dtype: object) -> None:
    array, expected = un.empty(shape, dtype), np.empty(shape, dtype)
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    assert array.strides == expected.strides or not array.size
    assert array.flags.c_contiguous
    assert array.flags.writeable
    array[...] = np.ones(array.shape).astype(array.dtype)
    assert (array == np.ones(array.shape).astype(array.dtype)).all()


@each("dtype", [str, "U3", "M8[s]", "V4", [("a", "i4"), ("b", "(2,)f4")], np.dtype(("i2", (2,)))])
def test_empty_keeps_what_numpy_keeps_of_any_dtype(dtype: object) -> None:
    array, expected = un.empty((2, 3), dtype), np.empty((2, 3), dtype)
    assert (array.shape, array.dtype, array.strides) == (expected.shape, expected.dtype, expected.strides)


def test_numbers_of_numpy_are_lengths_and_floats_are_the_default() -> None:
    assert un.empty(np.int64(3)).shape == (3,)
    assert un.empty((np.int32(2), 2)).dtype == np.float64


def test_empty_refuses_wrong_arguments() -> None:
    for held in (object, "(2,)O", [("a", "O")]):
        with pytest.raises(TypeError, match="Python objects"):
            un.empty(3, held)
    with pytest.raises(ValueError, match="negative"):
        un.empty((2, -1))
    with pytest.raises(MemoryError, match=r"array of \d+ bytes"):
        un.empty(1 << 60, np.uint8)
    with pytest.raises(MemoryError, match=str(1 << 80)):
        un.empty((1 << 40, 1 << 40), np.uint8)


@pytest.mark.needs("given pages")
def test_memory_is_given_back_with_the_last_view() -> None:
    """But for a page, which is a huge one where the system makes such of shared memory by itself."""
    length, page = 32 << 20, 2 << 20
    gc.collect()
    before = held_bytes()
    array = un.empty(length, np.uint8)
    view = array[100:200].reshape(10, 10)
    assert held_bytes() >= before + length - page
    del array
    view[:] = 7
    assert held_bytes() >= before + length - page
    assert (view == 7).all()
    del view
    assert held_bytes() <= before + page


def test_memory_is_used_again_in_any_order() -> None:
    arrays = [un.empty(length, np.uint8) for length in (5000, 1, 100_000, 4096)]
    for number, array in enumerate(arrays):
        array[:] = number
    for order in (1, 0, 1, 0):
        assert all((array == array[0]).all() for array in arrays)
        del arrays[order]
    first, second = un.empty(9000, np.uint8), un.empty(9000, np.uint8)
    first[:], second[:] = 1, 2
    assert (first == 1).all()


def test_lengths_and_dtypes_as_numpy_takes_them() -> None:
    assert un.empty(np.array(3), "S").dtype == np.empty(3, "S").dtype
    assert un.empty(np.array(3)).shape == (3,)
    with pytest.raises(TypeError):
        un.empty(2.5)  # type: ignore[arg-type]


def test_a_file_that_has_the_number_of_their_descriptor_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    content = os.urandom(4 << 20)
    path.write_bytes(content)
    run("descriptor_is_of_another_file", str(path))
    assert path.read_bytes() == content


def test_children_do_not_write_into_their_parents_arrays() -> None:
    run("children_write")


def test_a_fork_has_memory_of_its_own() -> None:
    run("child_makes_its_own")


def test_where_it_cannot_be_made_it_is_plain_memory() -> None:
    run("file_is_limited")
