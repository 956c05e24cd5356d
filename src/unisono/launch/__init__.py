"""`unisono run`: starts the ranks of a job on this machine, shows their output, ends them together.

Several machines run it once each and form one job. It does not know what the ranks compute;
it gives them their place in the job and a store to meet at.

    options   command line -> Job                  front       signals, store, watches the supervisor
    job       Job, environment of a rank           supervisor  starts, reaps, ends the ranks
    streams   pipes -> screen, log files           process     sessions, death signals, orphans
    screen    the console, line by line            ending      which signal when, and when to give up
    summary   which failure was the first          board       who ended of what, readable by every rank
    attend    what the front does meanwhile        nodes       what the nodes of a job tell each other
    news      what the supervisor tells the front
"""

from __future__ import annotations

import argparse
import sys

from unisono import env
from unisono.errors import AuthenticationError, LaunchError, RendezvousError, StoreError
from unisono.launch.front import run
from unisono.launch.job import Job
from unisono.launch.options import add_arguments, job_from

__all__ = ["Job", "add_arguments", "main", "run"]


def main(args: argparse.Namespace) -> int:
    """Run what the command line asks for; return the exit code (2: nothing was started)."""
    environ = env.copy()
    try:
        job, remarks = job_from(args, environ)
        for remark in remarks:
            sys.stderr.write(f"unisono run: {remark}\n")
        return run(job, environ)
    except (AuthenticationError, LaunchError, RendezvousError, StoreError) as error:
        sys.stderr.write(f"unisono run: {error}\n")
        return 2
