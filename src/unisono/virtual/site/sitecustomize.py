"""Python runs this at its start, in the processes of `unisono run --virtual-gpus` and in their children.

The folder of this file is the first one in their PYTHONPATH. It then runs the sitecustomize that it hides.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _hidden() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    path = [each for each in sys.path if os.path.abspath(each) != here]
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if found is not None and found.loader is not None:
        found.loader.exec_module(importlib.util.module_from_spec(found))


if os.environ.get("UNISONO_VIRTUAL_GPUS"):
    from unisono.virtual.startup import enable_at_start

    enable_at_start()
_hidden()
