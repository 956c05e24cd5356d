"""What people do wrong with several devices gives the error that a GPU gives."""

import functools
import importlib.util
import json
from pathlib import Path

from loops import each
from python_runs import ran

HERE = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("mistakes", HERE / "mistakes.py")
assert _spec is not None
assert _spec.loader is not None
mistakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mistakes)


@functools.cache
def seen() -> dict[str, list[str]]:
    """Run them all, once."""
    done = ran(HERE / "mistakes.py")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: rest for name, *rest in rows}


@each("name", mistakes.MISTAKES)
def test_the_error_tells_the_mistake(name: str):
    kind, text = seen()[name]
    assert mistakes.MISTAKES[name][1] in text, f"{kind}: {text}"
