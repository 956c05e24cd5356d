"""What README and docs show works: code blocks run, commands are understood, links lead somewhere."""

import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pages
from loops import each
from unisono.commands.bench.cases import OPERATIONS
from unisono.commands.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RANKS = 4


def name_of(page: Path) -> str:
    """As one would say it: "docs/api.md"."""
    return str(page.relative_to(ROOT))


def with_python() -> list[Path]:
    """The pages that show Python to run."""
    return [page for page in PAGES if any(b.language == "python" for b in pages.blocks(page.read_text()))]


def test_python_blocks_run(tmp_path: Path) -> None:
    """All of them in one job, one page after the other."""
    shown = with_python()
    assert {"README.md", "docs/mpi4py.md", "docs/new-algorithm.md"} <= {name_of(page) for page in shown}
    program = ROOT / "tests" / "meta" / "pages_program.py"
    command = [sys.executable, "-m", "unisono", "run", "-n", str(RANKS), str(program), *map(str, shown)]
    environ = {**os.environ, "UNISONO_TIMEOUT_S": "60", "PYTHONPATH": str(ROOT / "tests" / "support")}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[10. 10. 10.] rank 0 of 4" in done.stdout  # as README says
    for page in shown:
        assert done.stdout.count(f"{page.name}: ran") == RANKS


@each("page", PAGES)
def test_commands_are_understood(page: Path) -> None:
    for words in pages.commands(page.read_text()):
        parser = argparse.ArgumentParser(prog=" ".join(words), exit_on_error=False)
        importlib.import_module(COMMANDS[words[1]][0]).add_arguments(parser)
        try:
            parser.parse_args(words[2:])
        except (SystemExit, argparse.ArgumentError) as error:
            pytest.fail(f"{name_of(page)} shows what is refused: {' '.join(words)}: {error}", pytrace=False)


@each("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in pages.links(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {path}"
        if anchor and target.suffix == ".md":
            assert anchor in pages.anchors(target.read_text()), f"{name_of(page)} links to {path}#{anchor}"


def test_the_navigation_lists_pages_that_exist() -> None:
    """Pages that it does not list are appended by tools/docs_hooks.py."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    assert "api.md" in listed
    assert [page for page in listed if not (ROOT / "docs" / page).exists()] == []


@pytest.mark.parametrize(
    ("synchronizing", "begins"),
    [(True, "For operations that no rank can leave"), (False, "Other operations")],
)
def test_the_page_of_the_bench_tells_which_operations_line_up(synchronizing: bool, begins: str) -> None:
    text = (ROOT / "docs" / "bench.md").read_text().partition(f"   - {begins} ")[2]
    listed = re.split(r"\W+", text[text.index("(") : text.index(")")])
    names = {name for name, each in OPERATIONS.items() if each.synchronizing == synchronizing}
    assert names == OPERATIONS.keys() & set(listed)
