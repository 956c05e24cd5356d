"""Build the source distribution into dist/ and check its contents: `make sdist`.

With `--install` a wheel is also built from the archive alone, and tested like a release.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from scikit_build_core.build import build_sdist
from wheels import ROOT, tracked

MOST_BYTES = 2_000_000

# The files that a build needs; the archive contains no others.
NEEDED = {"CMakeLists.txt", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
ALLOWED = re.compile(r"csrc/.+\.([ch]pp|c|map)|src/unisono/(.+\.(py|html|toml)|py\.typed)")


def main() -> int:
    """Build and check. Exit code: 1 if there is a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--install", action="store_true", help="also build a wheel from it, and test it")
    arguments = parser.parse_args()
    archive = ROOT / "dist" / build_sdist(str(ROOT / "dist"))
    with tarfile.open(archive) as packed:
        names = {member.name.split("/", 1)[1] for member in packed if member.isfile()}
    nbytes = archive.stat().st_size
    print(f"{archive.name}: {nbytes / 1e6:.2f} MB, {len(names)} files", flush=True)
    faults = [
        f"does not belong into it: {name}" for name in sorted(names - NEEDED) if not ALLOWED.fullmatch(name)
    ]
    faults += [f"lacks {name}" for name in sorted((NEEDED | tracked("src/unisono", "csrc")) - names)]
    faults += [f"{nbytes} bytes, {MOST_BYTES} at most"] if nbytes > MOST_BYTES else []
    print(*faults, sep="\n")
    if arguments.install and not faults:
        with tempfile.TemporaryDirectory(prefix="unisono-sdist-") as folder:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"]
            options = ["--no-build-isolation", "--no-deps", "--wheel-dir", folder]
            subprocess.run([*pip, *options, archive], cwd=folder, check=True)
            trial = [sys.executable, ROOT / "tools" / "try_wheels.py", "--python", sys.executable]
            return subprocess.run([*trial, *Path(folder).glob("*.whl")], check=False).returncode
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
