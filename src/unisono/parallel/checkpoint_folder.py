"""The folder of a run's checkpoints: a save that is interrupted leaves the ones before it whole."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint

from unisono.torch.control_data import gather_on_rank_0, on_every_rank, on_rank_0, scatter_from_rank_0

from .mesh import new_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .checkpoint import RunState

__all__ = ["CheckpointWriter", "newest", "path_of"]

dcp: Any = torch.distributed.checkpoint  # its names are there, but PyTorch does not declare them exported


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
        on_rank_0(lambda: _empty(_partial(final)), self._group)
        work = _CheckpointWork(state, final, self._group)
        if not background:
            work.write(keep)
            return
        work.copy()
        self._pending = threading.Thread(target=self._finish, args=(work, keep))
        self._pending.start()

    def wait(self) -> None:
        """Wait for the save in the background; raise its error."""
        if self._pending is not None:
            self._pending.join()
            self._pending = None
        if self._failed:
            raise self._failed.pop()

    def _finish(self, work: _CheckpointWork, keep: int | None) -> None:
        try:
            work.write(keep)
        except BaseException as error:  # noqa: BLE001  (raised by wait, in the caller's thread)
            self._failed.append(error)


class _CopyPlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """Which rank writes what; with copies of this rank's values once `copy` was called."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[Any, Tensor] = {}

    def copy(self, items: Sequence[Any]) -> None:
        self._copies = {item.index: self.resolve_data(item).to("cpu", copy=True) for item in items}

    def resolve_data(self, item: Any) -> Tensor:
        if item.index in self._copies:
            return self._copies.pop(item.index)
        found: Tensor = super().resolve_data(item).detach()
        return found


class _CheckpointWork:
    """What this rank writes of one checkpoint. All ranks make it, and call its methods.

    It is DCP's `save`, whose ranks would pickle what they tell each other.
    """

    def __init__(self, state: RunState, final: Path, group: Any) -> None:
        self._final, self._group = final, group
        self._planner, self._writer = _CopyPlanner(), dcp.FileSystemWriter(_partial(final))
        plans = gather_on_rank_0(lambda: self._local_plan(state), group)
        self._plan: Any = scatter_from_rank_0(lambda: self._plans_of_all(plans), group)

    def _local_plan(self, state: RunState) -> Any:
        first = dist.get_rank(self._group) == 0
        self._planner.set_up_planner(state.tensors(), self._writer.storage_meta(), first)
        self._writer.set_up_storage_writer(first)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _plans_of_all(self, local: list[Any]) -> list[Any]:
        plans, self._metadata = self._planner.create_global_plan(local)
        found: list[Any] = self._writer.prepare_global_plan(plans)
        return found

    def copy(self) -> None:
        """Write the values that there are now, whatever becomes of them."""
        on_every_rank(lambda: self._planner.copy(self._plan.items), self._group)

    def write(self, keep: int | None) -> None:
        """Write, and return when the checkpoint has its name. keep: as `Run.save` takes it."""
        results = gather_on_rank_0(self._written, self._group)
        on_rank_0(lambda: self._publish(results, keep), self._group)

    def _written(self) -> Any:
        try:
            writing = self._writer.write_data(self._planner.finish_plan(self._plan), self._planner)
            return writing.wait()
        except Exception as error:
            where = f"{_partial(self._final)} cannot be written (rank {dist.get_rank()}: {error!r})"
            raise RuntimeError(where) from error

    def _publish(self, results: list[Any], keep: int | None) -> None:
        """Rename the folder after all ranks have written, and delete old checkpoints.

        At every moment there is a whole checkpoint that `newest` finds: an earlier one of the same step is
        moved aside first, and deleted last.
        """
        self._writer.finish(self._metadata, results)
        aside = _aside(self._final)
        if self._final.exists():
            _delete(aside)  # of a save that was interrupted after its last rename
            self._final.rename(aside)
        _partial(self._final).rename(self._final)
        _delete(aside)
        for old in _steps(self._final.parent)[:-keep] if keep else []:
            _delete(old)


def _empty(partial: Path) -> None:
    """Make a new folder."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


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


def _partial(final: Path) -> Path:
    """Where a checkpoint is while it is written."""
    return final.with_suffix(".partial")


def _aside(final: Path) -> Path:
    """Where a checkpoint is while another one of the same step takes its place."""
    return final.with_suffix(".old")


def _delete(path: Path) -> None:
    (path / ".metadata").unlink(missing_ok=True)  # the rest is no longer a checkpoint
    shutil.rmtree(path, ignore_errors=True)
