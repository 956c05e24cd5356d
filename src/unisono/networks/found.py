"""Networks by file name or by the name of one that is shipped."""

from __future__ import annotations

from pathlib import Path

from unisono.networks.description import read
from unisono.networks.network import Network

__all__ = ["find", "shipped"]

FOLDER = Path(__file__).parent / "shipped"


def shipped() -> list[str]:
    """The names of the networks that are shipped."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def find(name: str | Path, size: int = 0) -> Network:
    """The network in a file, or the shipped one of this name.

    A text that ends in .toml or contains a / is a file; all others are names.

    Args:
        size: ranks that are needed; see `description.read`.
    Raises:
        OSError: the file cannot be read.  ValueError: it is wrong, or no network has this name.
    """
    if isinstance(name, Path) or "/" in name or Path(name).suffix == ".toml":
        return read(name, size)
    file = FOLDER / f"{name}.toml"
    if name not in shipped():
        raise ValueError(f"no network {name!r}: expected a file, or one of {', '.join(shipped())}")
    return read(file, size)
