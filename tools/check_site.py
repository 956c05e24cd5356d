"""Follows every link of the built site: files and anchors must exist. Links to other sites are not followed.

python tools/check_site.py build/site
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The ids of a page, and the targets of its links and pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the id and the target of a tag."""
        found = dict(attrs)
        self.ids.update(filter(None, (found.get("id"), found.get("name"))))
        if tag in ("a", "img", "script", "link", "iframe", "object", "source"):
            self.targets.update(filter(None, (found.get(key) for key in ("href", "src", "data"))))


def dead(folder: Path) -> Iterator[str]:
    """Yield every dead link."""
    pages = {path: Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are those of the server's root
        for target in sorted(page.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            anchor = unquote(parts.fragment)
            if not file.exists():
                yield f"{path.relative_to(folder)}: {target}: no such file"
            elif anchor and file in pages and not anchor.startswith("__") and anchor not in pages[file].ids:
                yield f"{path.relative_to(folder)}: {target}: no such anchor"


def main() -> int:
    """Print the dead links. Exit code: 1 if there are any."""
    folder = Path(sys.argv[1]).resolve()
    found = list(dead(folder))
    print("\n".join([*found, f"{len(list(folder.rglob('*.html')))} pages, {len(found)} dead links"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
