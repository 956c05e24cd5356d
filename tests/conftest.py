"""For every test: nothing may be left behind. Also what to leave out on a machine that lacks something."""

import atexit
import functools
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before they are imported: their asserts count under python -O, too.
pytest.register_assert_rewrite(*(each.stem for each in Path(__file__).parent.glob("support/*.py")))

import effort
import failure_reports
import hosts
import launching
import leaks
import loops
import ports
import suite
import system

# Before NumPy and PyTorch are imported: their thread pools would slow ranks down that share two cores,
# and look like leaked threads.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# What a test starts would compile the package again: 0.1 s in each of two thousand processes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What a program prints is buffered, as on most machines.
os.environ.pop("PYTHONUNBUFFERED", None)
sys.dont_write_bytecode = False

# Nor may what somebody has measured on this machine choose other algorithms than elsewhere.
os.environ["UNISONO_CALIBRATION"] = "none"

# Examples of every property. `ci` draws the same ones each time. HYPOTHESIS_PROFILE=nightly draws thousands
# of new ones, keeps those that failed, and prints how to draw them again.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=200)
settings.register_profile("nightly", deadline=None, max_examples=5000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

HERE = Path(__file__).resolve().parent
NIGHTLY_TIMEOUT_S = 3600
ABOUT_TORCH = (HERE / "torch", HERE / "virtual")
# These begin first, so that no worker is left with one of them when the others are done. The longest first.
TAKE_LONG = (
    "test_bugs.py", "test_parallel_features.py", "test_pytest_ranks.py", "test_parallel_elastic.py",
    "test_groups_on_hosts.py",
    "test_torch_launch.py", "test_pytorch_suite.py", "test_bench_runs.py", "test_collectives.py",
    "test_chaos.py", "test_ranks_that_die.py", "test_planning.py", "test_replace.py", "test_pages.py",
    "test_survivors_on_hosts.py", "test_launch_endings.py", "test_checks.py", "test_parallel_compression.py",
    "test_backends.py", "test_replicas_survive.py", "test_calibrate_hosts.py", "test_torch_ends.py",
    "test_launch_on_hosts.py", "test_parallel_elastic_goes_back.py",
    "test_parallel_experts.py", "test_parallel_checkpoints.py", "test_elastic_jobs.py", "test_survivors.py",
    "test_parallel_graph.py", "test_examples.py", "test_compare.py", "test_torch_failures.py",
    "test_plan_space.py", "test_shrink_group.py", "test_process_ends.py", "test_zero_copy.py",
)  # fmt: skip
# Their tests run in one worker: each starts a Python for 1, 2 and 4 GPUs, which imports PyTorch.
SHARE_MACHINES = (
    "test_bugs.py", "test_compile.py", "test_losses.py", "test_mistakes.py", "test_names.py", "test_plans.py",
    "test_virtual.py",
)  # fmt: skip
HAVE_TORCH = importlib.util.find_spec("torch") is not None


def pytest_configure(config: pytest.Config) -> None:
    """Mark what the tests start, so that a grandchild whose parent died is seen as left behind."""
    failure_reports.pytest_configure(config)
    leaks.mark_descendants()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background by a shell: Ctrl-C is ignored, here and in whatever the tests start.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Say which tests this machine leaves out."""
    torch = "installed" if HAVE_TORCH else "not installed, the tests that need it are left out"
    return f"torch: {torch}; several hosts: {_why_no_hosts() or 'yes'}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadfile`: a file stays in one worker, and here some files do so together."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByMachine(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "machines" if file.rpartition("/")[2] in SHARE_MACHINES else file

    return ByMachine(config, log)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave these tests alone where PyTorch is missing: its modules could not even be imported."""
    return True if not HAVE_TORCH and collection_path in ABOUT_TORCH else None


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Put the longest files first, mark everything about PyTorch, and skip what this machine cannot run."""
    order = {name: number for number, name in enumerate(TAKE_LONG)}
    about_torch = tuple(f"{folder}/" for folder in ABOUT_TORCH)
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    for item in items:
        if str(item.path).startswith(about_torch):
            item.add_marker("torch")
        if settings.get_current_profile_name() == "nightly" and hasattr(item.function, "hypothesis"):
            item.add_marker(pytest.mark.timeout(NIGHTLY_TIMEOUT_S))
        elif not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(effort.TEST_S))
        reason = _missing(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let the garbage collector skip what pytest and PyTorch make: looking through it takes half of the time
    to collect, and 0.2 s later on.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # Python's end frees them; nanobind would tell Triton's as leaked
        gc.enable()


@functools.cache
def _why_no_hosts() -> str:
    return hosts.why_not()


def _missing(item: pytest.Item) -> str:
    if item.get_closest_marker("torch") and not HAVE_TORCH:
        return "needs PyTorch"
    if item.get_closest_marker("sweep") and "UNISONO_TEST_SWEEP" not in os.environ:
        return "takes long; make test-parallel runs it"
    if item.get_closest_marker("slow") and not effort.SLOW:
        return "takes long; make test-slow runs it"
    if item.get_closest_marker("texts") and "UNISONO_TEST_TEXTS" not in os.environ:
        return "takes minutes; make test-texts runs it"
    if item.get_closest_marker("root") and os.geteuid() != 0:
        return "needs root"
    if item.get_closest_marker("hosts") and _why_no_hosts():
        return _why_no_hosts()
    if item.get_closest_marker("gpu") and not Path("/dev/nvidia0").exists():
        return "needs a GPU"
    needs = (system.why_not(*mark.args) for mark in item.iter_markers("needs"))
    return "; ".join(filter(None, needs))


@pytest.fixture(params=loops.SPREADS)
def spread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where ranks are: all on one host, every one on its own, or every two on one. See `loops.everywhere`."""
    for name, value in loops.SPREADS[request.param].items():
        monkeypatch.setenv(name, value)
    return request.param


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[launching.Launcher]:
    with launching.launching(tmp_path) as made:
        yield made


@pytest.fixture
def port() -> Iterator[int]:
    """A port of this host that nobody else gets meanwhile."""
    with ports.reserved() as found:
        yield found


@pytest.fixture
def net() -> Iterator[hosts.Network]:
    """Two hosts."""
    with hosts.hosts(2) as network:
        yield network


@pytest.fixture(scope="session")
def forks() -> Iterator[suite.Forks]:
    """The Python whose forks are the ranks: PyTorch takes seconds to import."""
    made = suite.Forks()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaves a descriptor, thread, child process or file in /dev/shm behind."""
    before = leaks.snapshot()
    yield
    left = leaks.left_behind(before)
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)
