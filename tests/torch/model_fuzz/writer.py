"""Writes a random nn.Module as Python source, one statement after the other, and runs each as it is written.

A statement that raises, or makes too much or nothing finite, is left out: an operator need not know where it
is possible. A program is a list of choices, (name of an operator, seed); any part of the list is one, too.
"""

import contextlib
import random
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import pieces

MOST = 6000  # elements of a value
LARGEST = 1e3  # of a value, so that rounding stays far below the tolerance
ROWS, POSITIONS, WIDTH, WORDS = 8, 6, 8, 12
NAMES: dict[str, Any] = {"torch": torch, "nn": nn, "functional": functional, "pieces": pieces}


@dataclass
class Statement:
    """Lines of __init__ and of forward that belong together, and the operator that wrote them."""

    init: list[str]
    code: list[str]
    kind: str

    def reads(self) -> set[str]:
        return set(re.findall(r"\b[vx]\d+\b", " ".join(self.code)))

    def writes(self) -> set[str]:
        goals = (line.partition(" = ")[0] for line in self.code)
        return {
            name for goal in goals if re.fullmatch(r"[v\d, _]+", goal) for name in re.findall(r"v\d+", goal)
        }

    def holds(self) -> set[str]:
        found = set(re.findall(r"\bself\.(\w+)", " ".join([*self.init, *self.code])))
        return (found | {name for line in self.init for name in _holds(line)}) - {"register_buffer", ""}


@dataclass
class Writer:
    """The program so far.

    Attributes:
        values: what forward has made, by name.
        rng: of the operator that is being written.
        rows: the program is to compute each row of a batch by itself.
    """

    inputs: dict[str, Tensor]
    rows: bool
    module: nn.Module = field(default_factory=nn.Module)
    statements: list[Statement] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.values.update(self.inputs)
        self._names = 0
        self._init: list[str] = []

    # ---- what operators ask ----

    def name(self, letter: str = "v") -> str:
        """A new name."""
        self._names += 1
        return f"{letter}{self._names}"

    def floats(self) -> list[str]:
        return [name for name, value in self.values.items() if value.is_floating_point()]

    def integers(self) -> list[str]:
        return [name for name, value in self.values.items() if value.dtype == torch.int64]

    def last(self) -> str:
        """Mostly the newest value, sometimes one of the others."""
        names = self.floats()
        return names[-1] if self.rng.random() < 0.85 else self.rng.choice(names[-6:])

    def shape(self, name: str) -> list[int]:
        return list(self.values[name].shape)

    def dim(self, name: str, *, first: int | None = None) -> int:
        """One of its dims, sometimes counted from the end."""
        count = self.values[name].dim()
        at = self.rng.randrange((1 if self.rows else 0) if first is None else first, count)
        return at if self.rng.random() < 0.5 else at - count

    def held(self, letter: str, made: str) -> str:
        """What the module holds from now on: `made` is an expression."""
        name = self.name(letter)
        self._init.append(f"self.{name} = {made}")
        return f"self.{name}"

    def parameter(self, *sizes: int) -> str:
        return self.held("p", f"nn.Parameter(torch.randn({', '.join(map(str, sizes))}) * 0.5)")

    def buffer(self, made: str) -> str:
        name = self.name("b")
        self._init.append(f'self.register_buffer("{name}", {made})')
        return f"self.{name}"

    def size(self, name: str, at: int) -> str:
        """The size of a dim as a program says it: written down, or asked."""
        if at == 0 and (self.rows or self.rng.random() < 0.3):
            return f"{name}.shape[0]"
        return str(self.values[name].shape[at]) if self.rng.random() < 0.6 else f"{name}.shape[{at}]"

    # ---- writing ----

    def write(self, kind: str, operator: Any, seed: int) -> bool:
        """Let an operator write a statement, as lines or an expression; keep it if it can run."""
        self.rng, self._init = random.Random(seed), []
        try:
            made = operator(self)
        except (ValueError, IndexError):  # it found no value that it could take
            return False
        lines = [f"{self.name()} = {made}"] if isinstance(made, str) else list(made)
        used = set(re.findall(r"self\.(\w+)", " ".join(lines)))
        init = [line for line in self._init if _holds(line) & used]
        statement = Statement(init, lines, kind)
        values = self._ran(statement)
        if values is None:
            return False
        self.values, self.statements = values, [*self.statements, statement]
        return True

    def _ran(self, statement: Statement) -> dict[str, Tensor] | None:
        names: dict[str, Any] = {**self.values, "self": self.module}
        held = (dict(self.module._parameters), dict(self.module._buffers), dict(self.module._modules))
        random_state = torch.get_rng_state()
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                exec("\n".join([*statement.init, *statement.code]), NAMES, names)
        except (
            RuntimeError,
            IndexError,
            SyntaxError,
            ValueError,
            TypeError,
            AttributeError,
            AssertionError,
            NotImplementedError,
        ):
            names = {}
        made = {name: names[name] for name in names if re.fullmatch(r"[vx]\d+", name)}
        found = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        new = [value for name, value in found.items() if name not in self.values]
        whole = [value for value in new if value.is_floating_point()]
        fits = all(0 < value.numel() <= MOST and 0 < value.dim() <= 6 for value in new)
        fits = fits and all(bool(value.isfinite().all()) and value.abs().max() < LARGEST for value in whole)
        if found and fits:
            return found
        torch.set_rng_state(random_state)
        for table, before in zip(
            (self.module._parameters, self.module._buffers, self.module._modules), held, strict=True
        ):
            table.clear()
            table.update(before)  # type: ignore[arg-type]
        return None

    def source(self, output: str, parts: list[tuple[int, int]], rng: random.Random) -> str:
        """The program as Python. parts: statements [first, stop) that are modules of their own."""
        classes, init, code = list[str](), list[str](), list[str]()
        begins = {first: (number, first, stop) for number, (first, stop) in enumerate(parts)}
        at = 0
        while at < len(self.statements):
            if at in begins:
                number, first, stop = begins[at]
                reads, returns = self._borders(first, stop, output)
                init.append(f"self.part{number} = Part{number}()")
                takes, unpacked, call = _given(f"self.part{number}", reads, rng)
                returned, received = _returned(returns, rng)
                inside = self.statements[first:stop]
                lines = [line for each in inside for line in each.code]
                held = [line for each in inside for line in each.init]
                classes.append(
                    class_(f"Part{number}", held, [*unpacked, *lines, f"return {returned}"], takes)
                )
                code += [f"found = {call}", f"{', '.join(returns)} = {received}"]
                at = stop
                continue
            init += self.statements[at].init
            code += self.statements[at].code
            at += 1
        code.append(f"return {output}")
        return "\n".join([*classes, class_("Program", init, code, list(self.inputs))])

    def _borders(self, first: int, stop: int, output: str) -> tuple[list[str], list[str]]:
        """What a part reads of the others, and what they read of it."""
        inside = self.statements[first:stop]
        writes = {name for each in inside for name in each.writes()}
        before = {name for each in self.statements[:first] for name in each.writes()} | {*self.inputs}
        reads = {name for each in inside for name in each.reads()} & before
        later = {name for each in self.statements[stop:] for name in each.reads()} | set(
            re.findall(r"\bv\d+", output)
        )
        returns = sorted(writes & later, key=_number) or [sorted(writes, key=_number)[-1]]
        return sorted(reads, key=_number), returns

    def parts(self, rng: random.Random) -> list[tuple[int, int]]:
        """Some stretches of statements whose parameters nobody else uses."""
        found: list[tuple[int, int]] = []
        at = 0
        while at < len(self.statements):
            stop = min(at + rng.randint(1, 6), len(self.statements))
            inside = {name for each in self.statements[at:stop] for name in each.holds()}
            outside = [*self.statements[:at], *self.statements[stop:]]
            own = not any(inside & each.holds() for each in outside)
            if (
                own
                and rng.random() < 0.5
                and not any("_loss" in each.kind for each in self.statements[at:stop])
            ):
                found.append((at, stop))
                at = stop
            else:
                at += 1
        return found


