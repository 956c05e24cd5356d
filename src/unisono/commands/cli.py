"""The command `unisono`: finds the subcommand's module and passes it the arguments.

A command's module has `add_arguments(parser)` and `main(args) -> int`. It is imported only when needed, so
that `unisono run` does not import numpy, and `unisono doctor` not torch.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

COMMANDS = {
    "run": ("unisono.commands.launch", "start the ranks of a script, a module or a program"),
    "bench": ("unisono.commands.bench", "measure collectives: latency, bandwidth, wrong values"),
    "compare": ("unisono.commands.compare", "where a script's numbers part on several numbers of ranks"),
    "simulate": ("unisono.commands.simulate", "how long algorithms take on a network, and what limits them"),
    "plan": ("unisono.commands.plan", "the best way to train a transformer on given GPUs, with its reasons"),
    "network": ("unisono.commands.network", "check and draw a network for the simulator"),
    "draw": ("unisono.commands.drawing", "draw an algorithm: who sends what to whom, round by round"),
    "calibrate": ("unisono.commands.calibrate", "measure this machine, for the choice of algorithms"),
    "doctor": ("unisono.commands.doctor", "show settings, backends and what this machine can do"),
}

OLD_COMMANDS = {"demo": ("run", "-n", "4", "-m", "unisono.examples.language_model", "--lose-a-rank")}
"""Commands of before, each with what does the same now."""


def program() -> NoReturn:
    """The command `unisono`: run this process's command line and end at once.

    Nothing of it has to be torn down, and a job of short programs would wait 20 ms for that.
    """
    status = main()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version", "version"):
        print(f"unisono {_version()}")
        return 0
    if argv[0] in OLD_COMMANDS:
        old, argv = argv[0], [*OLD_COMMANDS[argv[0]]]
        print(f"unisono: `unisono {old}` is now `unisono {' '.join(argv)}`", file=sys.stderr)
    command = argv[0]
    if command not in COMMANDS:
        return _refuse(f"unknown command {command!r}.{_guess(command)} Commands: {', '.join(COMMANDS)}.")
    try:
        module = importlib.import_module(COMMANDS[command][0])
    except ModuleNotFoundError as error:
        return _refuse(_missing(command, error.name or ""))
    return _call(module, command, argv[1:])


def _call(module: ModuleType, command: str, argv: Sequence[str]) -> int:
    summary = COMMANDS[command][1]
    parser = argparse.ArgumentParser(prog=f"unisono {command}", description=f"{summary.capitalize()}.")
    module.add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        status: int = module.main(arguments)
        if sys.stdout is not None:  # None if it was closed at the start
            sys.stdout.flush()
    except BrokenPipeError:
        if not _unread():
            raise
        return 128 + signal.SIGPIPE
    return status


def _unread() -> bool:
    """Whether the reader of the output has ended, as with `| head`: then nothing more is written to it."""
    output = sys.stdout.fileno()
    watch = select.poll()
    watch.register(output, 0)
    if not any(event & select.POLLERR for _, event in watch.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # for the interpreter's own output at its end
    return True


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    more = "unisono COMMAND --help tells more; unisono --version."
    return "\n".join(["usage: unisono COMMAND ...", "", *lines, "", more])


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("unisono")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _guess(command: str) -> str:
    close = difflib.get_close_matches(command, COMMANDS, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _missing(command: str, module: str) -> str:
    if module == COMMANDS[command][0]:
        return f"the command {command!r} is not part of this build."
    extra = "torch" if module.partition(".")[0] == "torch" else ""
    remedy = f"pip install 'unisono[{extra}]'" if extra else f"pip install {module}"
    return f"{command} needs the module {module!r}, which is not installed: {remedy}"


def _refuse(text: str) -> int:
    print(f"unisono: {text}", file=sys.stderr)
    return 2
