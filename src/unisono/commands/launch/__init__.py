"""`unisono run`: starts the ranks of a job on this machine, shows their output, ends them together.

Several machines run it once each and form one job. It does not know what the ranks compute;
it gives each rank its place in the job, and a store for the rendezvous.

    job         the command line, and the environment of a rank
    front       the process the user started: signals, the store, the other nodes
    nodes       the messages between the nodes of a job
    supervisor  starts the ranks, waits for them, ends the job
    process     starting and ending processes, the status board
    console     from pipes to the screen and log files
    failures    which rank failed first and of what, reported once
"""

from __future__ import annotations

import argparse
import sys

from unisono.commands.launch.frontend import run
from unisono.commands.launch.job import Job, add_arguments, job_from
from unisono.engine.environment import env
from unisono.errors import AuthenticationError, LaunchError, RendezvousError, StoreError

__all__ = ["Job", "add_arguments", "main", "run"]


def main(args: argparse.Namespace) -> int:
    """Run what the command line asks for; return the exit code (2: nothing was started)."""
    environ = env.copy()
    try:
        job, remarks = job_from(args, environ)
        for remark in remarks:
            sys.stderr.write(f"unisono run: {remark}\n")
        if job.gpus:
            _prepare_virtual_gpus()
        code = run(job, environ)
        if job.record and job.node_rank == 0 and not code:
            _collect(job.record)
        return code
    except (AuthenticationError, LaunchError, RendezvousError, StoreError) as error:
        sys.stderr.write(f"unisono run: {error}\n")
        return 2
    except KeyboardInterrupt:  # before the launcher handles signals, as in the wait for a token
        return 130


def _collect(file: str) -> None:
    """Make one program of what the ranks have recorded."""
    from pathlib import Path

    from unisono.simulation.items import write_program
    from unisono.simulation.recording import program_of, read_parts

    try:
        parts = read_parts(file)
        write_program(program_of(parts, Path(file).stem), file)
        for part in parts:
            Path(f"{file}.rank{part.rank}").unlink()
    except (OSError, ValueError) as error:
        raise LaunchError(f"--record {file}: {error}") from None


def _prepare_virtual_gpus() -> None:
    """Build their library before the ranks start, while only the launcher writes to the screen."""
    from unisono.virtual.startup import prepare

    try:
        prepare()
    except RuntimeError as error:
        raise LaunchError(str(error)) from None
