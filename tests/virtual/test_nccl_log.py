"""NCCL_DEBUG=INFO on virtual GPUs: the lines of NCCL that scripts look for."""

import re
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parent / "programs" / "makes_groups.py"
LINE = re.compile(
    r"\S+:\d+:\d+ \[(\d)\] NCCL INFO comm (0x\w+) rank (\d) nranks 2 cudaDev (\d) nvmlDev \d busId (\w+) "
    r"commId (0x\w+) - (Init|Destroy) COMPLETE"
)


@pytest.mark.parametrize("machine", [2], indirect=True)
def test_groups_are_logged_in_nccls_words(machine: Any):
    ended = machine.run(PROGRAM, NCCL_DEBUG="INFO")
    assert ended.codes == [0, 0], ended.text
    lines = LINE.findall(ended.text)
    assert len(lines) == 8, ended.text
    assert {line[:1] + line[2:5] for line in lines} == {("0", "0", "0", "1000"), ("1", "1", "1", "2000")}
    made, destroyed = ({line[:6] for line in lines if line[6] == event} for event in ("Init", "Destroy"))
    assert made == destroyed
    assert len({line[5] for line in lines}) == 2  # one number for both ranks of a group
