"""docs/times.md has every time constant of the source, with its value, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import unisono

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(unisono.__file__).parent
WINGS = ("engine", "commands")  # their rooms are named without them
LEFT_OUT = ("bench", "calibrate", "demo", "costs", "networks", "simulation")  # they bound no wait
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
NATIVE = re.compile(r"^ *constexpr (Nanoseconds|auto|int|int64_t) (k\w+) = (.+?);", re.MULTILINE)

Constants = dict[str, set[float]]


def in_python() -> Iterator[tuple[str, float]]:
    """("group LATE_S", 1.5): constants of modules that end in _S or _MS, by their room."""
    for path in sorted(PACKAGE.rglob("*.py")):
        room = next(part for part in path.relative_to(PACKAGE).parts if part not in WINGS).removesuffix(".py")
        for node in ast.parse(path.read_text()).body if room not in LEFT_OUT else ():
            if isinstance(node, ast.Assign):
                for name, value in assigned(node):
                    yield f"{room} {name}", value


def assigned(node: ast.Assign) -> Iterator[tuple[str, float]]:
    """What `A_S = 1`, `A_S, B_S = 1, 2` and `A_S = (1, 2)` say of times."""
    names = [name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)]
    if all(re.fullmatch(r"_?[A-Z_]+_M?S", name) for name in names):
        numbers = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
        names = names * len(numbers) if len(names) == 1 else names
        yield from zip(names, map(float, numbers), strict=True)


def in_cpp() -> Iterator[tuple[str, float]]:
    """("csrc/engine kGrace", 2e-5)."""
    for path in sorted(ROOT.glob("csrc/*/*.cpp")):
        for kind, name, text in NATIVE.findall(path.read_text()) if path.parent.name not in LEFT_OUT else ():
            if (seconds := seconds_of(kind, name, text)) is not None:
                yield f"csrc/{path.parent.name} {name}", seconds


def seconds_of(kind: str, name: str, text: str) -> float | None:
    """Example: seconds_of("Nanoseconds", "kFirst", "5 * kMillisecond") -> 0.005; None: it is no time."""
    digits = re.search(r"\d[\d']*", text)
    number = float(digits[0].replace("'", "")) if digits else 1.0
    if chrono := re.search(r"std::chrono::(\w+)\(", text):
        return number * {"seconds": 1, "microseconds": 1e-6, "nanoseconds": 1e-9}[chrono[1]]
    if kind == "Nanoseconds":
        return number * (1e-3 if "kMillisecond" in text else 1e-9)
    unit = re.search(r"[a-z](Us|Ns)$", name)
    return number * SECONDS[unit[1].lower()] if unit else None


def in_the_page() -> Constants:
    found: Constants = defaultdict(set)
    for line in (ROOT / "docs" / "times.md").read_text().splitlines():
        row = re.match(r"\| ([\w/]+ (?:[A-Z_]{3,}|k[A-Z]\w+)) \| ([\d., munks]+) \|", line)
        if row:
            unit = re.search(r"[mun]?s$", row[2].strip())
            scale = SECONDS[unit[0]] if unit else 1.0
            found[row[1]] |= {float(number) * scale for number in re.findall(r"\d+(?:\.\d+)?", row[2])}
    return found


def test_the_page_has_every_time_constant_and_its_value() -> None:
    written: Constants = defaultdict(set)
    for name, seconds in [*in_python(), *in_cpp()]:
        written[name].add(seconds)
    assert len(written) > 50
    page = in_the_page()
    assert rounded(page) == rounded(written), "write it into docs/times.md, with what it hangs together with"


def rounded(constants: Constants) -> dict[str, list[str]]:
    return {name: sorted(f"{seconds:.6g} s" for seconds in constants[name]) for name in sorted(constants)}
