"""`pytest --virtual-gpus 4`: runs tests on virtual GPUs. It enables them before any test imports PyTorch.

Workers of pytest-xdist, and processes that tests start, have them, too.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, those of `unisono run`."""
    group = parser.getgroup("unisono", "virtual GPUs of Unisono")
    group.addoption(
        "--virtual-gpus", type=int, default=0, metavar="N", help="run the tests on N virtual GPUs"
    )
    group.addoption("--gpu-memory", default="", metavar="M", help="memory of each, such as 16G")
    group.addoption("--no-poison", action="store_true", help="torch.empty does not fill new memory")
    group.addoption("--check-streams", action="store_true", help="report missing waits of streams")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Enable them before a conftest.py is imported."""
    _enable(early_config.known_args_namespace)


def pytest_configure(config: pytest.Config) -> None:
    """Enable them in a worker of pytest-xdist, which loads no initial conftest."""
    if hasattr(config, "workerinput"):
        _enable(config.option)


def _enable(options: Any) -> None:
    if not getattr(options, "virtual_gpus", 0):
        return
    from unisono.virtual import enable
    from unisono.virtual.environment import set_for_children

    if "torch" in sys.modules:
        import pytest

        raise pytest.UsageError("--virtual-gpus: another plug-in has imported PyTorch; load it later (-p)")
    how = {"poison": not options.no_poison, "check_streams": options.check_streams}
    enable(options.virtual_gpus, options.gpu_memory or 0, **how)
    memory = options.gpu_memory or "0"
    set_for_children(os.environ, options.virtual_gpus, memory, **how)  # noqa: TID251  (tests start processes)
