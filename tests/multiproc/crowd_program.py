"""Many jobs at once, or one job of many ranks, on this machine.

    python crowd_program.py JOBS RANKS

Starts JOBS launchers at once, each with RANKS ranks that meet, reduce, check and leave. Prints one line for a
job that went wrong, then a summary as JSON. The project is held to `crowd_program.py 20 2` (none disturbs
another) and to `crowd_program.py 1 64` (under 10 s on a machine that has nothing else to do).
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

RANK = str(Path(__file__).resolve().parent / "programs" / "crowd_rank.py")


def main(jobs: int, ranks: int) -> int:
    """Run them; 1 when one went wrong."""
    began = time.monotonic()
    launcher = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), "--no-python", sys.executable]
    # An installed package has its byte code: 64 ranks that compile Unisono would measure the compiler.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    running = [
        subprocess.Popen(
            [*launcher, RANK, str(1000 * number)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
        )
        for number in range(jobs)
    ]  # fmt: skip
    failed, met = 0, []
    for number, job in enumerate(running):
        out, errors = job.communicate(timeout=600)
        if job.returncode:
            failed += 1
            print(f"job {number}: exit code {job.returncode}: {errors[-2000:]}")
        else:
            met.append(float(out.split()[-1]))
    summary = {"jobs": jobs, "ranks": ranks, "failed": failed, "seconds": round(time.monotonic() - began, 2)}
    print(json.dumps({**summary, "slowest_meeting_s": round(max(met, default=0.0), 2)}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
