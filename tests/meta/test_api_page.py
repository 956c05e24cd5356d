"""docs/api.md names the parameters that the functions have."""

import inspect
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import unisono as un
from loops import each

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
CALL = re.compile(r"(?:([\w.]+)\.)?(\w+)\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
LITERAL = re.compile(r"^[\[\d\"']|^un\.|^\.\.\.$")


def calls() -> Iterator[tuple[str, str, str]]:
    """(owner, name, arguments) of each call in the first column of the page's first table.

    Left out: "y = group.all_gather(x)", whose calls are by position, and what needs PyTorch or Ray.
    """
    table = PAGE[PAGE.index("| call |") : PAGE.index("Every collective also takes")]
    for row in table.splitlines()[2:]:
        if row.startswith("| `y = "):
            continue
        owner = "group"
        for code in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
            for found in CALL.finditer(code):
                owner = found[1] or owner
                if not owner.startswith("unisono."):
                    yield owner, found[2], found[3]


def target(owner: str, name: str) -> Any:
    """The function that a call of the page calls."""
    home: Any = un.Group if owner == "group" else un
    return operator.attrgetter(f"{owner}.{name}".partition(".")[2])(home)


@each("owner, name, arguments", calls())
def test_the_parameters_exist(owner: str, name: str, arguments: str) -> None:
    parameters = inspect.signature(target(owner, name)).parameters
    for word in filter(None, (word.strip() for word in arguments.split(","))):
        parameter, _, default = word.partition("=")
        if word == "*" or LITERAL.match(parameter):
            continue
        assert parameter in parameters, f"{name} has no parameter {parameter}"
        if default:
            have = parameters[parameter].default
            assert eval(default, {"un": un, "float": float}) == have, f"{name}({word}): it is {have!r}"


def test_the_signature_of_init_process_group_is_complete() -> None:
    (arguments,) = (arguments for _, name, arguments in calls() if name == "init_process_group")
    shown = [word.partition("=")[0].strip() for word in arguments.split(",")]
    assert [word for word in shown if word != "*"] == list(
        inspect.signature(un.init_process_group).parameters
    )
