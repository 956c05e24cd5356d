"""Takes screenshots of the built site in Chromium, at desktop and phone width: `make screenshots`.

For every page: python tools/screenshots.py build/site docs/figures --all /tmp/pages
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WIDE, NARROW = (1280, 800), (390, 800)
SCALE = 0.75
"""Of the pictures that docs/ keeps: they stay small."""

STORED = {
    "site-front": ("index.html", WIDE),
    "site-front-phone": ("index.html", NARROW),
    "site-algorithm": ("algorithms/all_reduce-ring.html", (1280, 900)),
    "site-reference": ("reference/group.html", WIDE),
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site and prints nothing."""

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve the site in a context, because the search needs a server. Gives its address."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def take(address: str, size: tuple[int, int], picture: Path, scale: float = 1.0) -> None:
    """Save a screenshot of the top of a page, in a window of `size`, scaled down by `scale`."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("error: this needs Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        options += ["--no-sandbox", "--virtual-time-budget=3000", f"--window-size={size[0]},{size[1]}"]
        options.append(f"--force-device-scale-factor={scale}")
        command = [browser, *options, f"--screenshot={picture}", address]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


def main() -> int:
    """Take the screenshots of docs/; with --all, one of every page at both widths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="take every page, into FOLDER")
    arguments = parser.parse_args()
    site = arguments.site.resolve()
    with served(site) as address:
        if arguments.all is not None:
            arguments.all.mkdir(parents=True, exist_ok=True)
            for page in sorted(path.relative_to(site) for path in site.rglob("*.html")):
                name = str(page).replace("/", "-").removesuffix(".html")
                take(f"{address}/{page}", (1280, 1600), arguments.all / f"{name}-wide.png")
                take(f"{address}/{page}", (390, 1600), arguments.all / f"{name}-narrow.png")
            return 0
        for name, (page_name, size) in STORED.items():
            if not (site / page_name).exists():
                print(f"left out: {page_name} is not on the site")
                continue
            take(f"{address}/{page_name}", size, arguments.folder / f"{name}.png", SCALE)
            print(f"written: {arguments.folder / name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
