"""The log: what it says, where to, and that it can be changed in a running job."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import unisono as un
from unisono.engine.environment import env

PROGRAM = Path(__file__).resolve().parent / "programs" / "is_logged.py"


def _run(folder: Path, **environment: str) -> str:
    environment = {
        **{k: v for k, v in os.environ.items() if "DEBUG" not in k},
        "AFTERWARDS": f"{folder}/after.%r",
        **environment,
    }
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _lines(text: str, rank: int) -> list[str]:
    return re.findall(rf"\S+:\d+ rank {rank} unisono (\w+ \w+: .*)", text)


def test_a_job_says_what_it_is_made_of_and_how_its_calls_run(tmp_path: Path) -> None:
    text = _run(tmp_path, UNISONO_LOG="info")
    for rank in range(2):
        lines = _lines(text, rank)
        assert f"INFO init: unisono {un.__version__}" in lines[0]
        assert re.search(r"INFO env: settings: .*log = info \(UNISONO_LOG\)", "\n".join(lines))
        assert any(f"init: group world: rank {rank} of 2; host " in line for line in lines)
        assert any("net: group world: 1 rank by shared memory" in line for line in lines)
        calls = [line for line in lines if "coll: " in line]
        small = "group world: all_reduce SUM float32[4] (16 bytes)"
        assert len(calls) == 3
        assert calls[0].startswith(f"INFO coll: {small}: one_shot (one host; predicted ")
        assert "broadcast float64[262144] (2097152 bytes): direct" in calls[1]
        assert calls[2] == f"INFO coll: {small}: ring (asked for by the call)"
        after = _lines((tmp_path / f"after.{rank}").read_text(), rank)
        assert after == [f"DEBUG coll: {small}: one_shot"]


def test_other_libraries_words_between_hosts_into_a_file(tmp_path: Path) -> None:
    given = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,COLL,P2P,NET", "UNISONO_RANKS_PER_HOST": "1"}
    said = _run(tmp_path, UNISONO_LOG_FILE=f"{tmp_path}/log.%h.%r", **given)
    assert "INFO" not in said
    lines = _lines((tmp_path / f"log.{os.uname().nodename}.1").read_text(), 1)
    assert any(line.startswith("INFO net: rank 1 listens on ") for line in lines)
    assert any(line.startswith("INFO net: group world: 1 rank by TCP") for line in lines)
    assert any("the cheapest between hosts of leaders " in line for line in lines)
    assert not any(" env: " in line for line in lines)
    for words in ("WARN", "VERSION", "off", "nonsense"):
        assert not _lines(_run(tmp_path, NCCL_DEBUG=words), 0)


def test_a_signal_raises_the_level(tmp_path: Path) -> None:
    lines = _lines(_run(tmp_path, UNISONO_LOG_SIGNAL="USR2"), 0)
    assert [line.partition(" (")[0] for line in lines] == [
        "INFO coll: group world: all_reduce SUM float32[4]"
    ]


def test_words_of_the_environment() -> None:
    assert env.read({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}).log == "debug"
    assert env.read({"NCCL_DEBUG": "WARN", "UNISONO_LOG": "debug"}).log == "debug"
    assert env.read({"NCCL_DEBUG_SUBSYS": "^coll,net"}).log_subsystems == ("init", "env", "elastic")
    assert env.read({"NCCL_DEBUG_SUBSYS": "ALL"}).log_subsystems == env.LOG_SUBSYSTEMS
    for name in ("UNISONO_LOG", "UNISONO_LOG_SIGNAL"):
        with pytest.raises(ValueError, match=f"{name} is malformed"):
            env.read({name: "KILL"})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("loud",), ValueError),
        ((1,), TypeError),
        (("info", 3), TypeError),
        (("info", "", ["p2p"]), ValueError),
    ],
)
def test_wrong_arguments(arguments: tuple[object, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        un.log(*arguments)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
