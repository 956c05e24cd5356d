"""Each program of docs/reference/virtual-gpus-bugs.md does what the page says, on 1, 2 and 4 virtual GPUs.

`make test` runs each row of its tables on the fewest GPUs of the row, `make test-long` on all.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from effort import LONG

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "virtual-gpus-bugs.md"
CHECK_STREAMS = "TORCH_CUDA_SANITIZER"  # what --check-streams turns on
RUNS = "runs"


class Bug(NamedTuple):
    """One section of the page. `says`: the last column, by the number of GPUs."""

    title: str
    program: str
    says: dict[int, str]

    def runs_on(self, gpus: int) -> bool:
        fewer = [says for number, says in self.says.items() if number < gpus]
        return LONG or self.says[gpus] not in fewer


def bugs() -> list[Bug]:
    head, *sections = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)
    begin = code(head)
    return [Bug(text.splitlines()[0], begin + code(text), columns(text)) for text in sections]


def code(text: str) -> str:
    found = re.search(r"^```py\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert found, text
    return found.group(1)


def columns(text: str) -> dict[int, str]:
    rows = [line.strip("|").split("|") for line in text.splitlines() if re.match(r"\| \d", line)]
    return {int(size): row[-1].strip() for row in rows for size in row[0].split(",")}


def wrong(bug: Bug, ended: Any, says: str) -> str:
    """Return what the page does not say; "" if it is right."""
    if says == RUNS:
        return "" if not any(ended.codes) else "it failed"
    missing = [words for words in re.findall(r"`(.+?)`", says) if words not in ended.text]
    if missing:
        return f"nobody says {missing}"
    return "" if any(ended.codes) else "it did not fail"


@pytest.mark.parametrize(
    "machine", [2, *(pytest.param(gpus, marks=pytest.mark.slow) for gpus in (1, 4))], indirect=True
)
def test_each_bug_shows_as_the_page_says(machine: Any, subtests: pytest.Subtests):
    for bug in bugs():
        if not bug.runs_on(machine.gpus):
            continue
        with subtests.test(bug.title):
            says = bug.says[machine.gpus]
            ended = machine.run(bug.program, **({CHECK_STREAMS: "1"} if "Stream" in bug.program else {}))
            fault = wrong(bug, ended, says)
            assert not fault, f"{bug.title}: {fault}\n{ended.text}"
