"""A Timeout says at which line of its program the late rank was, where that can be known."""

import ast
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ranks
from loops import SPREADS, each
from unisono import _native

PROGRAM = Path(__file__).resolve().parent / "programs" / "is_late_in_many_ways.py"
ONE_THREAD = ["sleeps", "computes", "loops", "reads_a_pipe", "waits_in_the_library", "holds_the_gil"]
KNOWN = [*ONE_THREAD, "waits_in_another_group", "loops in a thread", "sleeps in a thread"]
UNKNOWN = ["ignores_the_signal", "is_stopped"]


def _lines(function: str) -> range:
    [found] = [
        each
        for each in ast.parse(PROGRAM.read_text()).body
        if isinstance(each, ast.FunctionDef) and each.name == function
    ]
    return range(found.lineno, (found.end_lineno or 0) + 1)


def _is_at(place: str, function: str) -> bool:
    found = re.fullmatch(rf"{re.escape(str(PROGRAM))}:(\d+) in (\w+|<genexpr>)", place)
    return found is not None and int(found[1]) in _lines(function)


@pytest.fixture(scope="module")
def outputs() -> dict[str, list[str]]:
    """What ranks print, by where they are. All jobs at once: the ranks sleep most of the time."""
    with ThreadPoolExecutor(len(SPREADS)) as pool:
        jobs = {
            name: pool.submit(ranks.processes, 3, PROGRAM, environ=more) for name, more in SPREADS.items()
        }
    return {name: job.result() for name, job in jobs.items()}


@each("spread", SPREADS)
def test_every_waiting_rank_says_where_the_late_one_was(outputs: dict[str, list[str]], spread: str) -> None:
    texts = [dict(line.split("\t") for line in output.splitlines()) for output in outputs[spread]]
    one = re.compile(
        r"all_reduce timed out (?:after 0\.6 s|on rank \d): rank 2 never arrived "
        r"\((?:host \S+, )?pid \d+, last seen (?:after|in) barrier #1\)(?:; it was at (.*))? \[group="
    )
    unknown = 0  # a busy machine may not run a rank within the time that it has to answer
    for text in texts[:2]:
        for name in KNOWN:
            found = one.match(text[name])
            assert found is not None, text[name]
            assert found[1] is None or _is_at(found[1], name.partition(" ")[0]), text[name]
            unknown += found[1] is None
        for name in UNKNOWN:
            found = one.match(text[name])
            # Rank 0 continues the stopped rank, perhaps before the others have given up: it comes, too late.
            continued = ("is_stopped", "meet") if text is texts[1] and name == "is_stopped" else ()
            came = "rank 2 did not answer .*last seen (?:in|after) all_reduce #2"
            if continued and re.search(came, text[name]):
                continue
            assert found is not None, text[name]
            assert found[1] is None or any(_is_at(found[1], each) for each in continued), text[name]
    two = re.search(r"last seen [^)]*\); rank 1 at (.*), rank 2 at (.*) \[", texts[0]["two"])
    assert two is None or (_is_at(two[1], "sleeps") and _is_at(two[2], "loops")), texts[0]["two"]
    alike = re.search(r"; ranks 1, 2 at (.*) \[", texts[0]["two alike"])
    assert alike is None or _is_at(alike[1], "sleeps"), texts[0]["two alike"]
    assert unknown + (two is None) + (alike is None) <= len(KNOWN) // 2, texts


STACK = """Stack (most recent call first):
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "/usr/lib/python3/threading.py", line 327 in wait
  File "/usr/lib/python3/site-packages/unisono/engine/group/group.py", line 8 in barrier
  File ???, line 3 in ???
"""
LIBRARIES = ["/usr/lib/python3/site-packages/unisono/", "/usr/lib/python3/"]


MINE = '  File "/home/me/unisono/train.py", line 42 in load_batch\n'
PACKAGE = '  File "/usr/lib/python3/site-packages/mine/a.py", line 4 in <module>\n'


@pytest.mark.parametrize(
    ("rest", "line", "of_a_package"),
    [
        (MINE, "/home/me/unisono/train.py:42 in load_batch", "/home/me/unisono/train.py:42 in load_batch"),
        (
            PACKAGE + '  File "b", line 5 in f\n',
            "b:5 in f",
            "/usr/lib/python3/site-packages/mine/a.py:4 in <module>",
        ),
        (PACKAGE, "", "/usr/lib/python3/site-packages/mine/a.py:4 in <module>"),
        ('  File "a", line 1.py", line 42 in f\n', 'a", line 1.py:42 in f', 'a", line 1.py:42 in f'),
        ('  File "train.py", line 42 in loa', "", ""),  # more follows
        ("  ...\n", "", ""),
        ("  <no Python frame>\n", "", ""),
    ],
)
def test_the_line_of_the_program_in_a_stack(rest: str, line: str, of_a_package: str) -> None:
    assert _native.program_line(STACK + rest, LIBRARIES, installed=False) == line
    assert _native.program_line(STACK + rest, LIBRARIES, installed=True) == of_a_package
