"""The machine's figures: measured, kept, shown; files that are no good; all ranks take those of rank 0."""

import json
import os
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from effort import HANG_S
from loops import each
from unisono.commands import calibrate
from unisono.commands.calibrate.measure import buffer_sizes, cache_sizes, measure
from unisono.engine.bootstrap.engine import EngineSettings, open_engine
from unisono.engine.costs import machine, tuner
from unisono.engine.costs.machine import DEFAULTS, MachineCalibration
from unisono.engine.costs.plan_cost import shared_seconds
from unisono.engine.costs.tuner import Tuner
from unisono.engine.environment import env
from unisono.engine.group.native import NativeGroup
from unisono.engine.store import HashStore
from unisono.plans import make

HERE = msgspec.structs.replace(DEFAULTS, machine=machine.identity(), cores=2)


def settings(place: Path) -> env.Settings:
    return env.Settings(cache_home=str(place))


def command(*words: str) -> int:
    options = {name: f"--{name}" in words for name in ("refresh", "again", "json")}
    return calibrate.main(Namespace(**options, hosts=False, compute=False, output=None))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in which the command and groups look."""
    monkeypatch.delenv("UNISONO_CALIBRATION")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


# ---- the file ------------------------------------------------------------------------------------------


def test_what_was_saved_is_recalled_and_is_this_users_alone(tmp_path: Path):
    file = machine.cache_file(settings(tmp_path))
    machine.save(HERE, file)
    assert machine.recall(settings(tmp_path)) == machine.LoadedCalibration(HERE, str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(file.parent) == [file.name]


def test_without_a_file_there_are_the_defaults(tmp_path: Path):
    found = machine.recall(settings(tmp_path))
    assert found.note == ""
    assert not found.calibration.measured_here
    assert found.calibration.cores == len(os.sched_getaffinity(0))
    machine.save(HERE, machine.cache_file(settings(tmp_path)))
    nothing = env.Settings(cache_home=str(tmp_path), calibration="none")
    assert not machine.recall(nothing).calibration.measured_here


def test_a_folder_of_caches_is_taken_as_it_is_written():
    file = machine.cache_file(env.Settings(cache_home="~/x"))
    assert file is not None
    assert file.parent == Path("~/x/unisono")


def file_of(calibration: MachineCalibration, version: int = machine.VERSION) -> bytes:
    return msgspec.json.encode({"version": version, "calibration": msgspec.to_builtins(calibration)})


@each(
    ("content", "note"),
    [
        (b"", "is damaged"),
        (b"\xff\xfe\x00", "is damaged"),
        (b'{"version": 1', "is damaged"),
        (b"[]", "is damaged"),
        (file_of(HERE)[: 1 << 6], "is damaged"),
        (file_of(HERE) + b" " * (1 << 16) + b"x", ""),
        (file_of(HERE, version=2), "of another machine or version"),
        (file_of(msgspec.structs.replace(HERE, machine="other")), "of another machine"),
        (file_of(msgspec.structs.replace(HERE, flag_s=-1.0)), "no machine has"),
        (file_of(msgspec.structs.replace(HERE, tcp=0.0)), "no machine has"),
        (file_of(HERE).replace(b'"cores":2', b'"cores":"two"'), "is damaged"),
    ],
)
def test_a_bad_file_is_ignored_with_a_note(tmp_path: Path, content: bytes, note: str):
    file = tmp_path / "calibration"
    file.write_bytes(content)
    calibration, said = machine.load(file)
    assert (calibration is None) == bool(note)
    assert note in said


def test_what_is_no_file_is_ignored_with_a_note(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in machine.load(tmp_path / "pipe")[1]
    assert machine.load(tmp_path)[1]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "cannot be read" in machine.load(tmp_path / "loop")[1]


def test_a_place_that_cannot_be_written_to_is_told(cache: Path, capsys: pytest.CaptureFixture[str],
                                                   monkeypatch: pytest.MonkeyPatch):  # fmt: skip
    monkeypatch.setattr("unisono.commands.calibrate.measure.measure", lambda: HERE)
    (cache / "unisono").write_text("in the way")
    assert command() == 0
    told = capsys.readouterr()
    assert "not kept" in told.err
    assert "2 cores" in told.out


# ---- the command ---------------------------------------------------------------------------------------


def test_the_command_measures_once_shows_and_refreshes(cache: Path, capsys: pytest.CaptureFixture[str],
                                                       monkeypatch: pytest.MonkeyPatch):  # fmt: skip
    assert command("--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert first["machine"] == machine.identity()
    assert command() == 0
    shown = capsys.readouterr().out
    assert first["measured"] in shown
    assert "GB/s" in shown
    again = msgspec.structs.replace(HERE, measured="2026-01-01T00:00:00+00:00")  # seconds of all cores less
    monkeypatch.setattr("unisono.commands.calibrate.measure.measure", lambda: again)
    file = machine.cache_file(env.read())
    file.write_text("rubbish")
    assert command("--json") == 0
    told = capsys.readouterr()
    assert "is damaged" in told.err
    assert machine.load(file)[0] == again == msgspec.convert(json.loads(told.out), MachineCalibration)
    machine.save(HERE, file)
    assert command("--again") == 2 and "--again needs --compute" in capsys.readouterr().err
    assert command("--refresh", "--json") == 0
    assert machine.load(file)[0] == again
    assert json.loads(capsys.readouterr().out)["measured"] == again.measured


def test_a_malformed_setting_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("UNISONO_SPIN_US", "soon")
    assert command() == 2
    assert "UNISONO_SPIN_US is malformed" in capsys.readouterr().err


def test_measured_figures_are_those_of_a_machine(tmp_path: Path):
    found, file = measure(), tmp_path / "measured.json"
    machine.save(found, file)
    assert machine.load(file) == (found, "")
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.measured_here


def test_buffers_lie_where_they_should():
    own, shared = cache_sizes()
    small, middle, large = buffer_sizes(own, shared, 2)
    assert small < own <= middle <= large
    assert buffer_sizes(1 << 20, 36 << 20, 2) == (1 << 18, 9 << 18, 64 << 20)
    assert buffer_sizes(1 << 20, 256 << 20, 128)[2] == 16 << 20


# ---- choosing ------------------------------------------------------------------------------------------


def test_levels_of_memory():
    assert HERE.level(1 << 20) == "cache"
    assert HERE.level(2 << 20) == "shared_cache"
    assert HERE.level(32 << 20) == "memory"


def test_a_quicker_machine_has_lower_prices():
    plan = make("all_reduce", "two_shot", 4, 0, ())
    slow = msgspec.structs.replace(HERE, flag_s=10 * HERE.flag_s, cores=4)
    quick = msgspec.structs.replace(HERE, cores=4)
    for nbytes in (4, 1 << 20, 64 << 20):
        assert shared_seconds(plan, nbytes, quick) < shared_seconds(plan, nbytes, slow)
        assert shared_seconds(plan, nbytes, quick) < shared_seconds(plan, nbytes, HERE)  # crowded


def test_sockets_choose_between_hosts():
    hosts = (0, 0, 1, 1)
    near = msgspec.structs.replace(HERE, tcp_s=1e-7)
    far = msgspec.structs.replace(HERE, tcp_s=1e-2)
    sizes = [4 << shift for shift in range(0, 26, 2)]
    chosen = [[Tuner(4, hosts, one).choose("all_reduce", size) for size in sizes] for one in (near, far)]
    assert chosen[0] != chosen[1]
    assert tuner.edges(DEFAULTS) == (tuner.INSIDE, tuner.BETWEEN, tuner.REDUCING_S_PER_BYTE)
    assert far.between_networks().tcp_s == DEFAULTS.tcp_s


def test_a_choice_is_explained():
    choice = Tuner(2, (), HERE).explain("all_reduce", 4)
    assert choice.algorithm == "one_shot"
    assert 0 < choice.seconds < 1e-3
    assert choice.calibrated
    with pytest.raises(ValueError, match="no collective 'al_reduce'"):
        Tuner(2).explain("al_reduce", 4)


@pytest.mark.parametrize("per_host", [0, 1])
def test_all_ranks_take_the_figures_of_the_first(per_host: int):
    store = HashStore(HANG_S)
    own = [msgspec.structs.replace(HERE, flag_s=1e-7 * (rank + 1)) for rank in range(3)]

    def opened(rank: int) -> float:
        made = EngineSettings(1 << 16, -1.0, -1, per_host, machine=own[rank])
        engine, hosts, found, _ = open_engine(store, rank, 3, timeout_s=HANG_S, settings=made)
        with NativeGroup(engine, rank, 3, "test", HANG_S, store, hosts=hosts, machine=found) as group:
            group.barrier()
            return group.choice("all_reduce", 1 << 20).seconds, found.flag_s

    with ThreadPoolExecutor(3) as pool:
        seen = list(pool.map(opened, range(3)))
    assert seen == [(seen[0][0], 1e-7)] * 3
