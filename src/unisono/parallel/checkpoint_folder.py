"""The folder of a run's checkpoints: a save that is interrupted leaves the ones before it whole."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from unisono.torch.checkpoint_work import CheckpointWork
from unisono.torch.control_data import on_rank_0

from .mesh import new_group

if TYPE_CHECKING:
    from .checkpoint import RunState

__all__ = ["CheckpointWriter", "newest", "path_of"]


class CheckpointWriter:
    """Saves of one run, one at a time."""

    def __init__(self, group: Any = None) -> None:
        """group: of all ranks, for the saves only; None: made at the first one."""
        self._group = group
        self._pending: threading.Thread | None = None
        self._failed: list[BaseException] = []

    def save(self, state: RunState, folder: Path, step: int, *, keep: int | None, background: bool) -> None:
        """Write `folder/step-N`; all ranks call this. In the background it writes the values at the time of
        the call.

        Raises:
            RuntimeError: a rank could not write.    OSError: rank 0 could not make or rename the folder.
        """
        self.wait()
        if self._group is None:
            self._group = new_group()
        final = path_of(folder, step)
        partial = final.with_suffix(".partial")
        on_rank_0(lambda: _empty(partial), self._group)
        work = CheckpointWork(state.tensors, partial, self._group)
        if not background:
            work.write(lambda: _publish(partial, final, keep))
            return
        work.copy()
        self._pending = threading.Thread(target=self._finish, args=(work, partial, final, keep))
        self._pending.start()

    def wait(self) -> None:
        """Wait for the save in the background; raise its error."""
        if self._pending is not None:
            self._pending.join()
            self._pending = None
        if self._failed:
            raise self._failed.pop()

    def _finish(self, work: CheckpointWork, partial: Path, final: Path, keep: int | None) -> None:
        try:
            work.write(lambda: _publish(partial, final, keep))
        except BaseException as error:  # noqa: BLE001  (raised by wait, in the caller's thread)
            self._failed.append(error)


def _empty(partial: Path) -> None:
    """Make a new folder."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _publish(partial: Path, final: Path, keep: int | None) -> None:
    """Rename the folder after all ranks have written, and delete old checkpoints.

    At every moment there is a whole checkpoint that `newest` finds: an earlier one of the same step is
    moved aside first, and deleted last.
    """
    aside = _aside(final)
    if final.exists():
        _delete(aside)  # of a save that was interrupted after its last rename
        final.rename(aside)
    partial.rename(final)
    _delete(aside)
    for old in _steps(final.parent)[:-keep] if keep else []:
        _delete(old)


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after so many steps is."""
    return folder / f"step-{step:08}"


def newest(folder: Path) -> Path:
    """Return the newest whole checkpoint in `folder`, or `folder` if it is one.

    Raises:
        FileNotFoundError: there is none.
    """
    if _is_whole(folder):
        return folder
    steps = _steps(folder)
    if not steps:
        raise FileNotFoundError(f"{folder} has no checkpoint: no step-N that was written to its end")
    return steps[-1]


def _steps(folder: Path) -> list[Path]:
    """The whole checkpoints, oldest first."""
    finals = {Path(path.with_suffix("")) for path in folder.glob("step-????????*")}
    found = (final if _is_whole(final) else _aside(final) for final in sorted(finals))
    return [path for path in found if _is_whole(path)]


def _is_whole(path: Path) -> bool:
    return (path / ".metadata").exists()  # written last, deleted first


def _aside(final: Path) -> Path:
    """Where a checkpoint is while another one of the same step takes its place."""
    return final.with_suffix(".old")


def _delete(path: Path) -> None:
    (path / ".metadata").unlink(missing_ok=True)  # the rest is no longer a checkpoint
    shutil.rmtree(path, ignore_errors=True)
