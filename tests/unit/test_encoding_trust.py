"""What decoding trusts: no class the receiver does not know, no pickle unasked, no length in a message."""

from __future__ import annotations

import enum
import math
import os
import random
import resource
import struct
import subprocess
import sys
import types
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops import each
from unisono.engine.encoding import decode, encode
from unisono.engine.encoding.nodes import NodeKind


class Colour(enum.Enum):
    RED = "r"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Point:
    x: float
    y: Any = None


class Packet(msgspec.Struct):
    x: int
    y: Any = None


@dataclass
class Closes:
    x: str

    def __del__(self) -> None:
        raise AssertionError("code was run on what a stranger sent")


@dataclass(frozen=True)
class Key:
    name: str

    def __post_init__(self) -> None:
        if self.name == "never":
            raise AssertionError("decoding must not run __post_init__")


class Outer:
    pass


# ---- classes on the receiving side ---------------------------------------------------------------------


def named_thing(made: Any) -> Any:
    """As if this class were the Thing of module `elsewhere`."""
    made.__module__, made.__qualname__ = "elsewhere", "Thing"
    return made


def elsewhere(thing: Any) -> types.ModuleType:
    """A module with this Thing."""
    module = types.ModuleType("elsewhere")
    module.Thing = thing  # type: ignore[attr-defined]
    return module


