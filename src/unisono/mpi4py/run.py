"""`python -m mpi4py`, and `python -m unisono.mpi4py` under any launcher: runs a program on Unisono's MPI.

An exception that leaves the program ends this rank with its traceback, and the launcher ends the others.
"""

from __future__ import annotations

import os
import runpy
import sys
from ast import literal_eval
from collections.abc import Sequence
from types import ModuleType

from unisono.mpi4py.package import __version__, get_include, rc

USAGE = """usage: python -m {name} [options] <script.py> [arg] ...
   or: python -m {name} [options] -m <module> [arg] ...
   or: python -m {name} [options] -c <command> [arg] ...
   or: python -m {name} [options] - [arg] ...
options:
  --prefix --version --mpi-library --mpi-std-version --mpi-lib-version   show it and exit
  -rc key=value,...   set mpi4py.rc.key"""


def run_command_line(args: Sequence[str] | None = None) -> None:
    """Run `script.py`, `-m module`, `-c command` or `-` (standard input), with arguments, as `__main__`."""
    sys.argv[:] = sys.argv[1:] if args is None else args
    kind = sys.argv[0]
    if kind == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind in ("-", "-c"):
        source = sys.argv.pop(1) if kind == "-c" else sys.stdin.read()
        program = sys.modules["__main__"] = ModuleType("__main__")
        file = "<string>" if kind == "-c" else "<stdin>"
        exec(compile(source, file, "exec", 0, True), program.__dict__)  # noqa: S102
    else:
        if not sys.flags.isolated:
            sys.path[0] = os.path.realpath(os.path.dirname(kind))
        runpy.run_path(kind, run_name="__main__")


def set_abort_status(status: object) -> None:
    """Nothing is left to do: a rank that ends with an exit code ends the job."""


def main(name: str = "mpi4py") -> None:
    """Read the command line of `python -m mpi4py`, and run its program."""
    args = sys.argv[1:]
    while args and args[0].startswith("-") and args[0] not in ("-m", "-c", "-"):
        option, _, value = args.pop(0).partition("=")
        option = "-" + option.lstrip("-")
        if option in ("-h", "-help"):
            _leave(USAGE.format(name=name))
        if option in _ANSWERS:
            _leave(_answer(option))
        if option != "-rc" or not (value or args):
            _refuse(f"Unknown option: {option}" if option != "-rc" else "-rc needs key=value", name)
        rc(**dict(map(_setting, (value or args.pop(0)).split(","))))
    if not args or (args[0] in ("-m", "-c") and len(args) < 2):
        _refuse("No path specified for execution" if not args else f"{args[0]} needs an argument", name)
    run_command_line(args)


_ANSWERS = ("-prefix", "-version", "-mpi-library", "-mpi-std-version", "-mpi-lib-version")


def _answer(option: str) -> str:
    if option == "-prefix":
        return get_include()
    if option == "-version":
        return f"mpi4py {__version__}"
    rc.initialize = rc.finalize = False
    from unisono import MPI  # reads rc

    if option == "-mpi-std-version":
        return f"MPI {MPI.VERSION}.{MPI.SUBVERSION}"
    return str(MPI.Get_library_version() if option == "-mpi-lib-version" else MPI.__file__)


def _setting(text: str) -> tuple[str, object]:
    key, _, value = text.partition("=")
    try:
        return key, literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _leave(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.exit(0)


def _refuse(text: str, name: str) -> None:
    sys.stderr.write(f"{text}\n{USAGE.format(name=name)}\n")
    sys.exit(1)
