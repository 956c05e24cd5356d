"""`unisono draw`: the data of a picture, the diagram, the page, and clear words about wrong arguments."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from loops import each
from unisono.commands import cli
from unisono.commands.drawing.diagram import LETTER, MOST_CHUNKS, svg
from unisono.commands.drawing.page import html
from unisono.commands.drawing.trace import PlanTrace, ranks_of, trace_plan
from unisono.engine.costs import plan_cost
from unisono.plans import ALGORITHMS, CONTRACTS, PLACED, Chunk, Plan, make
from unisono.plans.plan import MOST_RANKS

NAMES = [(collective, name) for collective in ALGORITHMS for name in ALGORITHMS[collective]]
SVG = "{http://www.w3.org/2000/svg}"

OWN = Path(__file__).parent / "programs" / "own_algorithms.py"


def plans(collective: str, algorithm: str, sizes: range) -> list[Plan]:
    """An algorithm's plans for these sizes, another root, and on uneven hosts where it asks for hosts."""
    found = [make(collective, algorithm, size) for size in sizes]
    if CONTRACTS[collective].rooted:
        found.append(make(collective, algorithm, 5, 3))
    if algorithm in PLACED.get(collective, {}):
        found += [make(collective, algorithm, len(h), 0, h) for h in ((0, 0, 1, 1), (0, 0, 0, 1, 1, 2))]
    return found


@each("collective, algorithm", NAMES)
def test_the_last_row_is_what_the_collective_promises(collective: str, algorithm: str) -> None:
    for plan in plans(collective, algorithm, range(2, 9)):
        picture = trace_plan(plan)
        last, contract = picture.held()[-1], CONTRACTS[collective]
        for rank in range(plan.size):
            for index in range(max(1, plan.chunks("out"))):
                expected = contract.expected(rank, index, plan.size, plan.root)
                value = last[rank].get(Chunk("out", index))
                if expected is None:
                    assert value is None, (plan, rank, index)
                else:
                    assert value is not None, (plan, rank, index)
                    assert [(each, value.block) for each in ranks_of(value)] == expected, (plan, rank, index)


@each("collective, algorithm", NAMES)
def test_a_round_has_one_message_each_way_and_all_are_there(collective: str, algorithm: str) -> None:
    for plan in plans(collective, algorithm, range(2, 9)):
        picture = trace_plan(plan)
        assert len(picture.rounds) == plan_cost.rounds(plan)
        for one in picture.rounds:
            for ends in ([m.sender for m in one.messages], [m.receiver for m in one.messages]):
                assert len(set(ends)) == len(ends), (plan, one.number)
        sent = [
            sum(len(m.parts) for one in picture.rounds for m in one.messages if m.sender == rank)
            for rank in range(plan.size)
        ]
        parts = max(1, plan.chunks("out"), plan.chunks("in"))
        assert sent == [part * parts for part in plan_cost.bytes_sent(plan)], plan
        assert picture.rounds[-1].end_s == pytest.approx(picture.cost.seconds), plan
        assert [one.end_s for one in picture.rounds] == sorted(one.end_s for one in picture.rounds)


def overlapping(document: str) -> list[str]:
    """Texts that lie on each other, or beyond the right edge."""
    root = ElementTree.fromstring(document)
    lines: dict[float, list[tuple[float, float, str]]] = {}
    for text in root.iter(f"{SVG}text"):
        kind, said = text.get("class", ""), "".join(text.itertext())
        x, y = float(text.get("x", "nan")), float(text.get("y", "nan"))
        wide = len(said) * LETTER * (1.5 if "title" in kind else 10 / 11 if "m10" in kind else 1)
        left = x - wide / 2 if re.search(r"\b(mid|m10|m11)\b", kind) else x
        lines.setdefault(y, []).append((left, left + wide, said))
    found = [
        said for line in lines.values() for _, end, said in line if end > float(root.get("width", "nan"))
    ]
    for line in map(sorted, lines.values()):
        found += [f"{a[2]} {b[2]}" for a, b in pairwise(line) if a[1] > b[0] + 0.5]
    return found


