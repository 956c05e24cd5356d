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
from loops import each
from unisono.planner import find_hardware, shape_of

SHAPE = shape_of("gpt", layers=4, hidden=64, heads=4, vocab=256, sequence=32)
A100 = find_hardware("a100-80g")
GIVEN: dict[str, Any] = {"batch": 16, "gpus": 4, "hardware": "a100-80g"}

GPT3 = shape_of("gpt", layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)
ON_8: dict[str, Any] = {"batch": 8, "gpus": 8, "hardware": "a100-80g"}
LLAMA_8B = shape_of(
    "llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, sequence=8192
)
HOSTS = "4xa100-40g,2xh100-80g"
GIB = 1 << 30


@each(
    "given, message",
    [
        ({"gpus": 0}, "gpus is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"hardware": "tpu"}, "no hardware 'tpu'"),
        ({"hardware": "a100-80g:8,v100-32g:8"}, "hosts that differ are given as hosts"),
        ({"network": "nowhere"}, "no network 'nowhere'"),
        ({"memory": 0}, "memory is 0"),
        ({"memory": 500 << 30}, "memory is 500.00 GiB, and a100-80g has 80.00 GiB"),
        ({"compute": "fp8"}, "no rate for 'fp8'"),
        ({"reduce": "bf16"}, "reduce is 'bf16'"),
        ({"plan": "tensor=5"}, "5 ranks, and there are 8"),
        ({"plan": "tensor=8,pipeline=2"}, "16 ranks, and there are 8"),
        ({"plan": "tensor=8,tensor=8"}, "twice"),
        ({"plan": "width=8"}, "expected FIELD=VALUE"),
        ({"plan": "tensor=8 zero=1"}, "write a comma between two of them"),
        ({"fix": "pipeline=16"}, "no plan of 8 ranks has pipeline=16: data x tensor x pipeline = 1 x 1 x 16"),
        ({"plan": "context=3"}, "2 x 3 x 1 x 1 = 6 ranks, and there are 8"),
        ({"plan": "context=2,tensor=8"}, "data x context x tensor x pipeline = 1 x 2 x 8 x 1"),
        ({"plan": "expert=2"}, "no experts"),
        ({"plan": "shard=2"}, "shard=2 needs zero > 0"),
        ({"plan": "schedule=zb-h1"}, "zb-h1 needs a pipeline"),
        ({"plan": "schedule=gpipe"}, "expected 1f1b, zb-h1"),
        ({"plan": "tail=1"}, "tail=1 needs a pipeline"),
        ({"plan": "pipeline=8,tail=40"}, "tail=40 needs a pipeline"),
        ({"plan": "swap=states,zero=1"}, "no axis but data"),
        ({"plan": "data=4,codec=int8,zero=1,tensor=2"}, "codec=int8 with zero=1 averages whole matrices"),
        ({"plan": "codec=int8", "reduce": "low"}, "takes gradients in f32"),
        ({"plan": "codec=rank0"}, "rank1 to rank1024"),
        ({"codecs": ["zip"]}, "codec is 'zip'"),
        ({"codecs": ["none"]}, "none beside"),
        ({"imbalance": 0.9}, "expected 1 or more"),
        ({"plan": "tensor"}, "whole number"),
        ({"plan": "tensor=-8"}, "whole number"),
        ({"plan": "zero=4"}, "zero is 4"),
        ({"plan": "recompute=some"}, "recompute is 'some'"),
        ({"plan": "sequence=maybe"}, "yes or no"),
        ({"plan": "sequence=yes"}, "needs tensor > 1"),
        ({"plan": "tensor=8,zero=1"}, "needs data > 1"),
        ({"plan": "micro_batch=3"}, "cannot be cut"),
        ({"plan": {"width": 8}}, "'width' is unknown"),
        ({"plan": "tensor=8", "fix": "zero=1"}, "one or the other"),
        ({"fix": "tensor=7"}, "no plan of 8 ranks"),
        ({"fix": {"sequence": True, "tensor": 1}}, "has sequence=yes,tensor=1: sequence=yes needs"),
        (
            {"fix": "tensor=5,zero=1"},
            "no plan of 8 ranks has tensor=5,zero=1: data x tensor x pipeline = 1 x 5",
        ),
        ({"dispatch": "ranks"}, "expected experts or hosts"),
        ({"routed_hosts": 4}, "needs dispatch=hosts"),
        ({"compute": ("bf16", "bf16")}, "each once"),
        ({"compute": ("bf16", "int8")}, "no rate for 'int8'"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        un.plan(GPT3, **{**ON_8, **given})


@each(
    "given, message",
    [
        ({"hosts": "a100-80g"}, "expected such as 4xa100-80g"),
        ({"hosts": ""}, "expected such as"),
        ({"hosts": "a100-80g:8,v100-32g:8"}, "expected such as"),
        ({"hosts": "0xa100-80g"}, "a count is 0"),
        ({"hosts": "1xtpu"}, "no hardware 'tpu'"),
        ({"hosts": "1xa100-80g,1xa100-40g,1xh100-80g,1xv100-32g"}, "4 kinds"),
        ({"hosts": HOSTS, "gpus": 8}, "gpus is 8, and the hosts have 48"),
        ({"hosts": HOSTS, "hardware": "a100-80g"}, "or hardware and network"),
        ({"hosts": HOSTS, "network": "dgx_h100"}, "or hardware and network"),
        ({"hosts": HOSTS, "memory": 90 * GIB}, "the largest of"),
        ({"hosts": HOSTS, "compute": "fp8"}, "no rate for 'fp8'"),
        ({"hosts": HOSTS, "plan": "pipeline=3,layers=10/10"}, "layers=10/10 are not 32 layers"),
        ({"hosts": HOSTS, "plan": "pipeline=3,layers=10/10/11"}, "are not 32 layers"),
        ({"hosts": HOSTS, "plan": "pipeline=3,tail=3"}, "layers in place of tail"),
        ({"hosts": HOSTS, "plan": "order=0/0"}, "each of 0 to 1 once"),
        ({"hosts": HOSTS, "plan": "rows=2"}, "a number for each of 2 kinds"),
        ({"hosts": HOSTS, "plan": "rows=2/1"}, "are 80, expected data x micro_batch"),
        ({"hosts": HOSTS, "plan": "swap=moments"}, "swap"),
        ({"gpus": 8, "hardware": "a100-80g", "plan": "rows=1"}, "rows is for hosts that differ"),
        ({"gpus": 8, "hardware": "a100-80g", "plan": "layers=a"}, "whole number"),
        ({"gpus": 8}, "give gpus and hardware, or hosts"),
    ],
)
def test_what_is_wrong_with_hosts_is_said(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        un.plan(LLAMA_8B, **{"batch": 96, **given})


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
    {"expert_overlap": 1}, {"loss": 5}, {"loss": "x"}, {"autocast": None}, {"runtime": 5}, {"dispatch": 1},
    {"routed_hosts": 1.5}, {"compute": (1,)}, {"compute": ()}, {"plan": {"tensor": "8"}}, {"hosts": [1]},
    {"hosts": [("a100-80g", 4)]}, {"hosts": [(1.5, "a100-80g")]}, {"hosts": {"a100-80g": 4}},
    {"hosts": [(1, 2)]},
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
