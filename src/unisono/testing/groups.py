"""The groups of a rank, kept from test to test. One that a test has broken is made anew."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.errors import GroupError, NotSupported, message

if TYPE_CHECKING:
    from unisono import Group

SHORTEST_S = 0.1  # timeout of a group
SETTLE_S = 10.0  # for the last barrier of a test that passed


class Run(NamedTuple):
    """What a rank knows of the test it runs.

    Attributes:
        until: when it should end, by `time.time()`: a share of its limit.
        meeting: a path that no other test has: where its groups are formed.
        port: free for the test, MASTER_PORT.
    """

    rank: int
    ranks: int
    hosts: int
    backend: str
    until: float
    meeting: str
    port: int


class Groups:
    """The groups of this process, by what they are made of."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Group] = {}
        self._stores: list[Any] = []
        self._process_group: tuple[Any, ...] | None = None
        self._in_use: list[Any] = []
        self._abandoned = False
        self._run = Run(0, 1, 1, "unisono", 0.0, "", 0)

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._run.rank

    def begin(self, run: Run, *, process_group: bool) -> None:
        """Begin a test. process_group: whether it uses that of torch.distributed; otherwise none is left."""
        self._run, self._in_use, self._abandoned = run, [], False
        local = run.ranks // run.hosts
        os.environ.update(  # noqa: TID251  (the test's own programs and groups read them)
            RANK=str(run.rank),
            WORLD_SIZE=str(run.ranks),
            LOCAL_RANK=str(run.rank % local),
            LOCAL_WORLD_SIZE=str(local),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(run.port),
            UNISONO_RANKS_PER_HOST=str(local if run.hosts > 1 else 0),
        )
        if self._process_group not in (None, self._key() if process_group else None):
            self._destroy_process_group()

    def prepare(self) -> None:
        """Make the group of this test before its fixtures are set up."""
        self.group()
        self._in_use.clear()

    def group(self) -> Group:
        """The group of this test.

        Raises:
            RendezvousError: the other ranks did not ask for it.
        """
        run = self._run
        if self._key() not in self._kept:
            from unisono.engine.group import init_process_group
            from unisono.engine.store import FileStore

            # It waits for no rank that has been killed when it is closed.
            self._stores.append(FileStore(f"{run.meeting}-group", linger_s=0.0))
            self._kept[self._key()] = init_process_group(
                None if run.backend == "unisono" else run.backend,
                store=self._stores[-1],
                rank=run.rank,
                world_size=run.ranks,
                timeout=self._left_s(),
            )
        found = self._kept[self._key()]
        if found not in self._in_use:
            self._in_use.append(found)
            if not found.closed:
                found.timeout_s = self._left_s()
        return found

    def process_group(self) -> Any:
        """The default group of torch.distributed of this test."""
        import torch.distributed as dist

        run = self._run
        if self._process_group is None:
            if run.backend == "nccl":
                import torch

                torch.cuda.set_device(run.rank % torch.cuda.device_count())
            dist.init_process_group(
                run.backend,
                init_method=f"file://{run.meeting}-process-group",
                rank=run.rank,
                world_size=run.ranks,
                timeout=timedelta(seconds=self._left_s()),
            )
            self._process_group = self._key()
        if dist.group.WORLD not in self._in_use:
            self._in_use.append(dist.group.WORLD)
        return dist.group.WORLD

    def abandon(self, error: BaseException, *, unused: bool) -> None:
        """Abort the groups of this test because of an error, so that no rank waits for this one.

        unused: also a group that this rank has not used yet, and others may have.
        """
        prepared = self._kept.get(self._key())
        if unused and prepared is not None and prepared not in self._in_use:
            self._in_use.append(prepared)
        self._abandoned |= bool(self._in_use)
        for used in self._in_use:
            try:
                raise error  # the others are told why
            except BaseException:  # noqa: BLE001
                with contextlib.suppress(Exception):  # it has failed already
                    used.abort()

    def settle(self) -> str:
        """End a test that passed here: what it left undone, "" for nothing.

        Raises:
            GroupError: a group of this test has failed, here or on another rank.
        """
        for used in self._in_use:
            if hasattr(used, "closed") and not used.closed:
                used.barrier(timeout=min(SETTLE_S, self._left_s()))
                if left := _messages(used):
                    return left
            elif not hasattr(used, "closed"):
                import torch.distributed as dist

                dist.barrier()
        return ""

    @property
    def spoiled(self) -> bool:
        """Whether the next test needs other groups: this one closed its group, or made further ones."""
        distributed = sys.modules.get("torch.distributed")
        further = self._process_group and distributed and distributed.get_pg_count() > 1
        return self._abandoned or bool(further) or any(each.closed for each in self._kept.values())

    def drop(self) -> None:
        """End all groups."""
        for each in self._kept.values():
            each.close()
        for store in self._stores:
            store.close()
        self._kept.clear()
        self._stores.clear()
        self._destroy_process_group()

    def _left_s(self) -> float:
        return max(self._run.until - time.time(), SHORTEST_S)

    def _key(self) -> tuple[Any, ...]:
        return (self._run.ranks, self._run.hosts, self._run.backend)

    def _destroy_process_group(self) -> None:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()
        self._process_group = None


def _messages(group: Group) -> str:
    from unisono.engine.group import ANY_TAG

    try:
        status = group.iprobe(None, ANY_TAG)
    except (NotSupported, GroupError):
        return ""
    if status is None:
        return ""
    what = f"rank {group.rank} has not received a message of rank {status.source}"
    return message(what, observed=f"tag {status.tag}, {status.nbytes} bytes")
