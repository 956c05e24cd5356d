"""What one rank cannot do raises on all ranks, soon; and what was saved before stays."""

import contextlib
import enum
import gc
import os
import pickle
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import unisono.parallel as up
from effort import SWEEP
from parallel import models
from parallel.run_features import adamw, in_group, made


def all_raise(
    kind: type[Exception] | tuple[type[Exception], ...], text: str, do: Callable[[], object]
) -> None:
    """All ranks raise it, and none waits for the others."""
    began = time.monotonic()
    with pytest.raises(kind, match=text):
        do()
    assert time.monotonic() - began < 45  # the timeout of the group is longer
    dist.barrier()


class FailsOnRank0(nn.Linear):
    def forward(self, given: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            raise LookupError("rank 0 has no weights")
        return super().forward(given)


class Order:
    """A sampler that rank 0 cannot draw from."""

    def __iter__(self) -> Iterator[int]:
        raise PermissionError(13, "Permission denied", "order.txt")

    def __len__(self) -> int:
        return 8


def check_what_rank_0_alone_does_for_the_model(folder: Path) -> None:
    (batch,) = models.vector_batches(1, 8)
    pieces = [FailsOnRank0(16, 16), nn.Linear(16, 4)]
    how: Any = {"optimizer": adamw, "loss": functional.cross_entropy, "sample": batch[0]}
    model = nn.Sequential(*pieces)
    all_raise(
        LookupError,
        "rank 0 has no weights",
        lambda: up.parallelize(model, up.Plan(pipeline=2), pieces=pieces, **how),
    )
    all_raise(ValueError, "rank 0 has no weights", lambda: up.parallelize(model, up.Plan(tensor=2), **how))

    def optimizer(parameters: Any) -> Any:
        if dist.get_rank() == 0:
            raise LookupError("no optimizer on rank 0")
        return adamw(parameters)

    all_raise(
        LookupError,
        "no optimizer on rank 0",
        lambda: up.plan(models.make("mlp"), sample=batch, loss=functional.cross_entropy, optimizer=optimizer),
    )


def check_what_rank_0_alone_draws_and_writes(folder: Path) -> None:
    run = made("mlp", up.Plan(data=2))
    loader = DataLoader(TensorDataset(*models.vector_batches(1, 8)[0]), batch_size=4, sampler=Order())
    all_raise(PermissionError, "order.txt", lambda: next(iter(run.shard(loader))))
    (mine,) = run.shard(models.vector_batches(1, 8))
    run.step(mine, watch=True)
    nowhere = folder / "nowhere" / "at all"
    all_raise(FileNotFoundError, "at all", lambda: run.trace(nowhere))
    (folder / "file").write_text("")
    all_raise(RuntimeError, "rank 0 could not write", lambda: run.export(folder / "file"))
    all_raise((FileExistsError, NotADirectoryError), "file", lambda: run.save(folder / "file"))
    run.save(folder / "run")
    (folder / "run" / "step-00000002.partial").write_text("")  # a file where the folder should be
    run.step(mine)
    for background in (False, True):
        all_raise(FileExistsError, "partial", partial(run.save, folder / "run", background=background))
    (folder / "run" / "step-00000002.partial").unlink(missing_ok=True)
    dist.barrier()
    all_raise(FileNotFoundError, "has no checkpoint", lambda: run.load(nowhere))


@contextlib.contextmanager
def words_kept() -> Iterator[None]:
    """What this process says at its end comes through another one, whose files have no limit."""
    own = os.dup(2)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=own) as other:
        assert other.stdin is not None
        os.dup2(other.stdin.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(own, 2)
            os.close(own)


@contextlib.contextmanager
def files_of_at_most(nbytes: int, *, here: bool) -> Iterator[None]:
    """No file grows further: as on a full disk, and in the middle of a write.

    No garbage is collected meanwhile. A `FileStore` of an ended group writes to its file when it goes, and
    where it cannot, PyTorch ends the process.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    gc.disable()
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        gc.enable()


def check_a_full_disk_at_each_write(folder: Path) -> None:
    """At each of many lengths of the files of either rank: all raise, and load what was saved before."""
    with words_kept():
        fill_the_disk_at_each_write(folder)


def fill_the_disk_at_each_write(folder: Path) -> None:
    run = made("mlp", up.Plan(data=2, zero=2))
    mine = [*run.shard(models.vector_batches(2, 8))]
    run.step(mine[0])
    run.save(folder)
    state, limits = run.state_dict(), list[tuple[int, int]]()
    for culprit in (0, 1):
        whole = (folder / "step-00000001" / f"__{culprit}_0.distcp").stat().st_size
        limits += [(culprit, nbytes) for nbytes in (0, 1, 100, whole // 2, whole - 1)]
    limits = limits if SWEEP else limits[::3]
    limits.append((0, (folder / "step-00000001" / ".metadata").stat().st_size - 1))

    def save(step: int) -> None:
        run.save(folder, background=bool(step % 2))
        run.wait()

    for step, (culprit, nbytes) in enumerate(limits, 2):
        run.steps = step
        with files_of_at_most(nbytes, here=dist.get_rank() == culprit):
            all_raise((RuntimeError, OSError), "cannot be written|File too large", partial(save, step))
        run.load(folder)
        assert run.steps == 1
        assert all(torch.equal(value, state[name]) for name, value in run.state_dict().items())
    run.step(mine[1])
    save(2)
    assert (folder / "step-00000002" / ".metadata").exists()


class Harm:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


class Evaluated:
    def __reduce__(self) -> Any:
        return eval, ("1 + 1",)


class Loaded:
    def __reduce__(self) -> Any:
        return torch.load, ("file",)


def hostile(path: Path, plain: bytes) -> dict[str, bytes]:
    """Name -> what somebody may have put in the place of a checkpoint's metadata."""
    elsewhere = pickle.loads(plain)
    for info in elsewhere.storage_data.values():
        info.relative_path = "../" + info.relative_path
    # the class itself is on the stack, not an instance: c, N, K, b set an attribute of it
    on_class = b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n(N}S'save_id'\nI1\nstb."
    return {
        "a call": pickle.dumps(Harm(path)),
        "a call within": pickle.dumps(metadata.Metadata({"a": Harm(path)})),  # type: ignore[dict-item]
        "eval": pickle.dumps(Evaluated()),
        "torch.load": pickle.dumps(Loaded()),
        "a function by a path": b"\x80\x04\x8c\x05torch\x8c\x08hub.load\x93.",
        "no dtype": b"ctorch\nsave\n.",
        "an attribute of a class": on_class,
        "another class": pickle.dumps(nn.Linear(1, 1)),
        "no metadata": pickle.dumps({"a": 1}),
        "files elsewhere": pickle.dumps(elsewhere),
        "an attribute": b"cbuiltins\ngetattr\n(ctorch\nSize\nV__init__\ntR.",
        "half of it": plain[: len(plain) // 2],
        "nothing": b"",
        "text": b"hello",
    }


class OlderPickler(pickle.Pickler):
    """As Python 3.11.0 to 3.11.3, Debian 12's among them, pickles a member of an enumeration."""

    def reducer_override(self, thing: Any) -> Any:
        return (getattr, (type(thing), thing.name)) if isinstance(thing, enum.Enum) else NotImplemented


def check_a_hostile_checkpoint_runs_nothing(folder: Path) -> None:
    run = made("mlp", up.Plan(data=2, zero=1))
    run.save(folder)
    written = folder / "step-00000000" / ".metadata"
    plain, harm = written.read_bytes(), folder / "harm"
    texts = hostile(harm, plain)
    before = dict(vars(metadata.StorageMeta))
    for name, text in texts.items():
        dist.barrier()
        if dist.get_rank() == 0:
            written.write_bytes(text)
        dist.barrier()
        all_raise(ValueError, "it is damaged", lambda: run.load(folder))
        assert not harm.exists(), name
    assert dict(vars(metadata.StorageMeta)) == before
    dist.barrier()
    if dist.get_rank() == 0:
        with written.open("wb") as file:
            OlderPickler(file).dump(pickle.loads(plain))
        assert b"getattr" in written.read_bytes()
        shutil.rmtree(folder / "step-00000001", ignore_errors=True)
    dist.barrier()
    run.load(folder)


def check_nothing_is_pickled(folder: Path) -> None:
    """Neither a save, a load, a prediction nor a comparison of ranks."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an object collective of PyTorch")

    library: Any = dist.distributed_c10d
    kept = library._object_to_tensor, library._tensor_to_object
    library._object_to_tensor = library._tensor_to_object = refuse
    try:
        batches = models.vector_batches(2, 8)
        for plan in (up.Plan(data=2, zero=3), up.Plan(tensor=2), up.Plan(pipeline=2)):
            run = up.parallelize(
                models.make("mlp"), plan, optimizer=adamw, loss=functional.cross_entropy, check=True
            )
            (mine, other) = run.shard(batches)
            run.step(mine, watch=True)
            run.timeline()
            run.trace(folder / "trace")
            run.save(folder, background=True)
            run.wait()
            run.load(folder)
            run.predict(other[0])
            run.state_dict()
            run.export(folder / "export")
            run.copy_to(models.make("mlp"))
    finally:
        library._object_to_tensor, library._tensor_to_object = kept


def check_all_ranks_load_the_step_of_rank_0(folder: Path) -> None:
    """Another rank, which sees a newer one, does not load that."""
    run = made("mlp", up.Plan(data=2))
    (mine,) = run.shard(models.vector_batches(1, 8))
    run.step(mine)
    run.save(folder)
    if dist.get_rank() == 1:
        listed = Path.glob
        shutil.copytree(folder / "step-00000001", folder.parent / "newer" / "step-00000009")
        newer = folder.parent / "newer"
        Path.glob = lambda path, *how: listed(newer if path == folder else path, *how)  # type: ignore[method-assign]
    try:
        run.load(folder)
    finally:
        if dist.get_rank() == 1:
            Path.glob = listed  # type: ignore[method-assign]
    assert run.steps == 1


def check_wait_is_for_everybody(folder: Path) -> None:
    """When `wait` returns on a rank, the checkpoint has its name, however long rank 0 takes for that."""
    run = made("mlp", up.Plan(data=2))
    (mine,) = run.shard(models.vector_batches(1, 8))
    renamed = Path.rename

    def late(path: Path, target: Path) -> Any:
        time.sleep(1.5 if str(target).startswith(str(folder)) and target.suffix == "" else 0)
        return renamed(path, target)

    Path.rename = late  # type: ignore[method-assign, assignment]
    try:
        for step in (1, 2, 3):
            run.step(mine)
            run.save(folder, background=True)
            run.wait()
            assert (folder / f"step-{step:08}" / ".metadata").exists()
            run.load(folder)
            assert run.steps == step
    finally:
        Path.rename = renamed  # type: ignore[method-assign]


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
