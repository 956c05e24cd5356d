"""Reads the metadata of a checkpoint of PyTorch's DCP, which is a pickle: it may be from anybody."""

from __future__ import annotations

from enum import EnumMeta
from pathlib import Path
from pickle import Unpickler, UnpicklingError  # noqa: TID251  (of the classes of metadata only)
from typing import Any

import torch
import torch.distributed.checkpoint.filesystem
from torch.distributed.checkpoint import metadata

from .probe import PrivateName, find

__all__ = ["NAMES", "CheckpointReader"]

WITHOUT = "a checkpoint that was written with it cannot be loaded"
NAMES = {
    name: PrivateName(f"torch.{path}", purpose="read the metadata of a checkpoint", without=WITHOUT)
    for name, path in {
        "format": "distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
        "place": "distributed.checkpoint.filesystem:_StorageInfo",
        "layout": "serialization:_get_layout",
    }.items()
}
DAMAGED = (EOFError, LookupError, AttributeError, TypeError, ValueError, UnpicklingError)
CLASSES: tuple[Any, ...] = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    torch.Size,
)


class CheckpointReader(torch.distributed.checkpoint.filesystem.FileSystemReader):
    """Reads tensors of one checkpoint. Its metadata make instances of `CLASSES` and plain data, no others."""

    _metadata: Any = None

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """What the checkpoint has. The file is read once.

        Raises:
            OSError: there is no such file.    ValueError: it is damaged, or has what no metadata have.
        """
        if self._metadata is None:
            with (Path(self.path) / ".metadata").open("rb") as file:
                try:
                    self._metadata = _checked(_MetadataUnpickler(file).load())
                except DAMAGED as error:
                    raise ValueError(f"{self.path} cannot be read ({error!r}): it is damaged") from error
        return self._metadata  # type: ignore[no-any-return]


def _path(*parts: str) -> str:
    """In place of a path, which metadata have for information only."""
    return "/".join(parts)


def _member(kind: Any, name: Any) -> Any:
    """In place of getattr, by which Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""
    if not isinstance(kind, EnumMeta) or not isinstance(name, str) or name not in kind.__members__:
        raise UnpicklingError("it asks for an attribute")
    return kind.__members__[name]


class _MetadataUnpickler(Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        known = [*CLASSES, *filter(None, map(find, NAMES.values()))]
        self._known = {f"{one.__module__}.{one.__qualname__}": one for one in known}
        self._known |= dict.fromkeys(("pathlib.PosixPath", "pathlib._local.PosixPath"), _path)
        self._known["builtins.getattr"] = _member

    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get(f"{module}.{name}")
        if found is None and module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            found = vars(torch)[name]
        if found is None:
            raise UnpicklingError(f"it names {module}.{name}, which no metadata have")
        return found

    def load(self) -> Any:
        """Refuse a pickle that has changed a class."""
        before = [(one, dict(vars(one))) for one in self._known.values()]
        try:
            return super().load()
        finally:
            changed = [name for one, kept in before for name in _restore(one, kept)]
            if changed:
                raise UnpicklingError(f"it sets {changed[0]}")


def _restore(thing: Any, kept: dict[str, Any]) -> list[str]:
    """Undo what was set; return the names."""
    now = dict(vars(thing))
    names = [name for name in {**now, **kept} if now.get(name) is not kept.get(name)]
    for name in names:
        delattr(thing, name)
        if name in kept:
            setattr(thing, name, kept[name])
    return names


def _checked(found: Any) -> Any:
    """Refuse files that are not in the folder of the checkpoint."""
    if not isinstance(found, metadata.Metadata):
        raise UnpicklingError(f"it is a {type(found).__name__}")
    for place in (found.storage_data or {}).values():
        if "/" in place.relative_path:
            raise UnpicklingError(f"it names the file {place.relative_path!r}")
    return found