@each("collective, algorithm", NAMES)
def test_every_diagram_is_xml_without_texts_on_each_other(collective: str, algorithm: str) -> None:
    pieces = 8 if (collective, algorithm) == ("all_reduce", "one_hop") else 1  # of each rank's chunk
    for size in (n for n in (1, 2, 4, 5, 16) if n * pieces <= MOST_CHUNKS or pieces == 1):
        assert not overlapping(svg(trace_plan(make(collective, algorithm, size)))), size
    if algorithm in PLACED.get(collective, {}):
        hosts = (0, 0, 0, 1, 1, 2) if pieces == 1 else (0, 0, 1, 1)
        assert not overlapping(svg(trace_plan(make(collective, algorithm, len(hosts), 0, hosts))))


def test_a_page_holds_its_data_and_asks_the_network_for_nothing() -> None:
    picture = trace_plan(make("all_gather", "bruck", 5))
    page = html(picture)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert data is not None and json.loads(data[1]) == picture.record()
    assert "@" not in re.sub(r"@(media|keyframes)", "", page)  # no mark was left
    assert "http" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "") and "src=" not in page


def test_commands_write_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = tmp_path / "ring.svg"
    assert cli.main(["draw", "all_reduce", "--algorithm", "ring", "-n", "4", "-o", str(ring)]) == 0
    assert ElementTree.parse(ring).getroot().tag == f"{SVG}svg" and "rank 3" in ring.read_text()
    page = tmp_path / "torus.html"
    assert cli.main(["draw", "all_reduce", "--algorithm", "torus", "--hosts", "2x2", "-o", str(page)]) == 0
    assert "host 1" in page.read_text()
    assert capsys.readouterr().out == f"{ring}\n{page}\n"
    assert cli.main(["draw", "broadcast", "--root", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["algorithm"], record["size"], record["root"]) == ("direct", 4, 2)


def test_an_own_algorithm_is_drawn_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["draw", "all_reduce", "--algorithm", f"{OWN}:pass_on", "-n", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cost"]["rounds"] == 4
    for name, told in (
        ("forgetful", "rank 1 never takes 1 of the messages that rank 0 sends it"),
        ("broken", "ZeroDivisionError"),
        ("missing", "has no function missing"),
    ):
        assert cli.main(["draw", "all_reduce", "--algorithm", f"{OWN}:{name}", "--json"]) == 2
        shown = capsys.readouterr().err
        assert told in shown and shown.count("\n") == 1


@each(
    ("words", "told"),
    [
        ("all_reduc -o x.svg", "no collective 'all_reduc': there are broadcast, "),
        ("all_reduce --algorithm rnig -o x.svg", "all_reduce has no algorithm 'rnig'; it has aggregator, "),
        ("all_reduce --algorithm ring -n 100 -o x.svg", "100 ranks: a picture shows 16 at most; --json"),
        (f"all_reduce -n {MOST_RANKS + 1} --json", f"size is {MOST_RANKS + 1}, expected 1..{MOST_RANKS}"),
        ("all_reduce -n 0 -o x.svg", "-n 0: at least one rank"),
        ("all_reduce -o x.png", "-o x.png: expected a name that ends in .svg or .html"),
        ("all_reduce", "no output: give -o FILE.svg"),
        ("all_reduce --hosts 2y2 -o x.svg", "--hosts 2y2: expected 2x3, 3+2+1, or"),
        ("all_reduce --hosts 2x2 -n 3 -o x.svg", "--hosts 2x2 are 4 ranks, -n says 3"),
        ("broadcast --root 4 -o x.svg", "--root 4: ranks are 0 to 3"),
        ("all_reduce --root 1 -o x.svg", "--root 1: all_reduce has no root"),
        ("all_reduce --bytes 1Q -o x.svg", "--bytes 1Q: expected a number of bytes"),
        ("all_reduce --algorithm no.py:steps -o x.svg", "there is no file no.py"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["draw", *words.split()]) == 2
    shown = capsys.readouterr().err
    assert told in shown and shown.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["draw", "barrier", "-o", f"{tmp_path}/none/x.svg"]) == 1
    assert capsys.readouterr().err == f"unisono draw: {tmp_path}/none/x.svg: No such file or directory\n"


def test_too_many_rounds_are_refused() -> None:
    picture: PlanTrace = trace_plan(make("all_reduce", "ring", 4))
    with pytest.raises(ValueError, match="120 rounds: a picture shows 100 at most"):
        svg(picture._replace(rounds=picture.rounds * 20))
