"""The groups of a rank, kept from test to test. What a test has broken is made anew."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from unisono.errors import GroupError, NotSupported, message

if TYPE_CHECKING:
    from unisono import Group
    from unisono.testing import RankRequest

SHORTEST_S = 0.1  # timeout of a group
SETTLE_S = 10.0  # for the last barrier of a test that passed


class Groups:
    """The groups of this process, by what they are made of."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], tuple[Group, Any]] = {}
        self._process_group: tuple[Any, ...] | None = None
        self._in_use: list[Any] = []
        self._generation = 0
        self.run: RankRequest

    def begin(self, run: RankRequest, *, process_group: bool) -> None:
        """Begin a test. process_group: whether it uses that of torch.distributed; otherwise none is left."""
        self._in_use = []
        if run.generation != self._generation:
            self.drop()
            self._generation = run.generation
        local = run.ranks // run.hosts
        numbers = {
            "RANK": run.rank,
            "WORLD_SIZE": run.ranks,
            "LOCAL_RANK": run.rank % local,
            "LOCAL_WORLD_SIZE": local,
            "MASTER_PORT": run.port,
            "UNISONO_RANKS_PER_HOST": local if run.hosts > 1 else 0,
        }
        # For groups that the test makes itself, and for its programs.
        os.environ.update({name: str(value) for name, value in numbers.items()})  # noqa: TID251
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # noqa: TID251
        if self._process_group not in (None, self._key() if process_group else None):
            self._destroy_process_group()
        if self._process_group is None and "torch.distributed" in sys.modules:
            from unisono.torch_internals.c10d import forget_failed_world

            forget_failed_world()  # that of a test

    def group(self, *, use: bool = True) -> Group:
        """The group of this test. use: not only make it before the fixtures of the test are set up.

        Raises:
            RendezvousError: the other ranks did not ask for it.
        """
        run = self.run
        if self._key() not in self._kept:
            from unisono.engine.group import init_process_group
            from unisono.engine.store import FileStore

            store = FileStore(f"{run.folder}-group", linger_s=0.0)  # its end waits for no killed rank
            name = None if run.backend == "unisono" else run.backend
            made = init_process_group(
                name, store=store, rank=run.rank, world_size=run.ranks, timeout=self._left_s()
            )
            self._kept[self._key()] = made, store
        found = self._kept[self._key()][0]
        if use and found not in self._in_use:
            self._in_use.append(found)
            if not found.closed:
                found.timeout_s = self._left_s()
        return found

    def process_group(self) -> Any:
        """The default group of torch.distributed of this test."""
        import torch.distributed as dist

        run = self.run
        if self._process_group is None:
            if run.backend == "nccl":
                import torch

                torch.cuda.set_device(run.rank % torch.cuda.device_count())
            dist.init_process_group(
                run.backend,
                init_method=f"file://{run.folder}-process-group",
                rank=run.rank,
                world_size=run.ranks,
                timeout=timedelta(seconds=self._left_s()),
            )
            self._process_group = self._key()
        if dist.group.WORLD not in self._in_use:
            self._in_use.append(dist.group.WORLD)
        return dist.group.WORLD

    def abandon(self, error: BaseException, *, unused: bool) -> bool:
        """Abort the groups of this test because of an error, so that no rank waits for this one.

        unused: also a group that this rank has not used yet, and others may have.
        Returns: whether there were any.
        """
        if unused and self._key() in self._kept:
            self.group()
        for used in self._in_use:
            try:
                raise error  # the others are told why
            except BaseException:  # noqa: BLE001
                with contextlib.suppress(Exception):  # it has failed already
                    used.abort()
        return bool(self._in_use)

    def settle(self) -> str:
        """End a test that passed here. Returns what it left undone, "" for nothing.

        Raises:
            GroupError: a group of this test has failed, here or on another rank.
        """
        for used in self._in_use:
            if not hasattr(used, "closed"):
                sys.modules["torch.distributed"].barrier()
            elif not used.closed:
                used.barrier(timeout=min(SETTLE_S, self._left_s()))
                with contextlib.suppress(NotSupported, GroupError):
                    from unisono.engine.group import ANY_TAG

                    if (left := used.iprobe(None, ANY_TAG)) is not None:
                        what = f"rank {used.rank} has not received a message of rank {left.source}"
                        return message(what, observed=f"tag {left.tag}, {left.nbytes} bytes")
        return ""

    @property
    def spoiled(self) -> bool:
        """Whether the next test needs other groups: this one closed its group, or made further ones."""
        further = self._process_group and sys.modules["torch.distributed"].get_pg_count() > 1
        return bool(further) or any(group.closed for group, _ in self._kept.values())

    def drop(self) -> None:
        """End all groups."""
        for group, store in self._kept.values():
            group.close()
            store.close()
        self._kept.clear()
        self._destroy_process_group()

    def _left_s(self) -> float:
        return max(self.run.until - time.time(), SHORTEST_S)

    def _key(self) -> tuple[Any, ...]:
        return (self.run.ranks, self.run.hosts, self.run.backend)

    def _destroy_process_group(self) -> None:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()
        self._process_group = None
