"""Where a program is while it is recorded: the line of its file, and whether a recomputation runs it."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

__all__ = ["PACKAGES", "is_recomputed", "line_now"]

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
