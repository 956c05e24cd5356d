"""Fuzzes the arguments of every public callable: of `unisono`, its modules, `Group`, `Work` and stores.

    python tests/fuzz/arguments.py [--cases 4000] [--seed 7] [--only Group.send] [--values numbers]

The callables and their parameters are found by looking; a new one is part of it. Each parameter gets each
of the hostile values, the others something reasonable. What may come of it: a result, ValueError, TypeError
or an error of Unisono; after a refusal the group goes on. A process of its own makes the calls: the parent
sees it crash, tells at which call, and starts another one behind it. The seed gives the order; how fast the
machine is changes nothing: no call is judged by its time, and a call that waits is left after a while.
"""

import argparse
import contextlib
import faulthandler
import inspect
import operator
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hostile_values import alone, hostile, numbers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import inside
import unisono as un
from effort import HANG_S
from unisono import codecs, networks, planner, plans, simulation
from unisono.engine.group import Group

MODULES = (un, plans, codecs, networks, planner, simulation)
PATIENCE_S = 0.3  # of a call that waits, as its arguments ask it to
FOUND = 2  # the exit code of the process that calls
ALLOWED = (ValueError, TypeError, MemoryError, un.UnisonoError)
DOCUMENTED = {
    "Store.__getitem__": KeyError,
    "Store.__delitem__": KeyError,
    "unisono.simulate": OSError,  # a network's file
    "unisono.networks.find": OSError,
    "unisono.networks.read": OSError,
    "unisono.planner.find_hardware": OSError,
    "unisono.planner.plan": OSError,
    "unisono.planner.shape_of": OSError,
    "unisono.simulation.read_parts": OSError,
    "unisono.simulation.read_program": OSError,
    "unisono.simulation.simulate": OSError,
    "unisono.simulation.write_program": OSError,
}


class TooLong(BaseException):
    """The call waits: nothing is wrong with it."""


# ---- what is called ------------------------------------------------------------------------------


