"""Objects of wrong classes: what mpi4py refuses is refused, as an error of the caller."""

import re
import subprocess
import sys
from pathlib import Path

from effort import HANG_S

PROGRAM = Path(__file__).resolve().parent / "programs" / "wrong_objects.py"
NONE, HANDLES = 1, {"info", "comm", "group", "request", "requests", "datatype", "op", "errhandler", "status"}
TAKE_MORE = {"default", "sourceweights", "destweights"}


def table(text: str) -> dict[str, list[str]]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines())
    return {call: re.findall(r"<\w+>|.", letters) for call, letters in lines}


def test_what_mpi4py_refuses_is_refused(tmp_path: Path) -> None:
    """None for an info, which mpi4py does not take, is no info."""
    command = [sys.executable, str(PROGRAM)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    ours, theirs = table(ended.stdout), table(PROGRAM.with_suffix(".txt").read_text(encoding="utf-8"))
    wrong = []
    for call in ours.keys() & theirs.keys():
        name = call.split()[1]
        allowed = {"T"} if name in HANDLES else {"T", "V", "M"}
        for place, (one, other) in enumerate(zip(ours[call], theirs[call], strict=True)):
            takes_more = place == NONE or name in TAKE_MORE
            refuses = other == "T" and one not in allowed and not takes_more
            if refuses or (one.startswith("<") and not other.startswith("<")):
                wrong.append(f"{call}: {place} gives {one}, expected {other}")
    assert not wrong, "\n".join(sorted(wrong))
    assert len(ours.keys() & theirs.keys()) > 760