def _given(layer: str, names: list[str], rng: random.Random) -> tuple[list[str], list[str], str]:
    """How values go into a part: what its forward takes, what it does first, and the call."""
    places = ", ".join(names)
    kind = rng.choice(("places", "places", "names", "dict", "list", "none", "again")) if names else "places"
    if kind == "names":
        return names, [], f"{layer}({', '.join(f'{name}={name}' for name in reversed(names))})"
    if kind == "dict":
        made = ", ".join(f'"{name}": {name}' for name in names)
        return ["given"], [f'{name} = given["{name}"]' for name in names], f"{layer}({{{made}}})"
    if kind == "list":
        return ["given"], [f"[{places}] = given"], f"{layer}([{places}])"
    if kind == "none":
        return ["mask", *names, "more=None"], [], f"{layer}(None, {places}, more=None)"
    if kind == "again":
        return names, [], f"pieces.again({layer}, {places})"
    return names, [], f"{layer}({places})"


def _returned(names: list[str], rng: random.Random) -> tuple[str, str]:
    """How values leave a part: what it returns, and the caller's view of that, `found`."""
    kind = rng.choice(("plain", "plain", "dict", "list", "nested"))
    if kind == "dict":
        made = ", ".join(f'"{name}": {name}' for name in names)
        return f"{{{made}}}", ", ".join(f'found["{name}"]' for name in names)
    if kind == "list":
        return f"[{', '.join(names)}]", f"{'found' if len(names) > 1 else 'found[0]'}"
    if kind == "nested":
        return f"(None, ({', '.join(names)},))", f"{'found[1]' if len(names) > 1 else 'found[1][0]'}"
    return ", ".join(names), "found"


def _holds(line: str) -> set[str]:
    """What a line of __init__ makes the module hold."""
    return set(re.findall(r'^self\.register_buffer\("(\w+)"|^self\.(\w+)', line)[0])


def _number(name: str) -> int:
    return int(name[1:])


def class_(name: str, init: list[str], code: list[str], takes: list[str]) -> str:
    """The source of a module."""
    lines = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line}" for line in init]
    lines += ["", f"    def forward({', '.join(['self', *takes])}):"]
    lines += [f"        {line}" for line in code]
    return "\n".join(lines) + "\n"


def module_of(source: str) -> nn.Module:
    """The program of a source, with values drawn from seed 0. Tracebacks show its lines."""
    import linecache

    name = f"<program {abs(hash(source)):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = dict(NAMES)
    exec(compile(source, name, "exec"), names)
    torch.manual_seed(0)
    with contextlib.suppress(ImportError):
        made: nn.Module = names["Program"]()
    return made
