"""Virtual GPUs from outside: the launcher's flags, memory, streams, the pytest plug-in, the examples."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import textwrap
from pathlib import Path

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


def test_four_ranks_see_four_gpus(tmp_path: Path):
    done = run(
        tmp_path,
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
        """,
        "--virtual-gpus", "4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused") == 4


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "unisono"])
def test_both_devices_in_one_group(tmp_path: Path, backend: str):
    done = run(
        tmp_path,
        f"""
        import torch, torch.distributed as dist
        dist.init_process_group({backend!r})
        for device in ("cpu", f"cuda:{{dist.get_rank()}}"):
            x = torch.ones(3, device=device)
            dist.all_reduce(x)
            assert x.tolist() == [2.0] * 3, x
        """,
        "--virtual-gpus", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_ranks_that_call_different_things_all_raise(tmp_path: Path):
    done = run(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(3 + rank, device=f"cuda:{rank}"))
        """,
        "--virtual-gpus", "2",
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.count("all_reduce(float32[4], SUM") >= 1
    assert done.stderr.count("all_reduce(float32[3], SUM") >= 1


def test_every_rank_on_device_0_runs_out_of_its_memory(tmp_path: Path):
    done = run(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("nccl")
        x = torch.ones(300 << 20, dtype=torch.uint8).cuda()
        dist.barrier(device_ids=[0])
        dist.barrier(device_ids=[0])
        """,
        "--virtual-gpus", "4", "--gpu-memory", "1G", "--no-poison",
    )  # fmt: skip
    assert done.returncode != 0
    assert "GPU 0 has a total capacity of 1024.00 MiB of which 124.00 MiB is free. Process" in done.stderr


def test_books_are_those_of_the_caching_allocator(tmp_path: Path):
    done = run(
        tmp_path,
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
        assert total == 16 << 30 and total - free == 2 << 20
        assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
        """,
        "-n", "1", "--virtual-gpus", "1", "--gpu-memory", "16G",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


STREAMS = """
    import torch
    x, s = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    {wait}
    with torch.cuda.stream(s):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(s)
    print(x.sum().item())
"""


def test_a_missing_wait_is_reported_with_both_places(tmp_path: Path):
    flags = ("-n", "1", "--virtual-gpus", "1", "--check-streams")
    wrong = run(tmp_path, STREAMS.format(wait=""), *flags)
    assert wrong.returncode != 0
    assert "CUDASanitizerErrors" in wrong.stderr
    assert 'program.py", line 3' in wrong.stderr
    assert 'program.py", line 6' in wrong.stderr
    right = run(tmp_path, STREAMS.format(wait="s.wait_stream(torch.cuda.current_stream())"), *flags)
    assert right.returncode == 0, right.stderr
    assert "4.0" in right.stdout


def test_new_memory_is_poisoned_unless_told(tmp_path: Path):
    program = "import torch; print(torch.empty(1000, device='cuda').isnan().all().item())"
    assert "True" in run(tmp_path, program, "-n", "1", "--virtual-gpus", "1").stdout
    assert "False" in run(tmp_path, program, "-n", "1", "--virtual-gpus", "1", "--no-poison").stdout


def test_visible_devices(tmp_path: Path):
    program = "import torch; print('sees', torch.cuda.device_count(), torch.cuda.is_available())"
    flags = ("-n", "1", "--virtual-gpus", "4")
    assert "sees 2 True" in run(tmp_path, program, *flags, CUDA_VISIBLE_DEVICES="3,1").stdout
    assert "sees 0 False" in run(tmp_path, program, *flags, CUDA_VISIBLE_DEVICES="").stdout


def test_a_fork_after_the_first_use_is_refused(tmp_path: Path):
    done = run(
        tmp_path,
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
        """,
        "-n", "1", "--virtual-gpus", "1",
    )  # fmt: skip
    assert "Cannot re-initialize CUDA in forked subprocess" in done.stdout


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


@pytest.mark.parametrize(
    "name, flags",
    [
        ("ddp", ("--virtual-gpus", "2")),
        ("amp", ("-n", "1", "--virtual-gpus", "1")),
        ("fsdp2", ("--virtual-gpus", "2")),
        ("tensor_pipeline", ("--virtual-gpus", "4")),
        ("one_process", ("-n", "1", "--virtual-gpus", "2")),
    ],
)
def test_examples(name: str, flags: tuple[str, ...]):
    done = launched(*flags, str(EXAMPLES / f"{name}.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loss" in done.stdout