class World:
    """The objects whose methods are called; made anew when a call has ended them."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.group = alone("fuzzed")
        self.made: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        if name == "Group":
            if self.group.closed or inside.engine(self.group).faulted:
                self.group.close()
                self.group = alone("fuzzed")
            return self.group
        if name not in self.made or getattr(self.made[name], "_closed", False):
            self.made[name] = self.make(name)
        return self.made[name]

    def make(self, name: str) -> Any:
        group: Group = self.get("Group")
        if name == "CollectiveWork":
            return group.all_reduce(np.ones(3), async_op=True)
        if name == "MessageWork":
            group.isend(np.ones(1), 0)
            return group.irecv(np.ones(1), 0)
        if name == "FileStore":
            return un.FileStore(f"{self.folder}/file", timeout_s=0.02)
        if name == "PrefixStore":
            return un.PrefixStore("p", un.HashStore(0.02))
        if name == "TCPStore":
            return un.TCPStore("127.0.0.1", 0, is_server=True, timeout_s=0.5, linger_s=0.0)
        return un.HashStore(0.02)

    def renew(self) -> None:
        """Let the next call have other objects."""
        self.made.clear()
        self.group.close()

    def end(self) -> None:
        for one in [self.group, *self.made.values()]:
            if hasattr(one, "close"):
                one.close()

    def goes_on(self) -> bool:
        x = np.array([1.0, 2.0])
        group: Group = self.get("Group")
        group.all_reduce(x)
        return x.tolist() == [1.0, 2.0]


class Target(NamedTuple):
    """One parameter of one callable; parameter "" is the value that is assigned to a property."""

    name: str
    owner: str
    attribute: str
    parameter: str


OWNERS = {
    "Group": Group,
    "CollectiveWork": un.Work,
    "MessageWork": un.Work,
    "HashStore": un.Store,
    "FileStore": un.Store,
    "PrefixStore": un.Store,
    "TCPStore": un.Store,
}
SUBSCRIPTS = ("__getitem__", "__setitem__", "__delitem__", "__contains__")
# Closing ends what the others need; an enum's constructor is the standard library's; `classify` imports
# PyTorch, which cannot be imported again after an interrupt.
LEFT_OUT = {"Group.close", "Group.__init__", "Store.close", "unisono.ReduceOp", "unisono.codecs.classify"}


def parameters(function: Any) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one written in C
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each for each in found if each.name != "self" and each.kind not in variable]


def targets() -> Iterator[Target]:
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            known = f"{module.__name__}.{name}" in LEFT_OUT or value is Group or inspect.isabstract(value)
            if callable(value) and not known:
                for each in parameters(value):
                    yield Target(f"{module.__name__}.{name}", module.__name__, name, each.name)
    for owner, kind in OWNERS.items():
        for name, value in inspect.getmembers(kind):
            public = not name.startswith("_") or (kind is un.Store and name in SUBSCRIPTS)
            if not public or f"{kind.__name__}.{name}" in LEFT_OUT:
                continue
            if isinstance(value, property):
                if value.fset is not None:
                    yield Target(f"{kind.__name__}.{name}", owner, name, "")
            elif callable(value):
                for each in parameters(value):
                    yield Target(f"{kind.__name__}.{name}", owner, name, each.name)


def usual(name: str) -> Any:
    """Something reasonable for a parameter, by its name."""
    known: dict[str, Callable[[], Any]] = {
        "x": lambda: np.ones(4),
        "out": lambda: np.ones(4),
        "src": lambda: 0,
        "dst": lambda: 0,
        "tag": lambda: 0,
        "op": lambda: un.SUM,
        "timeout": lambda: 0.05,
        "timeout_s": lambda: 0.05,
        "rank": lambda: 0,
        "key": lambda: "k",
        "value": lambda: b"1",
        "amount": lambda: 1,
        "expected": lambda: b"",
        "desired": lambda: b"2",
        "keys": lambda: ["k"],
        "ranks": lambda: [0],
        "host": lambda: "127.0.0.1",
        "port": lambda: 0,
        "linger_s": lambda: 0.0,
        "shape": lambda: 3,
        "dtype": lambda: "f8",
        "factor": lambda: 2.0,
        "collective": lambda: "all_reduce",
        "algorithm": lambda: "ring",
        "size": lambda: 3,
        "nbytes": lambda: 100,
        "root": lambda: 0,
        "path": lambda: "a-file",
        "store": lambda: un.HashStore(0.02),
        "prefix": lambda: "p",
        "messages": list,
        "text": lambda: "t",
        "buffers": lambda: [np.ones(4)],
        "color": lambda: 0,
        "world_size": lambda: 1,
        "is_server": lambda: True,
        "pid": lambda: 1,
    }
    return known.get(name, lambda: [np.ones(4)])()


def call(world: World, target: Target, value: Any) -> Any:
    owner = sys.modules[target.owner] if target.owner.startswith("unisono") else world.get(target.owner)
    if not target.parameter:
        return setattr(owner, target.attribute, value)
    function = getattr(owner, target.attribute)
    positional, named = [], {}
    for each in parameters(function):
        hit = each.name == target.parameter
        if (
            not hit
            and each.default is not inspect.Parameter.empty
            and each.name not in ("timeout", "timeout_s")
        ) and each.name not in ("is_server", "linger_s"):
            continue
        given = value if hit else usual(each.name)
        if each.kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(given)
        else:
            named[each.name] = given
    return function(*positional, **named)


# ---- the process that calls ----------------------------------------------------------------------


def _too_long(*_: Any) -> None:
    raise TooLong


def shown(value: Any) -> str:
    with contextlib.suppress(Exception):
        return f"{type(value).__name__} {value!r}"[:80]
    return type(value).__name__


def attempt(world: World, target: Target, value: Any) -> str:
    """What is wrong with how a call ended; "" when nothing is. A call that waits is left."""
    try:
        return judged(world, target, value)
    except TooLong:  # interrupted anywhere: the next call gets other objects
        signal.setitimer(signal.ITIMER_REAL, 0)
        world.renew()
        return ""


def judged(world: World, target: Target, value: Any) -> str:
    named = DOCUMENTED.get(target.name, ())
    refused = False
    try:
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S, 10.0)  # again: a callback may have caught the first
        result = call(world, target, value)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if isinstance(result, (un.Store, un.StoreServer, Group)) and result is not value:
            result.close()
        if is_under_way(result):  # its timeout would end the group in a later call
            world.renew()
    except (ValueError, TypeError):
        refused = True
    except Exception as error:
        if not isinstance(error, (*ALLOWED, named) if named else ALLOWED):
            return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if refused and target.owner == "Group" and (world.group.closed or inside.engine(world.group).faulted):
        return "the group did not survive a refusal"
    if target.attribute == "timeout_s":
        world.renew()
    if died:
        return f"a thread died: {died.pop()}"
    return afterwards(world)


def is_under_way(result: Any) -> bool:
    """Whether a call has returned before its end: a work, or a list of them."""
    works = result if isinstance(result, (list, tuple)) else [result]
    return any(isinstance(work, un.Work) and not work.done() for work in works)


def afterwards(world: World) -> str:
    """What is wrong with the group after a call; "" when it goes on."""
    try:
        return "" if world.goes_on() else "all_reduce is wrong afterwards"
    except Exception as error:
        world.group.close()
        return f"afterwards {type(error).__name__}: {error}"


def fits_in_memory(target: Target, value: Any) -> bool:
    """Whether the call would get gigabytes: clearing them can take a minute on a machine with other work."""
    try:
        return target.name == "unisono.empty" and 1 << 28 <= operator.index(value) <= 1 << 40
    except Exception:
        return False


died: list[str] = []
"""What ended threads of this process."""


def work_through(options: argparse.Namespace) -> int:
    values = numbers() if options.values == "numbers" else hostile()
    todo = [(t, n) for t in targets() if options.only in t.name for n in range(len(values))]
    if options.list:
        names, parameters = len({each.name for each, _ in todo}), len({each for each, _ in todo})
        print(f"{names} callables, {parameters} parameters, {len(values)} values")
        return 0
    random.Random(options.seed).shuffle(todo)
    end = min(len(todo), options.cases)
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _too_long)
    threading.excepthook = lambda each: died.append(f"{each.exc_type.__name__}: {each.exc_value}")
    seen: set[tuple[str, str, str]] = set()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        world = World(folder)
        for number in range(options.start, end):
            target, place = todo[number]
            if fits_in_memory(target, values[place]):
                continue
            where = f"{number} {target.owner}.{target.attribute}({target.parameter}={shown(values[place])})"
            os.pwrite(options.state, where.encode(errors="replace").ljust(300), 0)
            wrong = attempt(world, target, values[place])
            key = (target.name, target.parameter, wrong.partition(":")[0])
            if wrong and key not in seen:
                seen.add(key)
                print(f"{where}: {wrong}", flush=True)
        world.end()
        os.chdir("/")
    print(f"{end - options.start} of {len(todo)} calls", flush=True)
    return FOUND if seen else 0


def ended(process: subprocess.Popen[bytes], where: Callable[[], str]) -> str:
    """How the process that calls ended; it is killed if it stays in one call."""
    last = ""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(HANG_S)
            return "" if code in (0, FOUND) else f"CRASH {code}"
        if last == (last := where()):
            process.kill()
            process.wait()
            return "HANG"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1 << 30, help="the first of the order; default: all")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--only", default="", help="callables whose name holds this")
    parser.add_argument("--values", choices=["all", "numbers"], default="all")
    parser.add_argument("--list", action="store_true", help="only say how many there are")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--state", type=int, default=-1)
    options = parser.parse_args()
    if options.state >= 0 or options.list:
        return work_through(options)
    print(f"seed {options.seed}", flush=True)
    status, crashed = 0, ""
    with tempfile.TemporaryFile() as state:
        fd = state.fileno()

        def where() -> str:
            return os.pread(fd, 300, 0).decode(errors="replace").strip()

        while True:
            given = ["--cases", str(options.cases), "--seed", str(options.seed), "--only", options.only]
            given += ["--values", options.values, "--start", str(options.start), "--state", str(fd)]
            command = [sys.executable, str(Path(__file__).resolve()), *given]
            with subprocess.Popen(command, pass_fds=[fd]) as process:
                crashed = ended(process, where)
            status = max(status, process.returncode != 0)
            if not crashed or not where():
                return status
            print(f"{crashed}: {where()}", flush=True)
            options.start = int(where().split()[0]) + 1


if __name__ == "__main__":
    sys.exit(main())
