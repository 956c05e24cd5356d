"""What the tests cannot say by themselves: why one of PyTorch's does not pass, and what differs from Gloo."""

from __future__ import annotations

# PyTorch's tests that fail in one of the ways to run them, and why. Anything else that fails is an error.
REASONS: dict[str, dict[str, str]] = {
    "test_ddp_logging_data_cpu": {
        "gloo": 'the log of DDP says "unisono": a group that calls itself "gloo" is read by C++ as a '
        "ProcessGroupGloo. It passes as `unisono`"
    },
}

# PyTorch's tests that give the ranks a second or two for everything: a busy machine fails them, whatever the
# backend. They are tried again, alone.
TIGHT = ("test_barrier_timeout_global", "test_barrier_timeout_full_group", "test_monitored_barrier_gloo")

# Rows of the table whose state does not follow from the tests that ran: (state, what to know).
NOTES: dict[str, tuple[str, str]] = {
    "Functions: monitored_barrier": (
        "differs",
        "a failure leaves the group whole; under the name `unisono` it is `group.monitored_barrier()`",
    ),
    "Functions: split_group": (
        "differs",
        "PyTorch wants an accelerator bound to the group, whatever the backend; use `new_group`",
    ),
    "Functions: shrink_group": (
        "differs",
        (
            "PyTorch has it for NCCL only, and puts the rest behind a `ProcessGroup` that takes "
            "backends made in C++; use `new_group(ranks)`, after a death `init_process_group`"
        ),
    ),
    "SyncBatchNorm": ("differs", "PyTorch itself takes CUDA tensors only"),
    "bf16_compress_hook": (
        "differs",
        "PyTorch itself wants a build with NCCL, which takes it on CPU tensors too",
    ),
    "bf16_compress_wrapper": (
        "differs",
        "PyTorch itself wants a build with NCCL, which takes it on CPU tensors too",
    ),
    "batched_powerSGD_hook": ("differs", "PyTorch 2.13 itself fails, on Gloo too (`_orthogonalize`)"),
    "quantization_pertensor_hook": ("differs", "PyTorch itself fails on the CPU, on Gloo too"),
    "quantization_perchannel_hook": ("differs", "PyTorch itself fails on the CPU, on Gloo too"),
    "DTensor: rand": ("differs", "PyTorch itself has random DTensors on accelerators only"),
    "DTensor: randn": ("differs", "PyTorch itself has random DTensors on accelerators only"),
    "merge_remote_group": ("works", "also of groups that do not know of each other"),
    "_register_on_completion_hook": (
        "differs",
        "PyTorch has it for NCCL only, not for Gloo; refused, with a hint at `Work.get_future()`",
    ),
    "Functional collectives: batch_p2p_ops_inplace": (
        "not yet",
        (
            "asks for a backend made in C++, which a group made in Python does not have (Gloo has one); "
            "`batch_isend_irecv` works. Only torch.compile with `enable_p2p_compilation` (off) calls this"
        ),
    ),
    "Functional collectives: backend_impl": ("no group", "a variable left over in PyTorch's module"),
    "load_sharded_optimizer_state_dict": (
        "differs",
        "wants CUDA where a rank has no part of a tensor, unless the group is called gloo (replaced, it is)",
    ),
    "bound_device_id": ("differs", "None: a group is bound to no device"),
    "unbox": ("works", "PyTorch's own, in C++; called by `check_what_a_group_answers`"),
    "_enable_collectives_timing": ("needs a GPU", "times NCCL's streams"),
    "use_pg_for_symm_mem_rendezvous": ("needs a GPU", "symmetric memory"),
    "DistributedOptimizer": ("no group", "goes over `torch.distributed.rpc`"),
    **dict.fromkeys(
        ("DistBackendError", "DistError", "DistNetworkError", "DistStoreError", "QueueEmptyError"),
        (
            "no group",
            "raised by NCCL and by PyTorch's stores; a group raises `PeerLost`, `Timeout`, `Mismatch`",
        ),
    ),
    "CPUOffload": (
        "differs",
        (
            "with `offload_params=True` PyTorch itself wants an accelerator, on Gloo too (it pins memory); "
            "`CPUOffloadPolicy` of FSDP2 works"
        ),
    ),
    "context_parallel": (
        "works",
        (
            "on CPUs under `sdpa_kernel(SDPBackend.MATH)`, without a causal mask: PyTorch cannot shard "
            "the CPU's fused kernel, on Gloo neither. With `flex_attention` a C++ compiler makes the mask "
            "first, which takes a minute or more, on Gloo too"
        ),
    ),
}
