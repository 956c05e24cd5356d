"""Masks of Hugging Face's transformers on shapes as a run makes them.

A run reads its positions, finds one sequence in each row, and leaves the causal mask to the attention. On
shapes nothing can be read, so transformers makes a mask for rows of several sequences: other kernels run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["unpacked_rows"]

MODULE, NAME = "transformers.masking_utils", "find_packed_sequence_indices"


@contextlib.contextmanager
def unpacked_rows(runs_model: bool) -> Iterator[None]:
    """Each row is one sequence, where a run calls the model itself and no recorded program."""
    library: Any = sys.modules.get(MODULE)
    find = getattr(library, NAME, None)
    if not runs_model or find is None:
        yield
        return
    setattr(library, NAME, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(library, NAME, find)
