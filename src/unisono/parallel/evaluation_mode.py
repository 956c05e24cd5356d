"""The mode in which a run evaluates: without gradients, and out of the caller's `torch.inference_mode()`.

Parameters that are gathered in inference mode would be inference tensors, on which no later step could train.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def evaluating() -> Iterator[None]:
    """No gradients, and no inference tensors. Also a decorator."""
    with torch.inference_mode(False), torch.no_grad():  # the first one alone would switch gradients on
        yield
