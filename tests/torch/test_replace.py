"""No import in the script: PyTorch's autoload, and Unisono in the place of gloo. With real launchers."""

from importlib.util import find_spec

import pytest

import suite
from ports import reserved
from python_runs import ran

PROGRAM = str(suite.HERE / "programs" / "replaced.py")
AUTOLOADED = str(suite.HERE / "programs" / "autoloaded.py")


def test_autoload_registers_and_loads_no_engine():
    assert ran(AUTOLOADED).stdout == "True []\n"
    assert ran(AUTOLOADED, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout == "False []\n"
    assert ran(AUTOLOADED, "unisono.torch").stdout == "True []\n"


def test_import_torch_survives_a_wrong_variable():
    done = ran("-W", "always", AUTOLOADED, UNISONO_REPLACE="glo", RANK="nonsense")
    assert done.returncode == 0
    assert "UNISONO_REPLACE is malformed: got 'glo', expected gloo" in done.stderr
    assert "nonsense" not in done.stderr


def test_gloo_is_replaced_under_unisono_run():
    command = ["-m", "unisono", "run", "-n", "2", "--replace", "gloo", "--master-port"]
    with reserved(6) as port:
        done = ran(*command, str(port), PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fine") == 2


def test_gloo_is_replaced_under_torchrun():
    arguments = ["--standalone", "--nproc-per-node", "2", PROGRAM]
    with reserved(6) as port:
        done = ran("-m", "torch.distributed.run", *arguments, str(port), UNISONO_REPLACE="gloo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fine") == 2


def test_without_autoload_the_launcher_refuses():
    done = ran("-m", "unisono", "run", "--replace", "gloo", PROGRAM, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 2
    assert "unset TORCH_DEVICE_BACKEND_AUTOLOAD" in done.stderr


needs_ray = pytest.mark.skipif(  # importing Ray here would start its threads
    not (find_spec("ray") and find_spec("pandas")), reason="needs ray[train], which is not installed"
)


@pytest.mark.slow
@needs_ray
def test_what_a_rank_on_ray_raises_reaches_the_driver(tmp_path):
    program = str(suite.HERE / "programs" / "failing_on_ray.py")
    done = ran(program, str(tmp_path), "3", RAY_worker_niceness="0")  # else 15
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fine" in done.stdout
