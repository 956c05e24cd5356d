"""Virtual GPUs: what ranks see of them, the launcher's flags, memory, streams, the pytest plug-in."""

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from effort import cases, times
from loops import each
from ports import reserved
from python_runs import ran
from unisono import virtual
from unisono.torch import cuda

PROGRAMS = Path(__file__).parent / "programs"
CASES, LIKE_A_GPU = PROGRAMS / "gpu_cases.py", PROGRAMS / "like_a_gpu.py"
ATTENTION, GRAPHS = PROGRAMS / "attention_cases.py", PROGRAMS / "graph_cases.py"
SHRINKS, FUZZ = PROGRAMS / "shrinks_with_gpus.py", PROGRAMS.with_name("fuzz.py")
DRAWN = str(times(usual=300, long=1000))  # make sanitize-virtual draws 1000, too
WAYS_TO_SHRINK = "basic", "first", "aborted", "subgroup", "repeated"
# Of these the device changes least: test_shrink_group.py has them on the CPU.
OTHER_WAYS = "unbound", "several", "options", "validated"


def launched(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return ran("-m", "unisono", "run", *words, **environ)


@pytest.mark.parametrize(
    ("machine", "ranks", "program", "words", "says"),
    [
        (4, 4, CASES, ["each_rank_has_a_gpu"], "refused"),
        (4, 4, CASES, ["split_with_hooks"], ""),
        (2, 2, CASES, ["both_devices", "cpu:gloo,cuda:nccl"], ""),
        (2, 2, CASES, ["both_devices", "unisono"], ""),
        (2, 2, CASES, ["over_gloo"], ""),
        (1, 2, CASES, ["over_gloo"], ""),
        (4, 4, CASES, ["lists_as_one"], "refused"),
        (1, 1, CASES, ["books"], ""),
        (1, 1, CASES, ["ctc"], ""),
        (1, 1, CASES, ["histogram"], ""),
        (1, 1, CASES, ["poison_says_so"], ""),
        (1, 1, CASES, ["half_precision"], "refused"),
        (1, 1, CASES, ["old_code"], ""),
        (1, 1, CASES, ["profiled"], "refused"),
        *((1, 1, ATTENTION, [case], "") for case in ("fused", "of_sequences", "composed", "in_threads")),
        (2, 2, ATTENTION, ["over_ranks"], ""),
        (2, 2, CASES, ["swapped"], ""),
        *((1, 1, GRAPHS, [case], says) for case, says in (("memory", "freed"), ("pieces", "refused"))),
        (1, 1, GRAPHS, ["trains", "alone"], "the same"),
        *((2, 2, GRAPHS, ["trains", how], "the same") for how in ("ddp", "fsdp", "compiled")),
        (2, 2, GRAPHS, ["communicates"], "the same"),
        (1, 1, PROGRAMS / "determinism.py", [], ""),
        (1, 1, LIKE_A_GPU, [], "like a GPU"),
        *((2, 2, PROGRAMS / "swapped_parts.py", words, "") for words in cases([[]], long=[["many"]])),
        (4, 1, FUZZ, [DRAWN, "0"], f"{DRAWN} programs, 0 wrong, left in the books: 0 bytes"),
        *((4, 4, SHRINKS, [way], "fine") for way in cases(WAYS_TO_SHRINK, long=OTHER_WAYS)),
        *((2, 2, SHRINKS, [way], "fine") for way in cases([], long=(*WAYS_TO_SHRINK, *OTHER_WAYS))),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else str(value),
    indirect=["machine"],
)
def test_ranks_see_what_a_program_says(machine: Any, ranks: int, program: Path, words: list[str], says: str):
    ended = machine.run(program, size=ranks, arguments=words)
    assert not any(ended.codes), ended.text
    assert all(says in text for text in ended.printed), ended.text


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda.why_not()), reason=f"NOT RUN, a real GPU: {cuda.why_not()}")
def test_a_real_gpu_is_like_a_gpu():
    with reserved() as port:
        done = ran(LIKE_A_GPU, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert "like a GPU" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_two_ranks_never_share_the_last_memory(machine: Any, tmp_path: Path):
    ended = machine.run(PROGRAMS / "claims.py", size=2, arguments=[str(tmp_path / "board"), "30"])
    assert ended.codes == [0, 0], ended.text
    first, second = re.findall("had: ([01]+)", ended.text)
    assert "11" not in map("".join, zip(first, second, strict=True))
    assert "1" in first + second


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
@pytest.mark.parametrize("machine", [4], indirect=True)
def test_devices_are_chosen_until_the_first_use(machine: Any, visible: str, found: str):
    ended = machine.run(CASES, size=1, arguments=["sees_late", visible, found])
    assert not any(ended.codes), ended.text


def test_memory_that_the_host_refuses_is_out_of_memory():
    done = launched("-n", "1", "--virtual-gpus", "1", "--no-poison", str(CASES), "refused_by_the_host")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused") == 2


@each("how", ["unisono run -n 1 --virtual-gpus 2", "UNISONO_VIRTUAL_GPUS"])
def test_a_program_starts_its_other_rank(how: str):
    with reserved() as port:
        words = [str(CASES), "starts_its_ranks", str(port)]
        if how == "UNISONO_VIRTUAL_GPUS":  # a Python that has Unisono installed
            done = ran(*words, **{how: "2"})
        else:
            done = launched("-n", "1", "--virtual-gpus", "2", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ends") == 2


@pytest.mark.parametrize("machine", [4], indirect=True)
def test_hidden_devices(machine: Any):
    assert "sees 0 False" in machine.run(CASES, size=1, arguments=["hidden"], CUDA_VISIBLE_DEVICES="").text


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_a_fork_after_the_first_use_is_refused(machine: Any):
    ended = machine.run(CASES, arguments=["forks_after_use"])
    assert "Cannot re-initialize CUDA in forked subprocess" in ended.text


def test_too_late():
    pytest.importorskip("torch")
    with pytest.raises(RuntimeError, match="before PyTorch is imported"):
        virtual.enable(2)


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
    words = ["-q", "-p", "no:cacheprovider", "--virtual-gpus", "3", tmp_path]
    if not importlib.metadata.entry_points(group="pytest11", name="unisono_virtual"):
        words[:0] = ["-p", "unisono.testing.plugin"]  # installed before there was one
    done = ran("-m", "pytest", *words, cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_ranks_of_the_launcher():
    """The examples are in test_losses.py."""
    done = launched("--virtual-gpus", "2", str(CASES), "both_devices", "cpu:gloo,cuda:nccl")
    assert done.returncode == 0, done.stdout + done.stderr
