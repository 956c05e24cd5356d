"""Networks by file name or by the name of one that is shipped."""

from __future__ import annotations

from pathlib import Path

from unisono.engine.base.validation import instance
from unisono.networks.description import read
from unisono.networks.network import Network

__all__ = ["find", "shipped"]

FOLDER = Path(__file__).parent / "shipped"


SUFFIXES = (".toml", ".xml", ".json", ".yaml", ".yml")


def shipped() -> list[str]:
    """The names of the networks that are shipped."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def find(name: str | Path, size: int = 0) -> Network:
    """The network in a file, or the shipped one of this name.

    A text that contains a / or ends in one of `SUFFIXES` is a file; all others are names. XML is NCCL's
    topology or hwloc's, JSON and YAML are InfraGraph's.

    Args:
        size: ranks that are needed; see `description.read`.
    Raises:
        OSError: the file cannot be read.  ValueError: it is wrong, or no network has this name.
        TypeError: it is neither a text nor a Path.
    """
    instance(name, (str, Path), "network")
    if isinstance(name, Path) or "/" in name or Path(name).suffix in SUFFIXES:
        return _of_file(Path(name), size)
    file = FOLDER / f"{name}.toml"
    if name not in shipped():
        raise ValueError(f"no network {name!r}: expected a file, or one of {', '.join(shipped())}")
    return read(file, size)


def _of_file(file: Path, size: int) -> Network:
    if file.suffix == ".xml":
        from unisono.engine.encoding.xml_reader import read as read_xml
        from unisono.networks.hwloc import network_of_topology
        from unisono.networks.nccl import network_of_system

        root = read_xml(file, "")
        if root.name not in ("system", "topology"):
            raise root.error("expected <system>, as NCCL writes, or <topology>, as hwloc does")
        return (network_of_system if root.name == "system" else network_of_topology)(root, file.stem)
    if file.suffix in (".json", ".yaml", ".yml"):
        from unisono.networks.infragraph import read_infragraph

        return read_infragraph(file)
    return read(file, size)
