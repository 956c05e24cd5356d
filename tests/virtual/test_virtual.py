"""Virtual GPUs from outside: the launcher's flags, memory, streams, the pytest plug-in."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from effort import HANG_S
from loops import each
from ports import reserved

PROGRAMS = Path(__file__).parent / "programs"
CASES = PROGRAMS / "gpu_cases.py"
ATTENTION = PROGRAMS / "attention_cases.py"


# What a process sees on its one GPU: (the program, its function, words that it prints).
ONE_PROCESS = (
    (CASES, "ctc"), (CASES, "histogram"), (CASES, "poison_says_so"), (CASES, "half_precision", "refused"),
    (CASES, "old_code"), (ATTENTION, "fused"), (ATTENTION, "of_sequences"), (ATTENTION, "composed"),
)  # fmt: skip


def launched(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "run", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, check=False, env={**os.environ, **environ}
    )


@pytest.mark.parametrize("machine", [4], indirect=True)
def test_four_ranks_see_four_gpus(machine: Any):
    ended = machine.run(CASES, arguments=["each_rank_has_a_gpu"])
    assert not any(ended.codes), ended.text
    assert ended.text.count("refused") == 4


@pytest.mark.parametrize("machine", [2], indirect=True)
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "unisono"])
def test_both_devices_in_one_group(machine: Any, backend: str):
    ended = machine.run(CASES, arguments=["both_devices", backend])
    assert not any(ended.codes), ended.text


@pytest.mark.parametrize("machine", [2], indirect=True)
def test_gloo_takes_tensors_of_gpus(machine: Any):
    ended = machine.run(CASES, arguments=["over_gloo"])
    assert not any(ended.codes), ended.text


def test_gloo_takes_tensors_of_one_gpu_on_two_ranks():
    done = launched("-n", "2", "--virtual-gpus", "1", "--replace", "gloo", str(CASES), "over_gloo")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("machine", [4], indirect=True)
def test_a_list_of_another_length_is_one_tensor(machine: Any):
    ended = machine.run(CASES, arguments=["lists_as_one"])
    assert not any(ended.codes), ended.text
    assert ended.text.count("refused") == 4


@pytest.mark.parametrize("machine", [2], indirect=True)
def test_fused_attention_under_dtensor_and_over_a_sequence(machine: Any):
    ended = machine.run(ATTENTION, arguments=["over_ranks"])
    assert not any(ended.codes), ended.text


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_books_are_those_of_the_caching_allocator(machine: Any):
    ended = machine.run(CASES, arguments=["books"])
    assert not any(ended.codes), ended.text


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_two_ranks_never_share_the_last_memory(machine: Any, tmp_path: Path):
    ended = machine.run(PROGRAMS / "claims.py", size=2, arguments=[str(tmp_path / "board"), "30"])
    assert ended.codes == [0, 0], ended.text
    first, second = re.findall("had: ([01]+)", ended.text)
    assert "11" not in map("".join, zip(first, second, strict=True))
    assert "1" in first + second


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_one_process_of_one_gpu(machine: Any, subtests: pytest.Subtests):
    for program, case, *words in ONE_PROCESS:
        with subtests.test(case):
            ended = machine.run(program, arguments=[case])
            assert not any(ended.codes), ended.text
            assert all(word in ended.text for word in words), ended.text


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_a_stream_that_waits_is_no_mistake(machine: Any):
    ended = machine.run(CASES, arguments=["stream_waits"], TORCH_CUDA_SANITIZER="1")
    assert not any(ended.codes), ended.text


def test_flags_of_the_launcher():
    done = launched(
        "-n", "1", "--virtual-gpus", "4", "--gpu-memory", "1G", "--no-poison", "--check-streams",
        str(CASES), "flags", CUDA_VISIBLE_DEVICES="3,1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@each("visible, found", [("1,0", "[1, 0]"), ("GPU-00000000-0000-0000-0000-000000000002,3", "[2, 3]")])
def test_devices_are_chosen_until_the_first_use(visible: str, found: str):
    done = launched("-n", "1", "--virtual-gpus", "4", str(CASES), "sees_late", visible, found)
    assert done.returncode == 0, done.stderr


def test_memory_that_the_host_refuses_is_out_of_memory():
    done = launched("-n", "1", "--virtual-gpus", "1", "--no-poison", str(CASES), "refused_by_the_host")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused") == 2


@each("how", ["unisono run -n 1 --virtual-gpus 2", "UNISONO_VIRTUAL_GPUS"])
def test_a_program_starts_its_other_rank(how: str):
    with reserved() as port:
        words = [str(CASES), "starts_its_ranks", str(port)]
        if how == "UNISONO_VIRTUAL_GPUS":  # a Python that has Unisono installed
            environ = {**os.environ, how: "2"}
            command = [sys.executable, *words]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=HANG_S, check=False, env=environ
            )
        else:
            done = launched("-n", "1", "--virtual-gpus", "2", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ends") == 2


def test_hidden_devices():
    done = launched("-n", "1", "--virtual-gpus", "4", str(CASES), "hidden", CUDA_VISIBLE_DEVICES="")
    assert "sees 0 False" in done.stdout


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_a_fork_after_the_first_use_is_refused(machine: Any):
    ended = machine.run(CASES, arguments=["forks_after_use"])
    assert "Cannot re-initialize CUDA in forked subprocess" in ended.text


def test_too_late():
    command = [sys.executable, str(CASES), "enables_too_late"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert "before PyTorch is imported" in done.stderr


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path):
    done = launched("--virtual-gpus", "1", __file__, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "apt install g++" in done.stderr


@each(
    "words, says",
    [
        (("--virtual-gpus", "0"), "expected 1..64"),
        (("--virtual-gpus", "2", "--gpu-memory", "much"), "--gpu-memory does not fit"),
        (("--check-streams",), "need --virtual-gpus N"),
    ],
)
def test_flags_that_do_not_fit(words: tuple[str, ...], says: str):
    done = launched(*words, __file__)
    assert done.returncode == 2
    assert says in done.stderr


def test_the_plug_in_is_ready_before_pytorch(tmp_path: Path):
    (tmp_path / "conftest.py").write_text("import torch\n")
    shutil.copy(PROGRAMS / "plug_in_tests.py", tmp_path / "test_it.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--virtual-gpus",
        "3",
        str(tmp_path),
    ]
    if not importlib.metadata.entry_points(group="pytest11", name="unisono_virtual"):
        command[3:3] = ["-p", "unisono.virtual.plugin"]  # installed before there was one
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_what_is_swapped_to_the_host_trains():
    done = launched("--virtual-gpus", "2", str(CASES), "swapped")
    assert done.returncode == 0, done.stdout + done.stderr


def test_ranks_of_the_launcher():
    """The examples are in test_losses.py."""
    done = launched("--virtual-gpus", "2", str(CASES), "both_devices", "cpu:gloo,cuda:nccl")
    assert done.returncode == 0, done.stdout + done.stderr
