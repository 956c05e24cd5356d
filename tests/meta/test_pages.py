"""What README and docs show works: code blocks run, commands are understood, links lead somewhere."""

import argparse
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import pages
from loops import each
from python_runs import PATH, fine
from unisono.commands.bench.cases import OPERATIONS
from unisono.commands.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM = ROOT / "tests" / "meta" / "pages_program.py"
RANKS = 4
LIMIT = {"UNISONO_TIMEOUT_S": "60"}
ABOUT_TORCH = ("torch", "unisono.parallel", "up.")  # words of blocks that need PyTorch
PARTS = 2  # of the pages about PyTorch: each takes a quarter of a minute


def name_of(page: Path) -> str:
    """As one would say it: "docs/api.md"."""
    return str(page.relative_to(ROOT))


def with_python(about_torch: bool) -> list[Path]:
    """The pages that show Python to run: those that need PyTorch, or the others."""
    texts = {
        page: "".join(b.text for b in pages.blocks(page.read_text()) if b.language == "python")
        for page in PAGES
    }
    found = {page: any(word in text for word in ABOUT_TORCH) for page, text in texts.items() if text}
    return [page for page, about in found.items() if about == about_torch]


def test_python_blocks_run(tmp_path: Path) -> None:
    """All of them in one job, one page after the other."""
    shown = with_python(False)
    assert {"README.md", "docs/mpi4py.md", "docs/new-algorithm.md"} <= {name_of(page) for page in shown}
    printed = fine("-m", "unisono", "run", "-n", RANKS, PROGRAM, tmp_path, *shown, **LIMIT, **PATH)
    assert "[10. 10. 10.] rank 0 of 4" in printed  # as README says
    for page in shown:
        assert printed.count(f"{page.name}: ran") == RANKS


@pytest.mark.torch
@pytest.mark.parametrize("part", range(PARTS))
def test_python_blocks_about_pytorch_run(forks: Any, tmp_path: Path, part: int) -> None:
    """Likewise. The ranks are forks of one Python that has imported PyTorch."""
    shown = with_python(True)[part::PARTS]
    words = (str(tmp_path), *map(str, shown))
    printed = "".join(forks.run_program(tmp_path, RANKS, PROGRAM, *words, ports=1 + len(shown), **LIMIT))
    for page in shown:
        assert printed.count(f"{page.name}: ran") == RANKS


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
