"""One rank of a job that publishes, or of one that takes: `publish_ranks.py SIDE MODE RANK SIZE FOLDER`."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import unisono as un
from effort import HANG_S
from unisono.engine.publishing.boxes import Box, split

SIDE, MODE, RANK, SIZE, FOLDER = (
    sys.argv[1],
    sys.argv[2],
    int(sys.argv[3]),
    int(sys.argv[4]),
    Path(sys.argv[5]),
)
LARGE = (64, 1 << 16)  # 16 MiB of float32
DTYPES = ["float32", "int8", "complex128", "bool", "<M8[s]"]


def tell(name: str, text: str = "") -> None:
    """Write a file for the other side and the test, at once."""
    new = FOLDER / f"{name}.{SIDE}{RANK}"
    new.write_text(text)
    new.rename(FOLDER / name)


def heard(name: str) -> str:
    """Wait for such a file."""
    until = time.monotonic() + HANG_S / 2
    while not (FOLDER / name).exists():
        assert time.monotonic() < until, name
        time.sleep(0.002)
    return (FOLDER / name).read_text()


def published(group: un.Group, arrays: Any, **options: Any) -> un.Publication:
    """The publication, whose address the takers read."""
    publication = un.publish("policy", arrays, group=group, **options)
    if group.rank == 0:
        tell("address", publication.address)
    return publication


def shapes(seed: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Names, shapes and types, the same on both sides."""
    draw = random.Random(seed)
    return {
        f"a{number}": (tuple(draw.randint(1, 9) for _ in range(number % 4)), draw.choice(DTYPES))
        for number in range(9)
    }


def whole(number: int, shape: tuple[int, ...], dtype: str, version: int) -> np.ndarray[Any, Any]:
    """The values of an array in a version."""
    values = np.random.default_rng([number, version]).integers(0, 100, shape)
    return values.astype(dtype)


def slices(box: Box) -> tuple[Any, ...]:
    """The indices of a box in its whole array."""
    return box.within(Box((0,) * len(box.shape), box.shape))


def cut_at_random(shape: tuple[int, ...], draw: random.Random) -> list[Box]:
    """A cut of an array into boxes, some of which are cut again."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw.randint(0, 3)):
        one = boxes.pop(draw.randrange(len(boxes)))
        turned = draw.randrange(len(shape)) if shape else 0  # cut along another dimension than the first
        order = [*range(turned, len(shape)), *range(turned)]
        parts = split(Box(*(tuple(it[dim] for dim in order) for it in one)), draw.randint(1, 3))
        back = [order.index(dim) for dim in range(len(shape))]
        boxes += [Box(*(tuple(it[dim] for dim in back) for it in part)) for part in parts]
    return boxes


def cuts(group: un.Group) -> None:
    """Random cuts on both sides, some pieces on several ranks; every version is equal to NumPy's slices."""
    for seed in range(4):
        draw = random.Random(seed)
        kinds = shapes(seed)
        if SIDE == "publish":
            mine: dict[str, list[tuple[Box, tuple[int, ...], str, int]]] = {}
            for number, (name, (shape, dtype)) in enumerate(kinds.items()):
                for box in cut_at_random(shape, draw):
                    if group.rank in draw.sample(range(group.size), draw.randint(1, group.size)):
                        mine.setdefault(name, []).append((box, shape, dtype, number))

            def pieces(version: int, mine: Any = mine) -> dict[str, list[un.Piece]]:
                return {
                    name: [
                        un.Piece(whole(number, shape, dtype, version)[slices(box)], box.offset, shape)
                        for box, shape, dtype, number in its
                    ]
                    for name, its in mine.items()
                }

            publication = un.publish(f"cuts{seed}", pieces(1), group=group, delta=seed % 2 == 1)
            if group.rank == 0:
                tell(f"address{seed}", publication.address)
            for version in range(2, 4):
                publication.update(pieces(version))
            group.barrier()
            heard(f"done{seed}")
            publication.close()
        else:
            own = random.Random(f"{seed} {group.rank}")

            def cut(name: str, shape: tuple[int, ...], own: Any = own) -> tuple[slice, ...] | None:
                if own.random() < 0.1:
                    return None
                return tuple(slice(*sorted(own.sample(range(length + 1), 2))) for length in shape)

            chosen: dict[str, Any] = {}

            def kept(name: str, shape: tuple[int, ...], chosen: Any = chosen, cut: Any = cut) -> Any:
                return chosen.setdefault(name, cut(name, shape))

            subscription = un.subscribe(heard(f"address{seed}"), f"cuts{seed}", cut=kept, group=group)
            version, compared = 0, 0
            while version < 3:
                version, arrays = subscription.get(version)
                assert arrays.keys() == {name for name, it in chosen.items() if it is not None}
                for number, (name, (shape, dtype)) in enumerate(kinds.items()):
                    if chosen[name] is not None:
                        expected = whole(number, shape, dtype, version)[(*chosen[name], ...)]
                        np.testing.assert_array_equal(arrays[name], expected)
                        compared += 1
            assert compared
            group.barrier()
            tell(f"done{seed}")
    print("equal")


