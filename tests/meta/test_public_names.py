"""The public names are a promise: adding or removing one has to change this list too."""

import ast
import importlib
import inspect
import pkgutil
from importlib.util import find_spec
from pathlib import Path

import unisono
from loops import each

PUBLIC = [
    "ANY_TAG",
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "MAX",
    "MAXLOC",
    "MIN",
    "MINLOC",
    "PRODUCT",
    "SUM",
    "Aborted",
    "AuthenticationError",
    "Departure",
    "Evicted",
    "FileStore",
    "Group",
    "GroupClosed",
    "GroupError",
    "HashStore",
    "LaunchError",
    "LowRank",
    "Mismatch",
    "NotSupported",
    "PeerLost",
    "Piece",
    "PlanError",
    "PrefixStore",
    "Publication",
    "Queue",
    "RecvFrom",
    "ReduceOp",
    "RendezvousError",
    "SendTo",
    "SimulationError",
    "Status",
    "Store",
    "StoreError",
    "StoreServer",
    "StoreTimeout",
    "Subscription",
    "TCPStore",
    "Timeout",
    "UnisonoError",
    "Window",
    "Work",
    "__version__",
    "codecs",
    "compare",
    "elastic",
    "empty",
    "init_process_group",
    "is_available",
    "join",
    "log",
    "networks",
    "op",
    "plan",
    "premul_sum",
    "publish",
    "simulate",
    "subscribe",
    "wait_all",
    "wait_any",
]


def modules() -> list[str]:
    """Name every module of the package but the native one and those that run when imported."""
    names = (
        info.name for info in pkgutil.walk_packages(unisono.__path__, "unisono.", onerror=lambda name: None)
    )
    return [name for name in names if not name.endswith(("._native", ".__main__"))]


def documented(module) -> list[tuple[str, object]]:
    """List the public functions and classes that `module` itself defines, and the methods of the classes."""
    found = []
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(thing) or inspect.isclass(thing):
            found.append((name, thing))
        if inspect.isclass(thing):
            found += [
                (f"{name}.{method}", body)
                for method, body in vars(thing).items()
                if not method.startswith("_") and (inspect.isfunction(body) or isinstance(body, property))
            ]
    return found


def test_public_names():
    assert sorted(unisono.__all__) == sorted(PUBLIC)


def test_every_public_name_exists():
    assert [name for name in unisono.__all__ if not hasattr(unisono, name)] == []


@each("name", ["unisono", *modules()])
def test_docstrings(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in ("torch", "torchft", "ray", "mpi4py") and not find_spec(error.name):
            return  # a module for who has that library
        raise
    undocumented = [f"{name}.{thing}" for thing, body in documented(module) if not inspect.getdoc(body)]
    assert undocumented == []
    assert module.__doc__, f"{name} does not say what it is for"


def test_type_checkers_see_no_name_that_does_not_exist():
    """A `__getattr__` of a module that they see makes every misspelt import a good one."""
    package = Path(unisono.__file__).parent
    seen = [
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if any(getattr(node, "name", "") == "__getattr__" for node in ast.parse(file.read_text()).body)
    ]
    assert seen == []


def test_native_docstrings():
    native = importlib.import_module("unisono._native")
    things = {name: thing for name, thing in vars(native).items() if not name.startswith("_")}
    assert [name for name, thing in things.items() if callable(thing) and not thing.__doc__] == []
