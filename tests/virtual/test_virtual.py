"""Virtual GPUs from outside: the launcher's flags, memory, streams, the pytest plug-in."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from loops import each

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "virtual"


def run(tmp_path: Path, program: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program under `unisono run`."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    return launched(*flags, str(script), **environ)


def launched(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "run", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, **environ}
    )


@pytest.mark.parametrize("machine", [4], indirect=True)
def test_four_ranks_see_four_gpus(machine: Any):
    ended = machine.run(
        """
        import os, torch, torch.distributed as dist
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        x = torch.ones(3).cuda()
        dist.all_reduce(x)
        assert x.device.index == rank and x.tolist() == [4.0] * 3, x
        assert torch.cuda.device_count() == dist.get_world_size() == 4
        try:
            dist.all_reduce(torch.ones(3))
        except RuntimeError as error:
            assert "No backend type associated with device type cpu" in str(error)
            print("refused")
        dist.destroy_process_group()
        """
    )
    assert not any(ended.codes), ended.text
    assert ended.text.count("refused") == 4


@pytest.mark.parametrize("machine", [2], indirect=True)
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "unisono"])
def test_both_devices_in_one_group(machine: Any, backend: str):
    ended = machine.run(
        f"""
        import torch, torch.distributed as dist
        dist.init_process_group({backend!r})
        for device in ("cpu", f"cuda:{{dist.get_rank()}}"):
            x = torch.ones(3, device=device)
            dist.all_reduce(x)
            assert x.tolist() == [2.0] * 3, x
        """
    )
    assert not any(ended.codes), ended.text


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_books_are_those_of_the_caching_allocator(machine: Any):
    ended = machine.run(
        """
        import torch
        x = torch.ones(10, device="cuda")                       # a block of 512 bytes of a segment of 2 MiB
        assert torch.cuda.memory_allocated() == 512 and torch.cuda.memory_reserved() == 2 << 20
        y = torch.ones(1 << 20, device="cuda")                  # 4 MiB of a segment of 20 MiB
        assert torch.cuda.memory_allocated() == 512 + (4 << 20) and torch.cuda.memory_reserved() == 22 << 20
        z = torch.ones(3 << 20, device="cuda")                  # 12 MiB: fits into what is left of it
        assert torch.cuda.memory_reserved() == 22 << 20
        del y, z
        assert torch.cuda.memory_allocated() == 512 and torch.cuda.max_memory_allocated() == 512 + (16 << 20)
        stats = torch.cuda.memory_stats()
        assert stats["allocation.all.allocated"] == 3 and stats["segment.large_pool.current"] == 1
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.memory_reserved() == 2 << 20 and torch.cuda.max_memory_allocated() == 512
        free, total = torch.cuda.mem_get_info()
        assert total == 256 << 20 and total - free == 2 << 20
        assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
        """
    )
    assert not any(ended.codes), ended.text


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_a_stream_that_waits_is_no_mistake(machine: Any):
    ended = machine.run(
        """
        import torch
        x, s = torch.zeros(4, device="cuda"), torch.cuda.Stream()
        s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            x.add_(1)
        torch.cuda.current_stream().wait_stream(s)
        assert x.sum().item() == 4
        """,
        TORCH_CUDA_SANITIZER="1",
    )
    assert not any(ended.codes), ended.text


def test_flags_of_the_launcher(tmp_path: Path):
    done = run(
        tmp_path,
        """
        import os, torch
        from unisono.virtual import enabled
        assert torch.cuda.mem_get_info(0)[1] == 1 << 30
        assert enabled().check_streams and not enabled().poison
        assert torch.empty(1000, device="cuda").isnan().sum() < 1000
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2
        assert torch.cuda.get_device_properties(0).pci_bus_id == 4  # the machine's number 3
        """,
        "-n", "1", "--virtual-gpus", "4", "--gpu-memory", "1G", "--no-poison", "--check-streams",
        CUDA_VISIBLE_DEVICES="3,1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_hidden_devices(tmp_path: Path):
    program = "import torch; print('sees', torch.cuda.device_count(), torch.cuda.is_available())"
    done = run(tmp_path, program, "-n", "1", "--virtual-gpus", "4", CUDA_VISIBLE_DEVICES="")
    assert "sees 0 False" in done.stdout


@pytest.mark.parametrize("machine", [1], indirect=True)
def test_a_fork_after_the_first_use_is_refused(machine: Any):
    ended = machine.run(
        """
        import os, torch
        torch.ones(1, device="cuda")
        if os.fork() == 0:
            try:
                torch.ones(1, device="cuda")
            except RuntimeError as error:
                print(error, flush=True)
            os._exit(0)
        os.wait()
        """
    )
    assert "Cannot re-initialize CUDA in forked subprocess" in ended.text


def test_too_late(tmp_path: Path):
    code = "import torch, unisono.virtual as v; v.enable(2)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "before PyTorch is imported" in done.stderr


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path):
    code = "from unisono.virtual.start import prepare; prepare()"
    environ = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environ
    )
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
    (tmp_path / "test_it.py").write_text(
        "import torch\ndef test_it():\n    assert torch.ones(2, device='cuda:2').device.index == 2\n"
    )
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_an_example_under_the_launcher():
    """The others are in test_losses.py."""
    done = launched("--virtual-gpus", "2", str(EXAMPLES / "ddp.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loss" in done.stdout
