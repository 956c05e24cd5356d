"""What people do wrong with several devices gives the error that a GPU gives."""

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from loops import each

HERE = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("mistakes", HERE / "mistakes.py")
assert _spec is not None
assert _spec.loader is not None
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)


@functools.cache
def seen(machine: Any) -> dict[str, list[str]]:
    """Run them all, once."""
    ended = machine.run(HERE / "mistakes.py", size=1)
    assert ended.codes == [0], ended.text
    rows = [json.loads(line) for line in ended.text.splitlines() if line.startswith("[")]
    return {name: rest for name, *rest in rows}


@pytest.mark.parametrize("machine", [mistakes.DEVICES], indirect=True)
@each("name", mistakes.MISTAKES)
def test_the_error_tells_the_mistake(machine: Any, name: str):
    kind, text = seen(machine)[name]
    assert mistakes.MISTAKES[name][1] in text, f"{kind}: {text}"
