"""Wrong arguments of the planner's public functions: a clear error, before work begins."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import unisono as un
from inside_planner import HostMemory, LinkRate
from unisono.planner import find_hardware, shape_of

SHAPE = shape_of("gpt", layers=4, hidden=64, heads=4, vocab=256, sequence=32)
A100 = find_hardware("a100-80g")
GIVEN: dict[str, Any] = {"batch": 16, "gpus": 4, "hardware": "a100-80g"}

WRONG_PLANS: list[dict[str, Any]] = [
    {"batch": 0}, {"batch": -1}, {"batch": 1.5}, {"batch": math.nan}, {"batch": "16"}, {"batch": 1 << 60},
    {"batch": None}, {"gpus": 0}, {"gpus": 1 << 40}, {"gpus": 2.0}, {"gpus": None}, {"hardware": None},
    {"hardware": 5}, {"hardware": ""}, {"hardware": "nothing"}, {"hardware": b"a100-80g"}, {"hosts": 5},
    {"hosts": ""}, {"hosts": []}, {"network": 5}, {"network": ""}, {"memory": 0}, {"memory": -1},
    {"memory": 1 << 70}, {"memory": "70G"}, {"memory": math.inf}, {"plan": 5}, {"plan": "x"},
    {"plan": "data=0"}, {"plan": "data=99999999999"}, {"plan": {"data": 3}}, {"plan": {"data": math.nan}},
    {"plan": {5: 1}}, {"plan": "data=4", "fix": "zero=1"}, {"fix": 5}, {"fix": "zero=9"},
    {"fix": {"zero": None}}, {"fix": {"recompute": 5}}, {"fix": {"layers": "x"}}, {"compute": 5},
    {"compute": "int4"}, {"compute": []}, {"compute": ["bf16", "bf16"]}, {"compute": ["bf16", 5]},
    {"reduce": 5}, {"reduce": "f64"}, {"overlap": "yes"}, {"overlap": 2}, {"codecs": "bf16"}, {"codecs": 5},
    {"codecs": ["rank0"]}, {"codecs": [5]}, {"codecs": ["none"]}, {"imbalance": 0.5}, {"imbalance": math.nan},
    {"imbalance": "1"}, {"dispatch": 5}, {"dispatch": "x"}, {"routed_hosts": -1}, {"routed_hosts": 2},
    {"expert_overlap": 1}, {"loss": 5}, {"loss": "x"}, {"autocast": None}, {"runtime": 5},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_PLANS, ids=str)
def test_a_wrong_argument_of_plan_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        un.plan(SHAPE, **{**GIVEN, **wrong})
    assert _is_ours(raised.value), raised.value


def _is_ours(error: BaseException) -> bool:
    """Whether a text is none of Python's own, which says what a line of the inside met."""
    own = ("object is not", "has no attribute", "unsupported operand", "argument of type", "unhashable")
    return str(error) != "" and not any(text in str(error) for text in own)


WRONG_HARDWARE: list[dict[str, Any]] = [
    {"memory_bytes": -5}, {"memory_bytes": 0}, {"memory_bytes": 1.5}, {"reserved_bytes": -1},
    {"reserved_bytes": A100.memory_bytes}, {"ranks": 0}, {"ranks": "8"}, {"flops": {}}, {"flops": 5},
    {"flops": {"bf16": 0.0}}, {"flops": {"bf16": math.nan}}, {"flops": {"int4": 1e12}}, {"overlap": "yes"},
    {"memory_bytes_per_s": 0.0}, {"memory_bytes_per_s": math.inf}, {"inside": LinkRate(-1.0, 1e9)},
    {"inside": 5}, {"between": LinkRate(0.0, 0.0)}, {"host": HostMemory(5, 0.0)}, {"host": 5}, {"name": 5},
    {"efficiency": 5},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_HARDWARE, ids=str)
def test_numbers_that_no_accelerator_has_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises((TypeError, ValueError), match=f"hardware.{name}"):
        msgspec.structs.replace(A100, **wrong)


@pytest.mark.parametrize("name", ["matrix", "memory", "links", "kernel_s", "attention"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "0.5", None])
def test_efficiencies_are_numbers(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"efficiency.{name}"):
        msgspec.structs.replace(A100.efficiency, **{name: value})


CALLS: list[Callable[[], object]] = [
    lambda: find_hardware(5),  # type: ignore[arg-type]
    lambda: find_hardware(None),  # type: ignore[arg-type]
    lambda: find_hardware("x\0y/z"),
    lambda: shape_of([]),  # type: ignore[arg-type]
    lambda: shape_of("gpt", layers=math.nan, hidden=64, heads=4, vocab=256, sequence=32),
    lambda: shape_of("gpt", layers=1 << 40, hidden=64, heads=4, vocab=256, sequence=32),
    lambda: un.plan("gpt2", **GIVEN),  # type: ignore[arg-type]
    lambda: un.plan(SHAPE, **GIVEN).runtime_arguments(before=-1),
    lambda: un.plan(SHAPE, batch=16, hosts=[(1 << 30, "a100-80g")]),
    lambda: un.plan(SHAPE, batch=16, hosts=[(1, "a100-80g", 3)]),  # type: ignore[list-item]
    lambda: un.plan(SHAPE, batch=16, hosts="1xa100-80g", hardware="a100-80g"),
]


@pytest.mark.parametrize("call", CALLS)
def test_other_wrong_arguments(call: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    assert _is_ours(raised.value), raised.value


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="none.toml"):
        un.plan(SHAPE, batch=16, gpus=4, hardware=tmp_path / "none.toml")
