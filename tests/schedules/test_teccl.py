"""TE-CCL's solutions: chunks over links in epochs become a plan."""

import json
from pathlib import Path
from typing import Any

import pytest

import unisono as un
from loops import each
from unisono import networks
from unisono.errors import PlanError
from unisono.plans import Plan, prove
from unisono.schedules import load
from unisono.schedules.teccl import parse_teccl


def flow(origin: int, source: int, target: int, epoch: int, chunk: int = 0) -> str:
    return f"Chunk {chunk} from {origin} traveled over {source}->{target} in epoch {epoch} via switches 0"


def ring(size: int) -> dict[str, Any]:
    """Every chunk goes round; GPUs are numbered from 1."""
    gpus = range(1, size + 1)
    demand = {f"GPU {d}": {f"GPU {s}": {"Chunk 0": 1e-6} for s in gpus if s != d} for d in gpus}
    flows = []
    for origin in gpus:
        for hop in range(size - 1):
            source = (origin - 1 + hop) % size + 1
            flows.append(flow(origin, source, source % size + 1, hop))
    return {"6-Demand_Met": demand, "7-Flows": flows}


def exchange() -> dict[str, Any]:
    """all_to_all of three: chunk 0 of a GPU is for the next one, chunk 1 goes over that one to the other."""
    demand: dict[str, Any] = {f"GPU {d}": {} for d in range(3)}
    flows = []
    for source in range(3):
        near, far = (source + 1) % 3, (source + 2) % 3
        demand[f"GPU {near}"][f"GPU {source}"] = {"Chunk 0": 1e-6}
        demand[f"GPU {far}"][f"GPU {source}"] = {"Chunk 1": 1e-6}
        flows += [
            flow(source, source, near, 0),
            flow(source, source, near, 1, 1),
            flow(source, near, far, 2, 1),
        ]
    return {"6-Demand_Met": demand, "7-Flows": flows}


def proved(record: dict[str, Any]) -> Plan:
    plan = parse_teccl(record)
    prove(plan)
    return plan


@each("size", [2, 3, 4, 8])
def test_all_gather_round_a_ring(size: int) -> None:
    assert proved(ring(size)).collective == "all_gather"


def test_all_to_all_with_relays() -> None:
    plan = proved(exchange())
    assert plan.collective == "all_to_all"
    assert plan.chunks("tmp") > 0


def test_a_file_is_loaded_and_simulated(tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    file.write_text(json.dumps(ring(4)))
    assert load(file, "all_gather", 4).algorithm == "ring.json"
    network = networks.ring(4)
    found = un.simulate("all_gather", network, algorithm=str(file), nbytes=1 << 20)
    same = un.simulate("all_gather", network, algorithm="ring", nbytes=1 << 20)
    assert found.seconds == pytest.approx(same.seconds, rel=0.25)


@each(
    "change, error, says",
    [
        (lambda r: r.pop("7-Flows"), ValueError, "expected TE-CCL's tables"),
        (lambda r: r["7-Flows"].append("Chunk moon"), ValueError, "is not understood"),
        (lambda r: r["7-Flows"].append(flow(1, 1, 9, 0)), ValueError, "there is no GPU 9"),
        (lambda r: r["7-Flows"].append(flow(1, 3, 2, 0)), PlanError, "does not have it"),
        (lambda r: r["7-Flows"].append(flow(1, 1, 2, 0, 7)), ValueError, "nobody wants chunk 7"),
        (lambda r: r["7-Flows"].pop(), PlanError, "was never written"),
        (lambda r: r["7-Flows"].append(flow(1, 1, 2, 5)), PlanError, "twice"),
        (lambda r: r["6-Demand_Met"].pop("GPU 1"), ValueError, "GPU 1 gives chunks, but wants none"),
    ],
)
def test_a_wrong_solution_is_refused(change: Any, error: type[Exception], says: str) -> None:
    record = ring(3)
    change(record)
    with pytest.raises(error) as caught:
        proved(record)
    assert says in str(caught.value)


def test_a_schedule_with_times_keeps_its_epochs(tmp_path: Path) -> None:
    """Two ranks of a host and a third one: a switch copies what crosses its link once, in two epochs."""
    switch = "traveled over {}->{} in epoch {} via switches 0"
    demand = {f"GPU {d}": {f"GPU {s}": {"Chunk 0": 1e-6} for s in range(3) if s != d} for d in range(3)}
    times = [(0, 1, 0), (0, 2, 3), (1, 2, 0), (1, 0, 1), (2, 0, 0), (2, 1, 1)]
    record = {
        "1-Epoch_Duration": 1.0,
        "6-Demand_Met": demand,
        "7-Flows": [f"Chunk 0 from {s} " + switch.format(s, t, e) for s, t, e in times],
    }
    (tmp_path / "s.json").write_text(json.dumps(record))
    text = "\n".join(
        [
            *(f'[[host]]\nname = "g{n}"' for n in range(3)),
            '[[switch]]\nname = "s"\nadds = "1 GB/s"',
            *(f'[[cable]]\nbetween = ["g{n}", "s"]\nlatency = 0.25\nrate = 8' for n in range(3)),
            '[costs]\nsend = "0 s"\nreceive = "0 s"',
        ]
    )
    network = networks.parse(text)
    given: dict[str, Any] = {"algorithm": str(tmp_path / "s.json"), "nbytes": 24}
    found = un.simulate("all_gather", network, paced=True, **given)
    assert found.ends == pytest.approx([2.5, 2.5, 4.5])  # epoch 3, a second of the link, two latencies
    for change, says in (({"algorithm": "ring"}, "expected a file of TE-CCL"), ({"nbytes": -1}, "nbytes")):
        with pytest.raises(ValueError, match=says):
            un.simulate("all_gather", network, paced=True, **{**given, **change})
    with pytest.raises(ValueError, match="is all_gather of 3 ranks, expected all_to_all"):
        un.simulate("all_to_all", network, paced=True, **given)
    (tmp_path / "s.json").write_text(json.dumps({**record, "1-Epoch_Duration": "x"}))
    with pytest.raises(ValueError, match="1-Epoch_Duration is 'x'"):
        un.simulate("all_gather", network, paced=True, **given)