def sent(monkeypatch: pytest.MonkeyPatch, value: Any) -> bytes:
    """What a sender with module `elsewhere` sends. The module is gone afterwards."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "elsewhere", elsewhere(type(value)))
        return encode(value)


@named_thing
@dataclass
class Record:
    a: int
    b: int = 2


@named_thing
@dataclass
class OtherFields:
    a: int
    c: int = 2


@named_thing
@dataclass
class WithDel:
    a: int
    b: int = 2

    def __del__(self) -> None:
        pass


@named_thing
class Plain:
    pass


@named_thing
class OneMember(enum.Enum):
    a = 1


@named_thing
class TwoMembers(enum.Enum):
    a = 1
    b = 2


def loads_itself() -> types.ModuleType:
    """A module that has no Thing, and runs code for each name that it is asked for."""

    def load(name: str) -> None:
        raise SystemExit("code was run")

    module = types.ModuleType("elsewhere")
    module.__getattr__ = load  # type: ignore[method-assign]
    return module


def test_a_class_that_the_receiver_has_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sent(monkeypatch, Record(1))
    with pytest.raises(
        ValueError, match="class elsewhere:Thing is not known here. Import elsewhere on the rec"
    ):
        decode(data)
    assert "elsewhere" not in sys.modules


@each(
    ("module", "text"),
    [
        (elsewhere(OtherFields), "the sender's has the fields a, b, this process's a, c"),
        (elsewhere(Plain), "elsewhere:Thing is no dataclass, Struct or enum"),
        (elsewhere(os.system), "not known here"),
        (elsewhere(subprocess.Popen), "not known here"),
        (loads_itself(), "not known here"),
        (elsewhere(WithDel), "has a __del__"),
        (elsewhere(OneMember), "is an enum"),
    ],
)
def test_another_class_of_that_name(
    monkeypatch: pytest.MonkeyPatch, module: types.ModuleType, text: str
) -> None:
    data = sent(monkeypatch, Record(1))
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    with pytest.raises(ValueError, match=text):
        decode(data)


def test_an_enum_member_that_the_receiver_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sent(monkeypatch, TwoMembers.b)
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere(OneMember))
    with pytest.raises(ValueError, match="elsewhere:Thing has no member b in this process"):
        decode(data)


def test_decoding_runs_no_constructor() -> None:
    data = encode(Key("often")).replace(b"often", b"never")
    assert decode(data).name == "never"


def test_a_module_that_would_load_itself_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loads(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError("the module was asked for " + name)

    data = sent(monkeypatch, Record(1))
    monkeypatch.setitem(sys.modules, "elsewhere", Loads("elsewhere"))
    with pytest.raises(ValueError, match="not known here"):
        decode(data)


# ---- pickle --------------------------------------------------------------------------------------------


def test_pickle_only_on_request_on_both_sides() -> None:
    thing = {"f": math.sin, "r": range(3), "a": np.arange(5000)}
    data = encode(thing, pickle=True)
    with pytest.raises(ValueError, match="the sender pickled this object.*Pass pickle=True on every rank"):
        decode(data)
    for form in (data, bytearray(data)):
        back = decode(form, pickle=True)
        assert back["f"] is math.sin and back["r"] == range(3)
        back["a"] += 1
        np.testing.assert_array_equal(back["a"], np.arange(5000) + 1)


def test_a_receiver_that_allows_pickle_takes_the_typed_form_too() -> None:
    assert decode(encode((1, {2})), pickle=True) == (1, {2})


# ---- garbage -------------------------------------------------------------------------------------------


def decodes_or_says_no(data: bytes) -> None:
    """Whatever the bytes: an object or a ValueError that says so."""
    try:
        decode(data)
    except ValueError as error:
        assert "cannot decode" in str(error), error


SAMPLE: Any = {
    "a": [1, 2.5, "x", None, True, (2**70, b"abc")],
    "n": np.arange(6, dtype="i4").reshape(2, 3),
    "s": {1, 2},
    "f": frozenset({"q"}),
    "r": [Point(1.0, Packet(2)), Colour.RED, Access.READ, np.float32(2), 1j],
    "t": np.array(["ab", "c"]),
    "m": np.array([("2020-01-01", True)], [("d", "M8[D]"), ("b", "?")]),
    "B": np.ones(5000, bool),
    "big": b"y" * 5000,
}


def test_every_truncation_and_every_addition() -> None:
    data = encode(SAMPLE)
    for length in [*range(1500), *range(1500, len(data), 97), len(data) - 1]:
        with pytest.raises(ValueError, match="cannot decode"):
            decode(data[:length])
    with pytest.raises(ValueError, match="1 bytes are left over"):
        decode(data + b"\0")


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bytes(seed: int) -> None:
    dice = random.Random(seed)
    whole = encode(SAMPLE)
    interesting = len(whole) - 10200
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(dice.choice((1, 1, 2, 5))):
            data[dice.randrange(interesting)] = dice.choice((0, 1, 2, 16, 127, 128, 255, dice.randrange(256)))
        decodes_or_says_no(bytes(data))


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_random_bytes(data: bytes) -> None:
    decodes_or_says_no(data)


def message(nodes: list[int], values: Any, small: bytes = b"", large: bytes = b"") -> bytes:
    """A message by hand. `values` is what msgpack should hold, or bytes to stand in its place."""
    packed = values if isinstance(values, bytes) else msgspec.msgpack.encode(values)
    header = struct.pack("<2sBB4xQQQ", b"UO", 1, 0, len(nodes), len(packed), len(small))
    return header + bytes(nodes) + packed + small + large


NAMES = [f"{__name__}:{name}" for name in ("Point", "Packet", "Colour", "Access", "Outer", "Closes")]
VALUES = st.lists(
    st.none()
    | st.booleans()
    | st.integers(-1, 6)
    | st.floats()
    | st.sampled_from([2**40, 2**63 - 1, -(2**63)])
    | st.sampled_from(
        ["", "<f4", "O", "V0", "<U0", "bfloat16", "finfo", "int4", '{"base":"<f4","shape":[2]}']
    )
    | st.sampled_from([*NAMES, "os:system", "subprocess:Popen", "builtins:eval", "enum:Flag"])
    | st.sampled_from(["x", "y", "RED"]),
    max_size=12,
)


@given(st.lists(st.integers(0, len(NodeKind)), max_size=12), VALUES, st.binary(max_size=30))
@settings(max_examples=1500, deadline=None)
def test_well_formed_nonsense(nodes: list[int], values: Any, small: bytes) -> None:
    decodes_or_says_no(message(nodes, values, small))


HOSTILE = {
    "more values than bytes": message([0], b"\xdd\xff\xff\xff\xff"),
    "arrays in the values": message([0], b"\x91" * 2000),
    "a list of 2^40": message([NodeKind.LIST], [1 << 40]),
    "a run of 2^62": message([NodeKind.LIST, NodeKind.RUN], [1 << 62, 1 << 62]),
    "a list of -1": message([NodeKind.LIST], [-1]),
    "an array of 2^62 bytes": message([NodeKind.ARRAY], ["<f8", 1, 1 << 59, 1 << 62]),
    "an array of many dimensions": message([NodeKind.ARRAY], ["|u1", 100, *[1] * 100, 1], b"x"),
    "an array of nothing, endless": message([NodeKind.ARRAY], ["<f8", 2, 1 << 62, 0, 0]),
    "an array of empty elements": message([NodeKind.ARRAY], ["|V0", 1, 1 << 40, 0]),
    "an array of objects": message([NodeKind.ARRAY], ["|O8", 1, 1, 8], b"12345678"),
    "an array of hidden objects": message(
        [NodeKind.ARRAY], ['{"base":"|O8","shape":[1]}', 1, 1, 8], b"12345678"
    ),
    "an element of a million dimensions": message(
        [NodeKind.ARRAY], ['{"base":"<f4","shape":[' + "1," * 9999 + "1]}"]
    ),
    "a bool of 2": message([NodeKind.ARRAY], ["|b1", 1, 1, 1], b"\2"),
    "a list as a key": message([NodeKind.DICT, NodeKind.LIST, NodeKind.VALUE], [1, 0, 1]),
    "a list in a set": message([NodeKind.SET, NodeKind.LIST], [1, 0]),
    "depth": message([NodeKind.LIST] * 5000, [1] * 5000),
    "depth in an element": message([NodeKind.ARRAY], ['{"base":"' * 40]),
    "two objects": message([0, 0], [1, 2]),
    "no object": message([], []),
    "too many values": message([0], [1, 2]),
    "a size as text": message([NodeKind.BYTES], ["a"]),
    "a function": message([NodeKind.RECORD], ["os:system", 1, "x"]),
    "an exception": message([NodeKind.RECORD], ["builtins:Exception", 0]),
    "a nested lookup": message([NodeKind.RECORD], [f"{__name__}:Outer.__class__.__init__", 0]),
    "a path of dots": message([NodeKind.RECORD], ["....:....", 0]),
    "bad UTF-8": message([NodeKind.TEXT], [1], b"\xff"),
    "lengths that overflow": struct.pack("<2sBB4xQQQ", b"UO", 1, 0, 2**64 - 1, 2**64 - 1, 2**64 - 1),
}


@each("name", HOSTILE)
def test_hostile_bytes(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="cannot decode"):
        decode(HOSTILE[name])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_another_version_and_other_bytes() -> None:
    data = bytearray(encode(1))
    data[2] = 9
    with pytest.raises(ValueError, match="version 9 of the encoding, this process knows version 1"):
        decode(data)
    with pytest.raises(ValueError, match="begins with b'GIF89a.*"):
        decode(b"GIF89a" + bytes(60))
    with pytest.raises(ValueError, match="got 0 bytes"):
        decode(np.empty(0, np.uint8))
