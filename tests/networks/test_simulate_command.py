"""`unisono simulate`, `unisono network` and what `unisono draw` writes, as a user calls them."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

import unisono as un
from loops import each
from unisono import networks
from unisono.commands import cli
from unisono.commands.simulate import report, trials
from unisono.networks import Network
from unisono.plans import ALGORITHMS, prove
from unisono.schedules import load

# The command forks, and is a process without threads; a worker of pytest has one. Python warns from 3.12 on.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

SIMULATE = "simulate all_reduce --network two_hosts -n 4"


def test_all_algorithms_are_ranked_with_their_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(f"{SIMULATE} --bytes 8,1M --json".split()) == 0
    record = json.loads(capsys.readouterr().out)
    for nbytes in (8, 1 << 20):
        found = [each for each in record["results"] if each["bytes"] == nbytes]
        assert {each["algorithm"] for each in found} == set(ALGORITHMS["all_reduce"])
        times = [each["seconds"] for each in found]
        assert times == sorted(times)
        assert all(each["messages"] > 0 and each["limit"] for each in found)
    best = found[0]
    assert {key: record[key] for key in ("seconds", "messages", "limit")} == {
        key: best[key] for key in ("seconds", "messages", "limit")
    }
    assert best["limit"] == "link host0>host1"
    assert best["algorithm"] in ("hierarchical", "torus")


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(f"{SIMULATE} --bytes 1M".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all_reduce of 1048576 B on two_hosts, 4 ranks"
    assert lines[1].split() == [
        "algorithm", "time", "busbw", "messages", "latency", "bytes", "overhead", "compute", "limit",
    ]  # fmt: skip
    assert len(lines) == 2 + len(ALGORITHMS["all_reduce"])


def test_the_winner_is_a_file_that_algorithm_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "best.toml"
    assert cli.main([*f"{SIMULATE} --bytes 1M --best -o".split(), str(file)]) == 0
    plan = load(file, "all_reduce", 4)
    prove(plan)
    assert plan.hosts == (0, 0, 1, 1)
    table = capsys.readouterr().out
    assert "segments of 64 KiB" in table
    assert cli.main([*f"{SIMULATE} --bytes 1M --algorithm".split(), str(file)]) == 0


def test_candidates_without_a_result_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trials.run

    def run(network: Network, wish: trials.Wish, patience_s: float) -> trials.Trial:
        if wish.algorithm != "ring" or wish.nbytes > 1000:
            return trials.Trial(wish, problem="not done")
        return plain(network, wish, patience_s)

    monkeypatch.setattr(trials, "run", run)
    file = tmp_path / "best.toml"
    assert cli.main([*f"{SIMULATE} --bytes 8 --best -o".split(), str(file)]) == 0
    assert "candidates have no result" in capsys.readouterr().err
    assert cli.main([*f"{SIMULATE} --bytes 8,1M --best -o".split(), str(file)]) == 1  # none of the last size


def test_schedules_are_simulated_beside_the_catalogue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(tmp_path / name) for name in ("a.xml", "b.goal")]
    for name in names:
        assert cli.main(["draw", "all_reduce", "--algorithm", "ring", "-n", "4", "-o", name]) == 0
    capsys.readouterr()
    assert cli.main([*f"{SIMULATE} --bytes 64K --json --algorithm".split(), ",".join(["ring", *names])]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert len({each["seconds"] for each in results}) == 1


def test_blocks_in_parts_take_as_long_as_whole_ones(tmp_path: Path) -> None:
    """Two ranks swap blocks: in two chunks that leave together, or in one."""
    file = tmp_path / "parts.xml"
    gpus = "".join(
        f'<gpu id="{rank}" i_chunks="2" o_chunks="4"><tb id="0" send="{1 - rank}" recv="{1 - rank}" chan="0">'
        f'<step s="0" type="s" srcbuf="o" srcoff="{2 * rank}" cnt="2"/>'
        f'<step s="1" type="r" dstbuf="o" dstoff="{2 - 2 * rank}" cnt="2"/></tb></gpu>'
        for rank in range(2)
    )
    file.write_text(f'<algo nchunksperloop="4" ngpus="2" coll="allgather" inplace="1">{gpus}</algo>')
    network = networks.two_hosts()
    parts = un.simulate("all_gather", network, algorithm=str(file), nbytes=1 << 20)
    whole = un.simulate("all_gather", network, algorithm="direct", nbytes=1 << 20)
    assert parts.seconds == pytest.approx(whole.seconds, rel=1e-3)


def test_a_switch_that_adds_is_an_algorithm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "n.toml"
    file.write_text('[fabric]\nkind = "star"\nhosts = 16\nadds_bytes_per_s = "100 GB/s"\n')
    assert cli.main(["simulate", "all_reduce", "--network", str(file), "--bytes", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["algorithm"] == "in_network"


def test_timelines_for_perfetto_and_as_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, picture = tmp_path / "t.json", tmp_path / "t.svg"
    for file in (trace, picture):
        command = f"{SIMULATE} --bytes 64K --algorithm ring --timeline"
        assert cli.main([*command.split(), str(file)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    texts = "".join(ElementTree.parse(picture).getroot().itertext())
    assert "rank 3" in texts
    assert "host0>host1" in texts


@each(
    "options, says",
    [
        ("--slow 0=10", "overhead rank 0"),
        ("--lost-link host0>host1", "a message is stuck on the link host0>host1"),
        ("--slow-link host0>host1=4", "link host0>host1"),
    ],
)
def test_what_goes_wrong_can_be_given(options: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    size = "8" if "link" not in options or "lost" in options else "1M"
    cli.main(f"{SIMULATE} --bytes {size} --algorithm ring {options}".split())
    assert says in capsys.readouterr().out


def test_a_simulation_that_takes_too_long_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    command = "simulate all_to_all --network fat_tree -n 1024 --bytes 64M --algorithm direct --patience 0.2"
    assert cli.main(command.split()) == 1
    assert "direct: not done in 0.2 s (--patience)" in capsys.readouterr().out


@each(
    "command, says",
    [
        ("simulate moon --network two_hosts", "no collective 'moon'"),
        ("simulate all_reduce --network moon", "no network 'moon'"),
        ("simulate all_reduce --network two_hosts --algorithm moon", "all_reduce has one_shot"),
        ("simulate all_reduce --network two_hosts --bytes 1X", "--bytes 1X"),
        ("simulate all_reduce --network torus -n 65", "torus has 64 ranks"),
        ("simulate all_reduce --network two_hosts -n -1", "at least one rank"),
        ("simulate all_reduce --network two_hosts --root 1", "has no root"),
        ("simulate broadcast --network two_hosts --root 4", "ranks are 0 to 3"),
        ("simulate all_reduce --network two_hosts --slow moon", "--slow moon"),
        ("simulate all_reduce --network two_hosts -o x.toml", "-o needs --best"),
        ("simulate all_reduce --network two_hosts --timeline x.png", "ends in .json or .svg"),
        ("network moon", "no network 'moon'"),
        ("network torus --route 0,99", "target is 99"),
        ("network torus --route moon", "--route moon"),
        ("network torus -o x.png", "ends in .svg or .toml"),
        ("network fat_tree -o x.toml", "made by a generator"),
    ],
)
def test_wrong_usage_gets_one_line(command: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command.split()) == 2
    out, err = capsys.readouterr()
    assert not out
    assert says in err
    assert len(err.splitlines()) == 1


def test_a_long_search_says_what_it_has_done_also_into_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{SIMULATE} --bytes 8 --algorithm ring,two_shot".split()
    assert cli.main(command) == 0
    assert not capsys.readouterr().err  # it is done in less than ten seconds
    monkeypatch.setattr(report, "BETWEEN_LINES_S", 0.0)
    assert cli.main(command) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[:2] for line in lines] == [["1:", "ring"], ["2:", "two_shot"]]


def test_a_network_is_described_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "n.svg"
    assert cli.main(["network", "fat_tree", "--route", "0,127", "-o", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fat_tree: 128 ranks on 128 hosts, 768 links"
    assert lines[-6].split()[2] == "host0-0-0.nic0>plane0.edge0-0,"
    ElementTree.parse(picture)
    assert cli.main(["network", "torus", "--json", "--route", "0,9"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["ranks"], record["links"], len(record["route"])) == (64, 256, 2)


def test_the_shipped_networks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["network"]) == 0
    assert "summit" in capsys.readouterr().out


def test_a_wrong_network_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "n.toml"
    file.write_text('[fabric]\nkind = "star"\nhosts = 3\ncable = { rate = 0 }\n')
    assert cli.main(["network", str(file)]) == 2
    assert "n.toml:4: fabric.cable.rate: the rate is 0, expected one above 0" in capsys.readouterr().err
    assert cli.main(["network", str(tmp_path / "none.toml")]) == 1
    assert "No such file" in capsys.readouterr().err
