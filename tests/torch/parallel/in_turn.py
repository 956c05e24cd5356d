"""One rank of checks of this folder, one after the other: `main(rank, size, folder, module, *names)`.

A name is that of a function `check_*`, or of a row of the module's table `TABLE` (see rows.py). PyTorch does
much when it does something for the first time: here once, not for every check. Each check has a process group
and a folder of its own. The first that fails ends its rank. `passed<rank>` has those before it.
"""

import functools
import importlib
from pathlib import Path

from parallel.rows import shortened, try_row
from parallel.run_features import in_group

for _path in sorted(Path(__file__).parent.glob("*.py")):  # before the ranks are forked
    if "\ndef check_" in _path.read_text() or "\nTABLE" in _path.read_text():
        importlib.import_module(f"parallel.{_path.stem}")


def main(rank: int, size: int, folder: Path, module: str, *names: str) -> None:
    checks = importlib.import_module(f"parallel.{module}")
    table = getattr(checks, "TABLE", {})
    rows = shortened({name: table[name] for name in names if name in table})
    with (folder / f"passed{rank}").open("w", buffering=1) as passed:
        for name in names:
            (folder / name).mkdir(exist_ok=True)
            print(name, flush=True)
            check = functools.partial(try_row, rows[name]) if name in rows else getattr(checks, name)
            in_group(rank, size, folder / name, check)
            print(name, file=passed)
