"""Where a program is while it is recorded: the line of its file, and whether a recomputation runs it."""

from __future__ import annotations

import linecache
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn

__all__ = ["PACKAGES", "draws_in_python", "is_recomputed", "line_now", "python_states"]

PACKAGES = (os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[2]) + os.sep)
CHECKPOINT = torch.utils.checkpoint.__file__
MODULE = nn.modules.module.__file__


def is_recomputed() -> bool:
    """Whether torch.utils.checkpoint runs this, and the innermost module has called it."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == CHECKPOINT:
            return True
        if code.co_name == "_call_impl" and code.co_filename == MODULE:
            return False
        frame = frame.f_back
    return False


def line_now() -> str:
    """Where the program is: the innermost line outside PyTorch and outside this package."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGES):
        frame = frame.f_back
    if frame is None:
        return ""
    name, number = frame.f_code.co_filename, frame.f_lineno
    return f"{name}:{number}: {linecache.getline(name, number).strip()}"


# ---- what Python draws ----


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
