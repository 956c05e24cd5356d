"""What the tests cannot say by themselves: why one of PyTorch's does not pass, and what differs from Gloo."""

# PyTorch's tests that fail in one of the ways to run them, and why. Anything else that fails is an error.
REASONS: dict[str, dict[str, str]] = {
    "test_ddp_logging_data_cpu": {
        "gloo": 'DDP logs "unisono", because C++ casts a group called "gloo" to ProcessGroupGloo. '
        "The test passes as `unisono`"
    }
}

# The same, of tests that the newest PyTorch skips.
OLDER: dict[str, dict[str, str]] = {
    "test_barrier_timeout_arg": {
        "gloo": "expects a timeout after 1 ms from a barrier that the other ranks leave at once: the error "
        "names the rank that has left. It fails over Gloo, too, when they are quick; PyTorch 2.13 and "
        "later skip it"
    }
}

# PyTorch's tests that give the ranks a second or two for everything: a busy machine fails them, whatever the
# backend. They are tried again, alone.
TIGHT = ("test_barrier_timeout_global", "test_barrier_timeout_full_group", "test_monitored_barrier_gloo")

# Rows of the table whose state does not follow from the tests that ran: (state, what to know).
NOTES: dict[str, tuple[str, str]] = {
    "Functions: monitored_barrier": (
        "differs",
        "a failure leaves the group usable; as `unisono`, call `group.monitored_barrier()`",
    ),
    "Functions: split_group": (
        "differs",
        "PyTorch requires an accelerator bound to the group, for every backend; use `new_group`",
    ),
    "Functions: shrink_group": ("works", "the job's store and rank 0 may be gone"),
    "SyncBatchNorm": ("differs", "PyTorch itself accepts only CUDA tensors"),
    "bf16_compress_hook": ("differs", "PyTorch itself requires a build with NCCL, also for CPU tensors"),
    "bf16_compress_wrapper": ("differs", "PyTorch itself requires a build with NCCL, also for CPU tensors"),
    "batched_powerSGD_hook": ("differs", "PyTorch itself fails since 2.13, on Gloo too (`_orthogonalize`)"),
    "quantization_pertensor_hook": ("differs", "PyTorch itself fails on the CPU, on Gloo too"),
    "quantization_perchannel_hook": ("differs", "PyTorch itself fails on the CPU, on Gloo too"),
    "DTensor: rand": ("differs", "PyTorch itself has random DTensors only on accelerators"),
    "DTensor: randn": ("differs", "PyTorch itself has random DTensors only on accelerators"),
    "merge_remote_group": ("works", "also for groups without a common parent"),
    "_register_on_completion_hook": (
        "differs",
        "PyTorch has it for NCCL only; the error recommends `Work.get_future()`",
    ),
    "Functional collectives: batch_p2p_ops_inplace": (
        "not yet",
        (
            "requires a C++ backend, which a group in Python does not have (Gloo has one); "
            "`batch_isend_irecv` works. Only torch.compile with `enable_p2p_compilation` (off) calls it"
        ),
    ),
    "Functional collectives: backend_impl": ("no group", "an unused variable of PyTorch's module"),
    "load_sharded_optimizer_state_dict": (
        "differs",
        "requires CUDA if a rank has no part of a tensor, unless the group is called gloo (or replaces it)",
    ),
    "bound_device_id": ("differs", "None: a group is not bound to a device"),
    "unbox": ("works", "PyTorch's own, in C++; `check_what_a_group_answers` calls it"),
    "_enable_collectives_timing": ("needs a GPU", "times streams of NCCL"),
    "use_pg_for_symm_mem_rendezvous": ("needs a GPU", "symmetric memory"),
    "DistributedOptimizer": ("no group", "uses `torch.distributed.rpc`"),
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
            "with `offload_params=True` PyTorch requires an accelerator, on Gloo too (it pins memory); "
            "`CPUOffloadPolicy` of FSDP2 works"
        ),
    ),
    "context_parallel": (
        "works",
        (
            "on CPUs under `sdpa_kernel(SDPBackend.MATH)`, without a causal mask: PyTorch cannot shard "
            "the CPU's fused kernel, also on Gloo. `flex_attention` first compiles the mask with a C++ "
            "compiler, which takes a minute or more, also on Gloo"
        ),
    ),
}
