"""Objects there and back, and what is refused."""

import enum
import math
import struct
import types
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loops import each
from unisono.engine.encoding import decode, encode
from unisono.engine.encoding.class_registry import field_names
from unisono.engine.encoding.nodes import LARGE_NBYTES, MAX_DEPTH
from unisono.engine.memory.buffers import REDUCIBLE


class Colour(enum.Enum):
    RED = "r"
    CRIMSON = RED
    GREEN = "g"


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Point:
    x: float
    y: Any = None


@dataclass(frozen=True)
class Key:
    name: str
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.name == "never":
            raise AssertionError("decoding must not run __post_init__")


@dataclass
class Slotted:
    __slots__ = ("a",)
    a: int


class Outer:
    @dataclass
    class Inner:
        value: int


class Packet(msgspec.Struct, frozen=True):
    number: int
    load: Any = None


@dataclass
class Lazy:
    base: int
    scratch: list[int] = field(default_factory=list, init=False)

    @cached_property
    def square(self) -> int:
        return self.base**2


@dataclass
class Closes:
    name: str

    def __del__(self) -> None:
        print("a stranger closed", self.name)


@dataclass
class Grows:
    a: int

    def __post_init__(self) -> None:
        self.extra = 1


@dataclass
class Much(dict):  # type: ignore[type-arg]
    a: int = 0


@dataclass
class Holder:
    thing: Any


class Plain:
    pass


