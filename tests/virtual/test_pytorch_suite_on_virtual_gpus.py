"""Some of PyTorch's tests for NCCL, on two virtual GPUs: one of each kind. `make test-torch` runs all."""

import json
from pathlib import Path

import pytest
import torch

from effort import LONG
from python_runs import ran

pytest.importorskip("expecttest", reason="PyTorch's tests need it")

RUN = Path(__file__).resolve().parents[1] / "torch" / "pytorch_suite" / "run_pytorch_suite.py"
SOME = (
    "test_all_reduce_sum_cuda",
    "test_all_reduce_sum_cuda_async",
    "test_broadcast_cuda",
    "test_reduce_sum_cuda",
    "test_all_gather_v_cuda",
    "test_reduce_scatter_v_cuda",
    "test_all_to_all_single_unequal_split_cuda",
    "test_batch_isend_irecv_nccl",
    "test_send_recv_nccl",
    "test_barrier_cuda",
    "test_nccl_backend_bool_allreduce",
    "test_all_gather_object_default_pg",
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_ddp_comm_hook_logging",
    "test_DistributedSampler_padding",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_control_flow_different_across_ranks",
)


@pytest.mark.skipif(bool(torch.version.cuda) and not LONG, reason="takes long; make test-long runs it")
def test_nccl(tmp_path: Path):
    out, log = tmp_path / "out.json", tmp_path / "log"
    # PyTorch's CUDA build uses its devices when the tests are imported: no fork may use them afterwards.
    tests = ["--spawn", SOME[0]] if torch.version.cuda else SOME
    command = [str(RUN), "nccl", "--world-size", "2", "--out", str(out), "--log", str(log), *tests]
    done = ran(*command)
    assert out.exists(), done.stdout + log.read_text(errors="replace")[-3000:]
    failed = {
        name: end["reason"] for name, end in json.loads(out.read_text()).items() if end["outcome"] != "passed"
    }
    assert not failed
