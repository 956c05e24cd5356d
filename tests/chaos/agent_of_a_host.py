"""Starts the ranks of cases on one host: it has imported everything, and forks. Lines of JSON in and out.

{"case": {...}, "numbers": [0, 1]}  ->  {"pids": {"0": 4121, "1": 4122}}
{"reap": true}                      ->  {"codes": {"0": 0}, "left": 0, "descriptors": 9, "threads": 1}
"""

import gc
import json
import os
import sys
from typing import Any

import rank_of_a_case

from unisono.engine.bootstrap import host_connections  # noqa: F401 - what ranks import late, imported before they fork
from unisono.engine.group import admission, notices  # noqa: F401


def reap(numbers: dict[int, int], codes: dict[str, int]) -> None:
    """Collect the processes that have ended."""
    while numbers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        codes[str(numbers.pop(pid))] = os.waitstatus_to_exitcode(status)


def main() -> None:
    """Serve until the end of the input."""
    numbers: dict[int, int] = {}
    codes: dict[str, int] = {}
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        answer: dict[str, Any]
        if "case" in asked:
            codes = {}
            pids = {}
            gc.freeze()
            for number in asked["numbers"]:
                pid = os.fork()
                if pid == 0:
                    os.close(0)
                    rank_of_a_case.begin(asked["case"], number)
                numbers[pid] = number
                pids[str(number)] = pid
            answer = {"pids": pids}
        else:
            reap(numbers, codes)
            answer = {
                "codes": codes,
                "left": len(numbers),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
            }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
