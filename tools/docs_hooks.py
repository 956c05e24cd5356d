"""Hooks of mkdocs (mkdocs.yml): pages from outside docs/, and the links to them.

A link in a page is relative to its file in the repository, so that it also works there. On the site some
files have another place, and some are not pages. Each link is resolved in the repository and rewritten.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = ROOT / "build" / "docs" / "algorithms"
LINK = re.compile(r"(\[[^\]]*\])\(([^)\s]+)\)")

# Pages of the site from outside docs/: file in the repository -> page.
OUTSIDE = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
}


def places() -> dict[str, str]:
    """Return {file in the repository: its place on the site} for files outside docs/."""
    found = {name: page for name, page in OUTSIDE.items() if (ROOT / name).exists()}
    for results in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        found[f"benchmarks/results/{results.name}"] = f"project/results-{results.name}"
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the pages that mkdocs.yml does not place to the navigation."""
    assert config.nav is not None
    docs = Path(config.docs_dir)
    placed = set(listed(config.nav))
    others = sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))
    pages = [{title(page): page} for page in others if page not in placed]
    pages += [{title(name): page} for name, page in places().items()]
    config.nav.append({"Project": [{"Examples": "project/examples.md"}, *pages]})
    drawn = [f"algorithms/{path.relative_to(ALGORITHMS)}" for path in sorted(ALGORITHMS.rglob("*.md"))]
    if drawn:
        reference = next(part["Reference"] for part in config.nav if "Reference" in part)
        reference.insert(
            2, {"Algorithms as pictures": sorted(drawn, key=lambda page: "index.md" not in page)}
        )
    return config


def listed(part: Any) -> Iterator[str]:
    """Yield every page of a navigation."""
    if isinstance(part, str):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from listed(inner)


def title(name: str) -> str:
    """Return the title of a page in the navigation."""
    path = Path(name)
    return f"Results {path.stem}" if path.parts[0] == "benchmarks" else path.stem.capitalize()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, the examples, and the generated pages of the algorithms."""
    for name, page in places().items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "project/examples.md", content=examples()))
    for path in sorted(ALGORITHMS.rglob("*")):
        if path.is_file():
            page = f"algorithms/{path.relative_to(ALGORITHMS)}"
            files.append(File.generated(config, page, abs_src_path=str(path)))
    return files


def examples() -> str:
    """Return a page with every program of examples/."""
    parts = ["# Examples\n\n`unisono run -n 2 examples/ddp.py` starts one of them on two ranks.\n"]
    programs = sorted((ROOT / "examples").glob("*.py"))
    parts += [f"## {path.name}\n\n```python\n{path.read_text()}```\n" for path in programs]
    return "\n".join(parts)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite the links of a page for the site."""
    outside = places()
    here = next((name for name, place in outside.items() if place == page.file.src_uri), None)
    source = here or f"docs/{page.file.src_uri}"
    if page.file.src_uri.startswith(("algorithms/", "project/examples")):
        return markdown

    def moved(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path, mark, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return found[0]
        name = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = place_of(name, outside)
        if place is None:
            return f"{text[1:-1]}" if (ROOT / name).exists() else found[0]
        return (
            f"{text}({posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or '.')}{mark}{anchor})"
        )

    return LINK.sub(moved, markdown)


def place_of(name: str, outside: dict[str, str]) -> str | None:
    """Return the place on the site of a file of the repository; None: it has none."""
    if name in outside:
        return outside[name]
    if name == "README.md" or name == "docs":
        return "index.md"
    if name == "examples" or name.startswith("examples/"):
        return "project/examples.md"
    if name == "docs/adr":
        return "adr/0001-one-interpreter.md"
    return name.removeprefix("docs/") if name.startswith("docs/") and Path(ROOT, name).is_file() else None
