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
NOTES: dict[str, tuple[str, str]] = {}