def same(a: Any, b: Any) -> bool:
    """Equal, of one type all the way down, NaN equal to NaN and -0.0 different from 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        bits_agree = np.array_equal(a, b) if a.dtype.char in "gG" else a.tobytes() == b.tobytes()  # padding
        return a.dtype == b.dtype and a.shape == b.shape and bits_agree
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, Point | Packet | Holder | Lazy):
        return all(same(getattr(a, name), getattr(b, name)) for name in field_names(type(a)))
    return bool(a == b)


def there_and_back(obj: Any) -> Any:
    return decode(np.frombuffer(encode(obj), np.uint8))


# ---- there and back ------------------------------------------------------------------------------------

KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([Colour.GREEN, Level.LOW, Access.READ | Access.WRITE, Key("k", (1, 2))]),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
LEAVES = (
    KEYS
    | st.floats()
    | st.text(st.characters())  # with surrogates
    | st.binary().map(bytearray)
    | st.integers(-(2**200), 2**200)
    | st.sampled_from([Point(1.0, [2]), Packet(3, {"a": (4,)}), Outer.Inner(5), Slotted(6)])
)
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.sets(KEYS, max_size=4)
        | st.builds(Point, st.floats(), inner)
        | st.builds(Packet, st.integers(0, 9), inner)
    ),
    max_leaves=30,
)


@given(OBJECTS)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_everything_comes_back_as_it_was(obj: Any) -> None:
    assert same(there_and_back(obj), obj)


@each(
    "obj",
    [
        None, True, 0, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**1000, -(10**1000), 0.0, -0.0,
        math.inf, math.nan, 1 + 2j, "", "a", "é", "\ud800", "x" * 5000, "é" * 5000, "a" * 1024, b"",
        b"x" * 5000,
        bytearray(b"x" * 5000), [], (), set(), frozenset(), {}, [[]], [()], [[], [1, [2]]], {(): {}},
        [1, 2**64], [True, 1.5, None, 3], list(range(1000)), ["a", "\ud800"], {1: {2: {3: (4,)}}},
        {1: 2, "1": 3}, {True, 2.5, "x"}, {frozenset({1}): {Level.LOW: [Colour.RED]}}, Colour.CRIMSON,
        Access(0), Access.READ | Access.WRITE, Lazy(3), Point(1.0, Point(2.0)), Packet(1, Packet(2)),
    ],
)  # fmt: skip
def test_values_at_the_edges(obj: Any) -> None:
    assert same(there_and_back(obj), obj)


@each("name", REDUCIBLE)
@each("shape", [(), (0,), (3,), (2, 3), (4, 0, 2), (50, 60)])
def test_arrays_and_scalars_of_every_dtype(name: str, shape: tuple[int, ...]) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    array = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    assert same(there_and_back({"x": [array]}), {"x": [array]})
    if array.size:
        scalar = array.reshape(-1)[0]
        assert same(there_and_back(scalar), scalar)


@each(
    "dtype",
    [
        ">f4", "u2", "u8", "S3", "U5", "V7", "M8[ns]", "M8[25s]", "m8", "m8[D]", "f2", "g", "G",
        ml_dtypes.float8_e4m3fn, ml_dtypes.int4,
        [("a", "f4"), ("b", "i8", (2, 3))],
        {"names": ["x"], "formats": ["u1"], "offsets": [5], "itemsize": 16},
        [("outer", [("inner", "U2"), ("b", "?")])],
    ],
)  # fmt: skip
def test_other_dtypes_of_fixed_size(dtype: Any) -> None:
    array = np.zeros((2, 3), dtype)
    assert same(there_and_back(array), array)
    assert same(there_and_back(array[0, 0]), array[0, 0])


def test_orders_of_an_array() -> None:
    base = np.arange(24.0).reshape(2, 3, 4)
    for array in (base.T, base[:, ::2], base[::-1], base.transpose(1, 0, 2), np.asfortranarray(base)):
        back = there_and_back(array)
        np.testing.assert_array_equal(back, array)
        assert back.flags.f_contiguous == array.flags.f_contiguous
        assert back.flags.writeable


def test_large_arrays_share_the_memory_they_came_in() -> None:
    data = bytearray(encode([np.arange(1000), np.arange(9)]))
    large, small = decode(data)
    window = np.frombuffer(data, np.uint8)
    assert np.shares_memory(large, window) and not np.shares_memory(small, window)
    assert large.flags.aligned and large.flags.writeable and small.flags.writeable
    of_bytes = decode(bytes(data))[0]
    of_bytes[0] = 7  # bytes are read-only: this is a copy


def test_a_large_buffer_is_copied_once_and_not_at_all() -> None:
    array = np.ones(1 << 20)
    data = np.frombuffer(encode({"w": array}), np.uint8)
    assert data.size < array.nbytes + 256
    assert decode(data.copy())["w"].base is not None


def test_nothing_is_shared_between_what_was_one_object() -> None:
    part = [1]
    back = there_and_back([part, part])
    assert back == [[1], [1]] and back[0] is not back[1]


def test_encoding_depth_limit() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep, 2]
    back = there_and_back(deep)
    for _ in range(MAX_DEPTH):
        back, two = back
        assert two == 2
    assert back == 1
    with pytest.raises(ValueError, match=rf"list at \[0\].*nested more than {MAX_DEPTH} deep"):
        encode([[deep], 1])


def test_the_threshold_is_the_same_on_both_sides() -> None:
    for nbytes in (LARGE_NBYTES - 1, LARGE_NBYTES, LARGE_NBYTES + 1):
        for form in (bytes, bytearray):
            assert same(there_and_back([form(nbytes), 1]), [form(nbytes), 1])
        assert same(there_and_back(np.zeros(nbytes, np.int8)), np.zeros(nbytes, np.int8))


# ---- what is refused -----------------------------------------------------------------------------------


def local_class() -> Any:
    @dataclass
    class Local:
        a: int

    return Local(1)


@each(
    ("obj", "text"),
    [
        ({"a": [1, 2, Plain()]}, r"Plain at \['a'\]\[2\]: it is none of the types that are sent safely"),
        (object(), "cannot encode a object: it is none"),
        ([{"k": Holder((1, object()))}], r"at \[0\]\['k'\].thing\[1\]"),
        ({Plain: 1}, r"a type at  \(key <class"),
        ([lambda: 1], r"function at \[0\]"),
        ([print], r"at \[0\]"),
        (np.array([1, None], object), "NumPy ndarray of dtype object: it holds Python objects; use .tolist"),
        ([np.zeros(2, [("a", object)])], r"at \[0\]: it holds Python objects"),
        (np.ma.masked_array([1, 2], [0, 1]), "MaskedArray: only plain NumPy arrays"),
        (types.SimpleNamespace(a=1), "SimpleNamespace"),
        (enum.Enum, "EnumType|EnumMeta"),
        (Point, "a type: it is none"),
        (local_class(), "inside a function; move it to the top level"),
        (Closes.__new__(Closes), "__del__, which would run on data from another process"),
        ((Grows(1),), r"Grows at \[0\]: its attribute extra is not a field"),
        (Much(1), "more than a dataclass"),
        (memoryview(b"a"), "memoryview"),
        (1j.__class__, "type"),
        (range(3), "a range"),
        (__import__("collections").OrderedDict(a=1), "only dict itself is sent.*convert it with dict"),
        (__import__("collections").namedtuple("N", "a")(1), "only tuple itself"),
    ],
)
def test_encode_refuses_wrong_objects(obj: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        encode(obj)


def test_a_tensor_is_refused_with_a_hint() -> None:
    tensor = type("Tensor", (), {"__module__": "torch", "numpy": lambda self: None})()
    with pytest.raises(TypeError, match=r"torch.Tensor at \['w'\]: send .detach\(\).cpu\(\).numpy\(\)"):
        encode({"w": tensor})


def test_a_field_that_is_not_set() -> None:
    with pytest.raises(TypeError, match="its field x is not set"):
        encode(object.__new__(Point))


def test_a_cached_property_is_no_field_and_no_loss() -> None:
    lazy = Lazy(3)
    assert lazy.square == 9
    assert vars(there_and_back(lazy)) == {"base": 3, "scratch": []}


def test_an_object_that_contains_itself() -> None:
    loop: dict[str, Any] = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(ValueError, match="cannot encode a dict: it contains itself"):
        encode(loop)
    held = Holder([1])
    held.thing.append(held.thing)
    with pytest.raises(ValueError, match=r"list at \[0\].thing: it contains itself"):
        encode([held])
