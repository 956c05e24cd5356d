"""What pytest loads: the marker `ranks`, its fixtures, and `--virtual-gpus N`.

`--virtual-gpus` enables virtual GPUs before any test imports PyTorch. Workers of pytest-xdist, ranks, and
processes that tests start, have them, too. Everything else is imported when a test needs it.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

from unisono.testing import GROUPS

if TYPE_CHECKING:
    from unisono import Group
    from unisono.testing.groups import Groups
    from unisono.testing.pool import Pools

MARKER = """\
ranks(n, *, hosts=1, virtual_gpus=0, backend="unisono", timeout=None): run the test on n ranks; \
n, hosts and backend may be lists, of which each value makes a test. See docs/testing.md of Unisono."""

POOLS: pytest.StashKey[Pools] = pytest.StashKey()
LIMIT = pytest.StashKey[float]()
_ASKS = re.compile(r"""getfixture\(\s*["'](group|rank|process_group)["']""")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, those of `unisono run`."""
    group = parser.getgroup("unisono", "ranks and virtual GPUs of Unisono")
    group.addoption(
        "--virtual-gpus", type=int, default=0, metavar="N", help="run the tests on N virtual GPUs"
    )
    group.addoption("--gpu-memory", default="", metavar="M", help="memory of each, such as 16G")
    group.addoption("--no-poison", action="store_true", help="torch.empty does not fill new memory")
    group.addoption("--check-streams", action="store_true", help="report missing waits of streams")
    parser.addini("doctest_ranks", "ranks of a doctest that calls getfixture('group')", default="2")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Enable virtual GPUs before a conftest.py is imported."""
    _enable(early_config.known_args_namespace)


def pytest_configure(config: pytest.Config) -> None:
    """Enable virtual GPUs in a worker of pytest-xdist, which loads no initial conftest."""
    config.addinivalue_line("markers", MARKER)
    if hasattr(config, "workerinput"):
        _enable(config.option)


def _enable(options: Any) -> None:
    if not getattr(options, "virtual_gpus", 0):
        return
    from unisono.virtual import enable, enabled
    from unisono.virtual.environment import set_for_children

    if enabled() is not None:  # this process inherited them
        return
    if "torch" in sys.modules:
        raise pytest.UsageError("--virtual-gpus: another plug-in has imported PyTorch; load it later (-p)")
    how = {"poison": not options.no_poison, "check_streams": options.check_streams}
    enable(options.virtual_gpus, options.gpu_memory or 0, **how)
    memory = options.gpu_memory or "0"
    set_for_children(os.environ, options.virtual_gpus, memory, **how)  # noqa: TID251  (tests start processes)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Group:
    """The group of all ranks that run this test."""
    return _groups(request).group()


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """The number of this rank, from 0."""
    return _groups(request).run.rank


@pytest.fixture
def process_group(request: pytest.FixtureRequest) -> Any:
    """The default group of `torch.distributed` over all ranks that run this test."""
    return _groups(request).process_group()


def _groups(request: pytest.FixtureRequest) -> Groups:
    groups: Groups | None = request.config.stash.get(GROUPS, None)
    if groups is None:
        pytest.fail(f"the fixture {request.fixturename!r} needs @pytest.mark.ranks(n)", pytrace=False)
    return groups


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each value where an argument of the marker is a list."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    from unisono.testing.marker import LISTS, arguments

    for name, values in arguments(mark).items():
        if name in LISTS and isinstance(values, (list, tuple)):
            if name not in metafunc.fixturenames:
                metafunc.fixturenames.append(name)
            ids = [f"{value}-{name}" if isinstance(value, int) else str(value) for value in values]
            metafunc.parametrize(name, values, ids=ids)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the doctests that ask for ranks, and refuse wrong arguments of the marker."""
    for item in items:
        examples = getattr(getattr(item, "dtest", None), "examples", ())  # of a doctest
        if any(_ASKS.search(each.source) for each in examples) and not item.get_closest_marker("ranks"):
            item.add_marker(pytest.mark.ranks(int(config.getini("doctest_ranks"))))
        if item.get_closest_marker("ranks") is not None:
            from unisono.testing.marker import settings

            try:
                settings(item)
            except (TypeError, ValueError) as error:
                raise pytest.UsageError(f"{item.nodeid}: {error}") from None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a marked test on ranks; its fixtures live there. In a rank, pytest itself runs it."""
    config = item.config
    if item.get_closest_marker("ranks") is None or GROUPS in config.stash:
        return None
    from unisono.testing.pool import Pools

    config.stash.setdefault(POOLS, Pools(config)).run_test(item, nextitem, item.stash.get(LIMIT, None))
    return True


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Take the limit that pytest-timeout has for a marked test: `pool.py` ends it, with all stacks."""
    if item.get_closest_marker("ranks") is None:
        return None
    item.stash[LIMIT] = settings.timeout
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the ranks."""
    pools = session.config.stash.get(POOLS, None)
    if pools is not None:
        pools.close()
