"""One rank of checks of this folder, one after the other: `main(rank, size, folder, module, *names)`.

PyTorch does much when it does something for the first time: here once, not for every check. Each check has a
process group and a folder of its own. The first that fails ends its rank. `passed<rank>` has those before it.
"""

import importlib
from pathlib import Path

for _path in sorted(Path(__file__).parent.glob("*.py")):  # before the ranks are forked
    if "\ndef check_" in _path.read_text():
        importlib.import_module(f"parallel.{_path.stem}")


def main(rank: int, size: int, folder: Path, module: str, *names: str) -> None:
    checks = importlib.import_module(f"parallel.{module}")
    with (folder / f"passed{rank}").open("w", buffering=1) as passed:
        for name in names:
            (folder / name).mkdir(exist_ok=True)
            checks.main(rank, size, folder / name, name)
            print(name, file=passed)
