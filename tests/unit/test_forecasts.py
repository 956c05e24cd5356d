"""How far predictions were off: kept by `unisono bench`, shown by `unisono doctor`; and prices of a wire."""

from pathlib import Path

import msgspec
import pytest

from unisono.engine.costs.forecasts import PredictedCase, keep, kept, summary, text
from unisono.engine.costs.machine import DEFAULTS, identity, load, save
from unisono.engine.costs.tuner import Tuner
from unisono.engine.environment import env
from unisono.networks import Cable, Costs, star
from unisono.networks.prices import machine_of

CASES = [
    PredictedCase("all_reduce/ring of 8 B on 2 ranks", 100.0, 110.0),
    PredictedCase("all_reduce/ring of 1024 B on 2 ranks", 100.0, 40.0),
    PredictedCase("all_reduce/ring of 4096 B on 2 ranks", 100.0, 200.0),
]


def test_the_worst_prediction_is_named() -> None:
    """40 in place of 100 is 2.5 times off, 200 only twice."""
    found = summary(CASES, "the cost model")
    assert found is not None
    assert (found.cases, found.far, found.worst) == (3, 2, CASES[1])
    assert "2 of 3 are off by more than 25%, the worst all_reduce/ring of 1024 B" in text(found)
    assert summary([], "the cost model") is None
    fine = summary(CASES[:1], "the cost model")
    assert fine is not None
    assert text(fine).endswith("0 of 1 are off by more than 25%")


def test_it_is_kept_beside_the_calibration(tmp_path: Path) -> None:
    settings = env.read({"UNISONO_CALIBRATION": str(tmp_path / "c.json")})
    found = summary(CASES, "the cost model")
    assert found is not None
    assert kept(settings) is None
    keep(found, settings)
    assert kept(settings) == found
    (tmp_path / "forecasts-c.json").write_bytes(b"\xff{")
    assert kept(settings) is None
    nowhere = env.read({"UNISONO_CALIBRATION": "none"})
    keep(found, nowhere)
    assert kept(nowhere) is None


def test_the_chooser_takes_the_prices_of_a_measured_wire(tmp_path: Path) -> None:
    """A slow wire counts more than the ranks within a host."""
    machine = msgspec.structs.replace(DEFAULTS, machine=identity(), cores=2, wire_s=1e-3, wire=1e6)
    save(machine, tmp_path / "c.json")
    loaded, note = load(tmp_path / "c.json")
    assert (loaded, note) == (machine, "")
    assert loaded is not None
    assert (loaded.between_networks().tcp_s, loaded.between_networks().tcp) == (1e-3, 1e6)
    unmeasured = msgspec.structs.replace(machine, wire=0.0)
    assert unmeasured.between_networks().tcp == DEFAULTS.tcp
    save(msgspec.structs.replace(machine, wire=-5.0), tmp_path / "c.json")
    assert load(tmp_path / "c.json")[0] is None


def test_the_chooser_takes_the_prices_of_a_network() -> None:
    hosts = (0, 0, 1, 1)
    slow = star(2, ranks=2, cable=Cable(1e-3, 1e6), costs=Costs(o_send_s=1e-6, o_recv_s=2e-6))
    prices = machine_of(slow)
    assert prices.tcp == pytest.approx(1e6)
    assert 2 * prices.tcp_s == pytest.approx(2e-3 + 3e-6)
    seconds = Tuner(4, hosts, prices).explain("all_reduce", 8 << 20).seconds
    assert seconds == pytest.approx(8.4, rel=0.3)  # once each way over the slower cable
