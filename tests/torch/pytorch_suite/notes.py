"""What the tests cannot say by themselves: why one of PyTorch's does not pass, and what differs from Gloo."""

from __future__ import annotations

# PyTorch's tests that fail in one of the ways to run them, and why. Anything else that fails is an error.
REASONS: dict[str, dict[str, str]] = {
    "test_ddp_logging_data_cpu": {
        "gloo": 'the log of DDP says "unisono": a group that calls itself "gloo" is read by C++ as a '
        "ProcessGroupGloo. It passes as `unisono`"
    },
}

# Rows of the table that are neither "works" nor "not tested": (state, what to know).
NOTES: dict[str, tuple[str, str]] = {
    "Functions: monitored_barrier": (
        "differs",
        "a failure leaves the group whole; under the name `unisono` it is `group.monitored_barrier()`",
    ),
    "Functions: split_group": (
        "differs",
        "PyTorch wants an accelerator bound to the group, whatever the backend; use `new_group`",
    ),
    "Functions: shrink_group": ("not yet", "a group does not shrink; make another with `new_group`"),
    "SyncBatchNorm": ("differs", "PyTorch itself takes CUDA tensors only"),
    "bf16_compress_hook": ("differs", "PyTorch itself wants NCCL"),
    "bf16_compress_wrapper": ("differs", "PyTorch itself wants NCCL"),
    "BuiltinCommHookType": (
        "differs",
        "ALLREDUCE works; FP16_COMPRESS reads a future made in C++: use `default_hooks.fp16_compress_hook`",
    ),
    "batched_powerSGD_hook": ("differs", "PyTorch 2.13 itself fails, on Gloo too (`_orthogonalize`)"),
    "quantization_pertensor_hook": ("differs", "PyTorch itself fails on the CPU, on Gloo too"),
    "quantization_perchannel_hook": ("differs", "PyTorch itself fails on the CPU, on Gloo too"),
    "DTensor: rand": ("differs", "PyTorch itself has random DTensors on accelerators only"),
    "DTensor: randn": ("differs", "PyTorch itself has random DTensors on accelerators only"),
    "merge_remote_group": ("not yet", "groups are not merged"),
    "_register_on_completion_hook": (
        "not yet",
        "hooks on completion are NCCL's; `Work.get_future()` does it here",
    ),
}
