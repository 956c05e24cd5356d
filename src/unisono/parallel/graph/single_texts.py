"""Hugging Face's search for packed texts, in a step without values.

Their decoders read from the positions whether a row has several texts, and make a mask if so. On shapes
there is nothing to read, so they make one in any case: a dry run would have a mask, and grouped heads
repeated, which a run has not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["may_be_packed", "searches_packed_texts", "single_texts"]

MODULE, SEARCH = "transformers.masking_utils", "find_packed_sequence_indices"


def may_be_packed(inputs: Any) -> bool:
    """Whether inputs say where the texts of a row begin."""
    return isinstance(inputs, Mapping) and inputs.get("position_ids") is not None


def searches_packed_texts() -> bool:
    """Whether a model of this process may search."""
    return hasattr(sys.modules.get(MODULE), SEARCH)


@contextmanager
def single_texts(single: bool) -> Iterator[None]:
    """Have the search find nothing where each row is a single text."""
    masks: Any = sys.modules.get(MODULE)
    if not single or not searches_packed_texts():
        yield
        return
    search = getattr(masks, SEARCH)
    setattr(masks, SEARCH, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(masks, SEARCH, search)