def endless(group: un.Group, publication: un.Publication, mine: np.ndarray[Any, Any]) -> None:
    """Versions one after the other, whose number all elements have, until the test says so."""
    while not all(group.all_gather_object((FOLDER / "enough").exists())):
        mine[:] = publication.version + 1
        publication.update(timeout=0.3)


def versions(group: un.Group) -> None:
    """Updates run while others take: all elements, of all names and ranks, are of one version."""
    if SIDE == "publish":
        mine = np.ones((LARGE[0], LARGE[1] // SIZE), np.float32)
        part = un.Piece(mine, (0, RANK * mine.shape[1]), LARGE)
        endless(group, published(group, {"a": part, "b": part}), mine)
        print("published", flush=True)
        return
    half, last = {"*": 0}, 0  # whole numbers to 2,048 are exact in fp16
    subscription = un.subscribe(heard("address"), "policy", cut=half, group=group, codec="fp16")
    for _ in range(12):
        version, arrays = subscription.get(last)
        assert version > last
        assert {version} == set(group.all_gather_object(version))
        for one in arrays.values():
            assert (one == version).all()
        last = version
        if RANK == 0:
            tell("taken", str(version))
    group.barrier()
    tell("enough")
    print("one version each")


def losses(group: un.Group) -> None:
    """Takers that take until something is lost; the test kills or stops one of the ranks."""
    if SIDE == "publish":
        mine = np.ones((LARGE[0], LARGE[1] // SIZE), np.float32)
        publication = published(group, {"a": un.Piece(mine, (0, RANK * mine.shape[1]), LARGE)})
        try:
            endless(group, publication, mine)
            print("published", flush=True)
        except un.PeerLost as error:
            print(f"lost rank {error.rank}", flush=True)
        os._exit(0)
    subscription, version = un.subscribe(heard("address"), "policy", group=group), 0
    try:
        while not (FOLDER / "enough").exists():
            version, arrays = subscription.get(timeout=60)
            assert (arrays["a"] == version).all()
            tell(f"taken{RANK}", str(version))
        print("took", flush=True)
    except un.PeerLost as error:
        tell(f"lost{RANK}", str(time.time()))
        assert subscription.closed
        print(f"lost rank {error.rank}", flush=True)
    os._exit(0)


def main() -> None:
    """Meet the ranks of this side, and do what the mode says."""
    tell(f"pid-{SIDE}{RANK}", str(os.getpid()))
    group = un.init_process_group(init_method=f"file://{FOLDER}/{SIDE}", rank=RANK, world_size=SIZE)
    modes: list[Callable[[un.Group], None]] = [cuts, versions, losses]
    with group:
        next(one for one in modes if one.__name__ == MODE)(group)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main()
