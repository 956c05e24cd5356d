"""Random numbers of Python and NumPy: a model that draws them runs another program each time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

__all__ = ["draws_in_python", "python_states"]


def draws_in_python(model: str) -> str:
    """The error of a model whose draws decide what it does."""
    return (
        f"{model} draws numbers from Python's random or NumPy while it runs, so it does not run one program. "
        "Draw them outside, and give them to it"
    )


def python_states() -> Any:
    """Of the generators whose numbers decide what Python does."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), rest
